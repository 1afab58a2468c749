"""Weights in the data type of a Hugging Face directory, and the files beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

NamedTensors = Iterator[tuple[str, Tensor]]

WRITER = "slime-trainer"
# Files of a model directory beside its weights, copied from the directory that the weights came from.
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


def copy_side_files(source: Path, target: Path, dtype: str | None = None) -> None:
    """Copies config, tokenizer and chat template; the config names the `dtype` of the written weights, without which
    they are as the config says."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    if dtype is None:
        return
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def as_dtype(weights: NamedTensors, dtype: torch.dtype, *, on_device: bool = False) -> NamedTensors:
    """Yields floating-point tensors in `dtype`, others as they are; on the CPU unless `on_device`, contiguous."""
    for name, tensor in weights:
        wanted = dtype if tensor.is_floating_point() else tensor.dtype
        yield name, tensor.detach().to(tensor.device if on_device else "cpu", wanted).contiguous()
