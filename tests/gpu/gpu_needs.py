"""Needs of the GPU tests: a mark that skips where one is missing, and a small model and samples to train it on."""

from __future__ import annotations

import importlib.util
import os
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
