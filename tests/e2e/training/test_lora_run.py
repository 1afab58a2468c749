"""A run that trains LoRA adapters: engines hold the merged weights, and it resumes bit for bit from small checkpoints.

tests/slow/test_slow_estimators.py shows that such a run learns.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import torch
from safetensors.torch import load_file

from tiny_runs import metrics, run, timeless

LORA = ("--lora-rank", "4", "--lora-target-modules", "all-linear", "lm_head", "--check-weight-update-equal")
NUM_GPUS = 0


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Returns the weights that an adapter makes of a model."""
    found, parts = load_file(base), load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    for name, weight in found.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in parts:
            update = parts[f"{layer}.lora_B.weight"] @ parts[f"{layer}.lora_A.weight"]
            found[name] = weight + config["lora_alpha"] / config["r"] * update
    return found


def test_a_run_with_lora_resumes_bit_for_bit_and_exports_merged_weights(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    output = run(whole, "--num-rollout", "4", "--save-interval", "2", *LORA)
    words = r"LoRA of rank 4, alpha 32, all-linear lm_head: [0-9,]+ parameters train, [0-9.]+% of the model's"
    assert re.search(words, output), output
    load = ("--load", str(whole / "checkpoints" / "step_000001"))
    run(resumed, "--num-rollout", "4", "--save-interval", "2", *LORA, *load)
    assert timeless(metrics(resumed)) == timeless(metrics(whole))[2:] and len(metrics(whole)) == 4
    for row in metrics(whole):
        # Engine and trainer agree, so that the engine has the adapters too.
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-4
    (model,) = (path for path in (whole / "inputs").rglob("model.safetensors"))
    exported = load_file(whole / "model" / "model.safetensors")
    for name, weight in merged(model, whole / "model" / "adapter").items():
        torch.testing.assert_close(exported[name], weight)
    checkpoint = whole / "checkpoints" / "step_000003"
    assert not (checkpoint / "model.safetensors").exists()
    adapter = (checkpoint / "adapter_model.safetensors").read_bytes()
    assert adapter == (resumed / "checkpoints" / "step_000003" / "adapter_model.safetensors").read_bytes()
    assert adapter == (whole / "model" / "adapter" / "adapter_model.safetensors").read_bytes()
    assert len(adapter) < os.path.getsize(model) / 2
