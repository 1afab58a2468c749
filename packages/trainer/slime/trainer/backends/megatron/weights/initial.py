"""Weights that a model starts with: from a Hugging Face directory or from a torch_dist checkpoint of any layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slime.converters.files.rectangles import Index, Shape
from slime.converters.torch_dist.directory import is_torch_dist
from slime.converters.torch_dist.keys import other_keys
from slime.converters.torch_dist.reader import Parameters, TorchDist
from slime.trainer.backends.megatron.weights import hf, sharded_state
from slime.types.errors import InvalidFile, NotFound

Chunks = list[torch.nn.Module]


def load(chunks: Chunks, args: Mapping[str, Any], config: Mapping[str, Any], path: str, *, flag: str) -> None:
    """Loads this rank's part. Raises MissingFile, or InvalidFile naming the tensor and, of a checkpoint, `flag`."""
    if not is_torch_dist(path):
        hf.load_hf(chunks, args, config, path)
        return
    checkpoint = TorchDist(path)
    _check_shapes(checkpoint, args, config, flag)
    read = reading(checkpoint, flag)
    sharded_state.load_model(chunks, _reading_values(checkpoint, read) if hf.has_value_head(config) else read)
    checkpoint.close()


def _check_shapes(checkpoint: TorchDist, args: Mapping[str, Any], config: Mapping[str, Any], flag: str) -> None:
    """Raises InvalidFile for tensors of other shapes: a part of a larger tensor would be read as the whole. Missing
    tensors are found when they are read."""
    found = Parameters(checkpoint, args)
    for parameter in hf.table(args, config).values():
        if parameter.name == hf.OUTPUT and hf.has_value_head(config):
            continue
        try:
            found.check(parameter)
        except NotFound:
            continue
        except InvalidFile as error:
            raise InvalidFile(f"{flag}: {error}", field=flag, value=error.value, expected=error.expected) from None


def reading(checkpoint: TorchDist, flag: str) -> sharded_state.Read:
    """Returns a reader of parts of its tensors; rows of a vocabulary that has more padding here become zeros."""

    def read(key: str, index: Index, out: Tensor) -> None:
        stored_name = next((name for name in _names(key) if name in checkpoint.tensors), None)
        if stored_name is None:
            raise InvalidFile(f"{flag}: {checkpoint.directory} has no tensor {key}", field=flag, value=key)
        kept = _rows_there(index, checkpoint.tensors[stored_name].shape)
        out[kept:] = 0
        if kept:
            checkpoint.read(stored_name, (slice(index[0].start, index[0].start + kept), *index[1:]), out[:kept])

    return read


def _reading_values(checkpoint: TorchDist, read: sharded_state.Read) -> sharded_state.Read:
    """Returns `read` for a critic: its head is zeros where the checkpoint is of a model without one."""
    saved = checkpoint.tensors.get(hf.OUTPUT)
    has_head = saved is not None and saved.shape[0] == 1

    def read_part(key: str, index: Index, out: Tensor) -> None:
        if key == hf.OUTPUT and not has_head:
            out.zero_()
        else:
            read(key, index, out)

    return read_part


def _names(key: str) -> list[str]:
    """Lists names that a tensor may have: each of Megatron's optimizers has its own for float32 weights, or none, and
    norms have other names with Transformer Engine, or in the original."""
    match = re.fullmatch(r"optimizer\.state\.(?:param|fp32_param)\.(.*)", key)
    prefixes = ("optimizer.state.param.", "optimizer.state.fp32_param.", "") if match else ()
    names = [key, *(prefix + match[1] for prefix in prefixes if match)]
    kinds = ({"latent": False, "across_heads": True}, {"latent": True})
    return [*names, *(other for name in names for kind in kinds for other in other_keys(name, **kind))]


def _rows_there(index: Index, shape: Shape) -> int:
    rows = index[0]
    return max(0, min(rows.stop, shape[0]) - rows.start) if shape else rows.stop - rows.start
