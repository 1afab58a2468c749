"""Reads tensors of a Hugging Face directory, or any part of one, in any dtype, with fp8 and int4 converted back.

DeepSeek's fp8 checkpoints keep `NAME.weight` in float8 and, for every block of 128 x 128 of it, a factor in
`NAME.weight_scale_inv`; int4 checkpoints keep `NAME.weight_packed` and more in its place (`packed_weights.py`). Read
here, such a weight is bfloat16.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.converters.convert.fp8 import SCALE_SUFFIX, grid
from slime.converters.convert.packed_weights import packed_weights, read_packed
from slime.converters.convert.quantization_config import block_size, group_size, quantization_of
from slime.converters.families.mapping import Parameter
from slime.converters.files import rectangles
from slime.converters.files.adapter import WEIGHTS_FILE
from slime.converters.files.dtypes import DTYPES
from slime.converters.files.rectangles import Index, Shape, Stored
from slime.converters.files.safetensors_dir import SafetensorsDir, TensorInfo
from slime.types.errors import InvalidFile, NotAvailable, NotFound

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHOWN = 10


class HfSource:
    """The weights of a Hugging Face directory. weights: their headers. dtype(name): the dtype in which `load` reads a
    tensor by default.

    Raises MissingFile, InvalidFile; NotAvailable for a quantisation other than fp8 in blocks and int4 in groups.
    """

    def __init__(self, path: str | Path, config: Mapping[str, Any]) -> None:
        self.weights = SafetensorsDir(path)
        self.path = self.weights.path
        if [file.name for file in self.weights.files] == [WEIGHTS_FILE]:
            raise NotAvailable.unavailable(
                f"{self.path} as a model", "it holds a LoRA adapter, without the weights under it",
                "the model that a run writes at its end, or --save-hf during it: both are merged",
            )  # fmt: skip
        self.scales = {
            name: name.removesuffix(SCALE_SUFFIX) for name in self.weights.tensors if name.endswith(SCALE_SUFFIX)
        }
        quantization = quantization_of(config)
        self.is_quantized = quantization is not None
        self.block = block_size(quantization or {})
        group = group_size(quantization or {})
        if quantization is not None and self.block is None and group is None:
            method, size = quantization.get("quant_method"), quantization.get("weight_block_size")
            raise NotAvailable.unavailable(
                f"quantization_config with quant_method {method!r} and weight_block_size {size!r}",
                f"{self.path}/config.json has it; weights in blocks of fp8, in groups of symmetric int4 and plain ones "
                "are read",
            )
        self.packed = {} if group is None else packed_weights(self.weights, group)
        self.tensors = self._tensors()
        self._descriptors: dict[Path, int] = {}

    def _tensors(self) -> dict[str, TensorInfo]:
        """Returns the tensors by name, without factors of fp8, and with the weights that packed tensors stand for."""
        starts = {weight.packed.name: weight.whole for weight in self.packed.values()}
        hidden = {info.name for weight in self.packed.values() for info in (weight.scale, weight.shape)}
        found = {}
        for name, tensor in self.weights.tensors.items():
            if name in starts:
                found[starts[name].name] = starts[name]
            elif name not in self.scales and name not in hidden:
                found[name] = tensor
        return found

    def dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which a tensor is read: the source's, bfloat16 for fp8 and int4. Raises NotAvailable."""
        kind = self._info(name).dtype
        if kind not in DTYPES:
            raise NotAvailable.unavailable(f"{name} of dtype {kind}", f"{self.path} holds it")
        dtype = DTYPES[kind]
        return torch.bfloat16 if dtype in FLOAT8 else dtype

    def check(self, parameters: Iterable[Parameter], ignored: Iterable[str]) -> None:
        """Compares the headers with the tensors that the parameters are made of.

        ignored: patterns of names that may be there too. Raises InvalidFile naming missing and unexpected tensors,
        tensors of another shape or of integers, and fp8 tensors without their factors.
        """
        wanted: dict[str, Shape] = {block.name: block.shape for p in parameters for block in p.blocks}
        tensors, patterns = self.tensors, [re.compile(pattern) for pattern in ignored]
        missing = sorted(wanted.keys() - tensors.keys())
        unexpected = [
            name
            for name in sorted(tensors.keys() - wanted.keys())
            if not any(pattern.fullmatch(name) for pattern in patterns)
        ]
        shapes = [
            f"{name} {list(tensors[name].shape)}, expected {list(shape)}"
            for name, shape in wanted.items()
            if name in tensors and tensors[name].shape != shape
        ]
        kinds = [
            f"{name} {tensors[name].dtype}"
            for name in wanted
            if name in tensors and not tensors[name].dtype.startswith(("F", "BF"))
        ]
        scales = [
            f"{name}{SCALE_SUFFIX}" for name in wanted if name in tensors and not self._has_scale(name, tensors[name])
        ]
        problems = [
            f"{len(names)} {what}: {', '.join(names[:SHOWN])}{', ...' if len(names) > SHOWN else ''}"
            for what, names in (
                ("missing", missing),
                ("unexpected", unexpected),
                ("of another shape", shapes),
                ("not of a floating-point type", kinds),
                ("factors of fp8 missing or of another shape", scales),
            )
            if names
        ]
        if problems:
            raise InvalidFile(
                f"{self.path}: its tensors are not those of the model in config.json: " + "; ".join(problems),
                field="tensors",
                value=(missing + unexpected + shapes + kinds + scales)[0],
                expected="the tensors of its config.json",
            )

    def _has_scale(self, name: str, info: TensorInfo) -> bool:
        """Returns whether an fp8 tensor has the factors that it needs; others need none."""
        if DTYPES.get(info.dtype) not in FLOAT8:
            return True
        scale = self.weights.tensors.get(name + SCALE_SUFFIX)
        if scale is None or self.block is None or len(info.shape) != 2:
            return False
        return scale.shape == grid(info.shape, self.block)

    def read(self, name: str, index: Index, out: torch.Tensor) -> None:
        """Reads: `out[:] = tensor[index]` in the dtype of `out`. Raises NotFound, InvalidFile."""
        if name in self.packed:
            read_packed(self.packed[name], index, out, self._descriptor)
            return
        info = self._info(name)
        stored = self._stored(info)
        if stored.dtype in FLOAT8:
            self._read_float8(name, stored, index, out)
        else:
            rectangles.read(self._descriptor(info.file), stored, index, out)

    def load(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Reads a whole tensor into new memory."""
        shape = self._info(name).shape
        out = torch.empty(shape, dtype=dtype or self.dtype(name))
        self.read(name, rectangles.whole(shape), out)
        return out

    def read_rows(self, parameter: Parameter, rows: slice, out: torch.Tensor) -> None:
        """Reads rows of a whole Megatron parameter into `out`; zeros where no Hugging Face tensor has a part."""
        slices = list(parameter.slices_of_rows(rows))
        if sum(math.prod(part.stop - part.start for part in piece.index) for piece in slices) < out.numel():
            out.zero_()
        for piece in slices:
            self.read(piece.hf_name, piece.hf_index, out[piece.index])

    def _read_float8(self, name: str, stored: Stored, index: Index, out: torch.Tensor) -> None:
        """Converts one row of blocks after the other, so that only one of them is in memory as float32."""
        if self.block is None or name + SCALE_SUFFIX not in self.weights.tensors:
            raise InvalidFile(f"{self.path}: {name} is fp8 and has no {name}{SCALE_SUFFIX}", field=name)
        scale = self.load(name + SCALE_SUFFIX, torch.float32)
        rows, columns = index
        fd = self._descriptor(stored.file)
        tall, wide = self.block
        step = max(1, rectangles.BUFFER_BYTES // (4 * tall * max(1, columns.stop - columns.start))) * tall
        by_column = scale[:, torch.arange(columns.start, columns.stop) // wide]
        first = rows.start
        while first < rows.stop:
            last = min((first // tall) * tall + step, rows.stop)
            part = torch.empty(last - first, columns.stop - columns.start, dtype=stored.dtype)
            rectangles.read(fd, stored, (slice(first, last), columns), part)
            factors = by_column[torch.arange(first, last) // tall]
            out[first - rows.start : last - rows.start].copy_((part.float() * factors).to(torch.bfloat16))
            first = last

    def _info(self, name: str) -> TensorInfo:
        info = self.tensors.get(name) or self.weights.tensors.get(name)
        if info is None:
            raise NotFound(f"{self.path}: no tensor {name}", field="name", value=name)
        return info

    def _stored(self, info: TensorInfo) -> Stored:
        return Stored(info.file, info.offset, DTYPES[info.dtype], info.shape)

    def _descriptor(self, file: Path) -> int:
        if file not in self._descriptors:
            self._descriptors[file] = rectangles.open_file(file)
        return self._descriptors[file]

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
