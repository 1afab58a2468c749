"""Needs of the GPU tests: a mark that skips where one is missing, small models, and samples and runs to train them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.rollout.engines.gpus import visible_gpus
from slime.types import Sample

MODEL = os.environ.get("SLIME_TEST_MODEL", "")
ATTENTION = os.environ.get("SLIME_TEST_ATTENTION", "fa3")


def needs(gpus: int, *packages: str, model: bool = False) -> pytest.MarkDecorator:
    """Skips without so many GPUs, these packages, or with `model` a directory in SLIME_TEST_MODEL."""
    found = len(visible_gpus())
    missing = [f"{gpus} GPU(s) needed, {found} visible"] if found < gpus else []
    missing += [f"{name} is not installed" for name in packages if importlib.util.find_spec(name) is None]
    missing += ["SLIME_TEST_MODEL names no model"] if model and not MODEL else []
    return pytest.mark.skipif(bool(missing), reason=", ".join(missing))


def write_qwen3(path: Path, **config: Any) -> str:
    """Writes a random dense model in bfloat16; returns its directory."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen3Config(**config), dtype=torch.bfloat16).save_pretrained(path)
    return str(path)


def write_words_qwen3(path: Path, words: int) -> str:
    """Writes a random Qwen3 with heads of 128, and a tokenizer by `write_words`; returns its directory."""
    write_words(path, words)
    return write_qwen3(
        path, vocab_size=words, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=128, initializer_range=0.05, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip


def write_fp8_qwen3(path: Path, **config: Any) -> str:
    """Writes a random dense model as Qwen3-*-FP8 are: its projections in FP8 in blocks of 128 x 128; returns its
    directory."""
    from safetensors.torch import save_file

    from slime.converters.convert import fp8
    from slime.converters.files.safetensors_dir import SafetensorsDir

    block, stored = (128, 128), {}
    for name, tensor in dict(SafetensorsDir(write_qwen3(path, **config))).items():
        stored[name] = tensor
        if "_proj" in name:
            stored[name], stored[name + fp8.SCALE_SUFFIX] = fp8.quantize(tensor, block)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    about = json.loads((path / "config.json").read_text())
    about["quantization_config"] = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(block),
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(about))
    return str(path)


def write_int4_qwen3(path: Path, group: int, **config: Any) -> str:
    """Writes a random model in INT4 in groups, as llm-compressor does: its projections, or with `num_experts` those of
    its experts alone, as Kimi-K2-Thinking is; returns its directory."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    from slime.converters.convert import int4
    from slime.converters.files.safetensors_dir import SafetensorsDir

    torch.manual_seed(0)
    kind = Qwen3MoeConfig if "num_experts" in config else Qwen3Config
    AutoModelForCausalLM.from_config(kind(**config), dtype=torch.bfloat16).save_pretrained(path)
    part, stored = (".experts." if "num_experts" in config else "_proj"), {}
    for name, tensor in dict(SafetensorsDir(path)).items():
        if part not in name:
            stored[name] = tensor
            continue
        stored[name + int4.PACKED_SUFFIX], stored[name + int4.SCALE_SUFFIX] = int4.quantize(tensor, group)
        stored[name + int4.SHAPE_SUFFIX] = torch.tensor(tensor.shape)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    weights = {
        "actorder": None, "dynamic": False, "group_size": group, "num_bits": 4, "observer": "minmax",
        "strategy": "group", "symmetric": True, "type": "int",
    }  # fmt: skip
    groups = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": weights}
    plain = ["lm_head"] + (["re:.*self_attn.*", "re:.*mlp.gate$"] if "num_experts" in config else [])
    about = json.loads((path / "config.json").read_text())
    about["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": groups},
        "ignore": plain, "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(about))
    return str(path)


def write_words(path: Path, words: int) -> None:
    """Writes a tokenizer with a word for each token: w0, which pads, w1, which ends, w2 ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w0", eos_token="w1").save_pretrained(path)


def make_samples(step: int, vocab_size: int, **fields: Any) -> list[Sample]:
    """Makes four groups of four, with 64 tokens of prompt and 192 of response, and rewards 0 and 1."""
    random = np.random.default_rng(step)
    return [
        Sample(
            index=i, group_index=i // 4, tokens=random.integers(3, vocab_size, 256).astype(np.int32),
            response_length=192, loss_mask=np.ones(192, np.uint8), reward=float(i % 2), **fields,
        )
        for i in range(16)
    ]  # fmt: skip


def train_on_words(
    directory: Path,
    model: str,
    words: int,
    *switches: str,
    meanwhile: Callable[[Path], None] | None = None,
    **flags: Any,
) -> list[dict[str, Any]]:
    """Trains a model with `write_words` by `slime train` and SGLang: three iterations with random rewards, and every
    update of weights is checked. Returns the metrics of each iteration.

    switches, flags: of `slime train`, by their settings' names; flags replace those below. The trainer shares its GPU
    with the engine unless `rollout_num_gpus` is among them. meanwhile: called with the directory of the run as soon as
    its first iteration has ended.
    """
    prompts, run = directory / "prompts.jsonl", directory / "run"
    random = np.random.default_rng(1)
    texts = (" ".join(f"w{i}" for i in random.integers(3, words, 24)) for _ in range(64))
    prompts.write_text("".join(json.dumps({"prompt": text, "label": "1"}) + "\n" for text in texts))
    values = {
        "hf_checkpoint": model, "output_dir": run, "prompt_data": prompts, "input_key": "prompt", "label_key": "label",
        "rm_type": "random", "train_backend": "fsdp", "rollout_engine": "sglang", "num_rollout": 3,
        "rollout_batch_size": 8, "n_samples_per_prompt": 4, "rollout_max_response_len": 32,
        "max_tokens_per_gpu": 4096, "sglang_mem_fraction_static": 0.3, "sglang_attention_backend": ATTENTION,
        "sglang_max_total_tokens": 65536,
    } | flags  # fmt: skip
    shares = () if "rollout_num_gpus" in flags else ("colocate",)
    names = ("use_dynamic_batch_size", "check_weight_update_equal", *shares, *switches)
    given = {name: value if isinstance(value, list) else [value] for name, value in values.items() if value is not None}
    typed = [word for name, words in given.items() for word in (_flag(name), *map(str, words))]
    command = [sys.executable, "-m", "slime.launcher.cli", "train", *typed, *map(_flag, names)]
    output = directory / "output.txt"
    with output.open("w") as written, subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT) as process:
        try:
            if meanwhile is not None:
                deadline = time.monotonic() + 400
                while process.poll() is None and not steps_of(run) and time.monotonic() < deadline:
                    time.sleep(0.1)
                meanwhile(run)
            process.wait(500)
        finally:
            # As a user would end it, so that its engines end too.
            process.terminate()
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted((run / "logs").glob("*.log")))
    assert process.returncode == 0, output.read_text()[-6000:] + logs
    steps = steps_of(run)
    for step in steps:
        print({name: step.get(name) for name in ("train/train_rollout_logprob_abs_diff", "train/grad_norm")})
        assert step["train/grad_norm"] > 0
    assert len(steps) == values["num_rollout"]
    return steps


def steps_of(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics of the iterations that have ended."""
    metrics = run / "metrics.jsonl"
    # The last line may be half written.
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [row for row in map(json.loads, lines) if "perf/step_time" in row]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
