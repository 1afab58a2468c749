"""Weights in INT4 as a checkpoint holds them: `NAME_packed`, `NAME_scale` and `NAME_shape` in place of `NAME`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from slime.converters.convert import int4
from slime.converters.files import rectangles
from slime.converters.files.dtypes import DTYPES
from slime.converters.files.rectangles import Index, Stored
from slime.converters.files.safetensors_dir import SafetensorsDir, TensorInfo
from slime.types.errors import InvalidFile

# The type in which a packed weight is read.
READ_AS = "BF16"


@dataclass(frozen=True)
class PackedWeight:
    """The tensors of one weight. whole: the weight that they stand for, as if it was stored where `packed` is."""

    whole: TensorInfo
    packed: TensorInfo
    scale: TensorInfo
    shape: TensorInfo

    @property
    def group(self) -> int:
        return self.whole.shape[1] // self.scale.shape[1]


def packed_weights(directory: SafetensorsDir, group: int) -> dict[str, PackedWeight]:
    """Returns the packed weights of a directory by name. Raises InvalidFile where one lacks a scale or its shape."""
    found = {}
    for info in directory.tensors.values():
        if not info.name.endswith(int4.PACKED_SUFFIX) or info.dtype != "I32":
            continue
        name = info.name.removesuffix(int4.PACKED_SUFFIX)
        scale, shape = (directory.tensors.get(name + suffix) for suffix in (int4.SCALE_SUFFIX, int4.SHAPE_SUFFIX))
        rows, words = info.shape if len(info.shape) == 2 else (0, 0)
        columns = words * int4.PER_WORD
        divided = columns > 0 and columns % group == 0 and scale is not None and scale.shape == (rows, columns // group)
        if not divided or scale is None or shape is None or shape.shape != (2,):
            raise InvalidFile(
                f"{directory.path}: {info.name} is int4 and has no {name}{int4.SCALE_SUFFIX} for groups of {group}, or "
                f"no {name}{int4.SHAPE_SUFFIX}",
                field=info.name, expected=f"a matrix, {name}{int4.SCALE_SUFFIX} and {name}{int4.SHAPE_SUFFIX}",
            )  # fmt: skip
        size = rows * columns * DTYPES[READ_AS].itemsize
        whole_info = replace(info, name=name, dtype=READ_AS, shape=(rows, columns), num_bytes=size)
        found[name] = PackedWeight(whole_info, info, scale, shape)
    return found


def read_packed(weight: PackedWeight, index: Index, out: torch.Tensor, descriptor: Callable[[Path], int]) -> None:
    """Reads: `out[:] = weight[index]`, in bfloat16 as it is dequantized. descriptor(file): of the open file.

    Converts some rows after the other, so that only they are in memory as float32.
    """
    rows, columns = index
    first_group, last_group = columns.start // weight.group, -(-columns.stop // weight.group)
    width = (last_group - first_group) * weight.group
    skipped = columns.start - first_group * weight.group
    words = slice(first_group * weight.group // int4.PER_WORD, last_group * weight.group // int4.PER_WORD)
    step = max(1, rectangles.BUFFER_BYTES // (4 * max(1, width)))
    for first in range(rows.start, rows.stop, step):
        part = slice(first, min(first + step, rows.stop))
        packed = _rows(weight.packed, part, words, descriptor)
        scales = _rows(weight.scale, part, slice(first_group, last_group), descriptor)
        values = int4.dequantize(packed, scales)[:, skipped : skipped + columns.stop - columns.start]
        out[part.start - rows.start : part.stop - rows.start].copy_(values.to(DTYPES[READ_AS]))


def _rows(info: TensorInfo, rows: slice, columns: slice, descriptor: Callable[[Path], int]) -> torch.Tensor:
    stored = Stored(info.file, info.offset, DTYPES[info.dtype], info.shape)
    out = torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=stored.dtype)
    rectangles.read(descriptor(info.file), stored, (rows, columns), out)
    return out
