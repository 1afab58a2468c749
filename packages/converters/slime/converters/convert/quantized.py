"""The quantized form of a checkpoint, into which new weights of the same model are brought.

The tensors of the checkpoint say which weights are quantized: routers, norms, embeddings and some layers stay as they
are, by rules that differ from model to model, and that config.json names for some models only.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slime.converters.convert import fp8, int4
from slime.converters.convert.fp8 import SCALE_SUFFIX
from slime.converters.convert.packed_weights import packed_weights
from slime.converters.convert.quantization_config import Fp8Blocks, Int4Groups, updatable
from slime.converters.files.dtypes import DTYPES
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.types.errors import InvalidFile, NotAvailable

FACTOR_DTYPES = (torch.float32, torch.bfloat16)
# Types of the two numbers in a weight's shape.
SHAPE_DTYPES = (torch.int64, torch.int32)


class QuantizedForm(ABC):
    """The form in which a checkpoint holds weights. shapes: of the weights that are quantized, by name."""

    shapes: dict[str, tuple[int, ...]]

    def num_bytes(self, sizes: Mapping[str, int], dtype: torch.dtype) -> int:
        """Returns the bytes of weights with these numbers of elements, plain ones in `dtype`."""
        return sum(
            self._num_bytes(name) if name in self.shapes else size * dtype.itemsize for name, size in sizes.items()
        )

    def quantized(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a whole model as the checkpoint has them, each weight before its factors, on the device
        where they are. Tensors that are plain in the checkpoint stay as they are.

        Raises InvalidFile for a weight of another shape than in the checkpoint.
        """
        for name, tensor in weights:
            if name not in self.shapes:
                yield name, tensor
                continue
            if tuple(tensor.shape) != self.shapes[name]:
                raise InvalidFile(
                    f"{name}: the checkpoint has {list(self.shapes[name])}, the model {list(tensor.shape)}",
                    field=name, value=list(tensor.shape), expected=str(list(self.shapes[name])),
                )  # fmt: skip
            parts = self._parts(name, tensor)
            del tensor
            yield from parts.items()

    @abstractmethod
    def _num_bytes(self, name: str) -> int:
        """Returns the bytes of a quantized weight with its factors."""

    @abstractmethod
    def _parts(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        """Quantizes a weight; returns its tensors in the checkpoint."""


class Fp8Form(QuantizedForm):
    """FP8 in blocks, as the checkpoint in `directory` holds it. factors: the dtype of each weight's factors, by the
    weight's name.

    Raises MissingFile, InvalidFile; NotAvailable for factors of an unknown dtype.
    """

    def __init__(self, directory: str | Path, kind: Fp8Blocks) -> None:
        self.kind = kind
        self.factors: dict[str, torch.dtype] = {}
        self.shapes = {}
        tensors = SafetensorsDir(directory).tensors
        for name, info in tensors.items():
            if DTYPES.get(info.dtype) != fp8.DTYPE:
                continue
            factors = tensors.get(name + SCALE_SUFFIX)
            if len(info.shape) != 2 or factors is None or factors.shape != fp8.grid(info.shape, kind.block):
                raise InvalidFile(
                    f"{directory}: {name} is fp8 and has no {name}{SCALE_SUFFIX} for blocks of {list(kind.block)}",
                    field=name, expected=f"a matrix, and {name}{SCALE_SUFFIX}",
                )  # fmt: skip
            dtype = _dtype(factors.name, factors.dtype, FACTOR_DTYPES, "factors in F32 and BF16", directory)
            self.factors[name] = dtype
            self.shapes[name] = info.shape
        if not self.factors:
            raise InvalidFile(
                f"{directory}: its config.json has quantization_config, and none of its tensors is fp8",
                field="quantization_config", expected="weights in float8_e4m3fn",
            )  # fmt: skip

    def _num_bytes(self, name: str) -> int:
        shape = self.shapes[name]
        return math.prod(shape) + math.prod(fp8.grid(shape, self.kind.block)) * self.factors[name].itemsize

    def _parts(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        values, factors = fp8.quantize(
            weight, self.kind.block, factor_dtype=self.factors[name], power_of_two=self.kind.power_of_two
        )
        return {name: values, name + SCALE_SUFFIX: factors}


class Int4Form(QuantizedForm):
    """INT4 in groups, as the checkpoint in `directory` holds it. dtypes: of the scales and of the shape of each weight,
    by the weight's name.

    Raises MissingFile, InvalidFile; NotAvailable for scales or shapes of an unknown dtype.
    """

    def __init__(self, directory: str | Path, kind: Int4Groups) -> None:
        self.kind = kind
        self.dtypes: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        self.shapes = {}
        for name, weight in packed_weights(SafetensorsDir(directory), kind.group).items():
            scale, shape = weight.scale, weight.shape
            self.dtypes[name] = (
                _dtype(scale.name, scale.dtype, FACTOR_DTYPES, "scales in F32 and BF16", directory),
                _dtype(shape.name, shape.dtype, SHAPE_DTYPES, "shapes in I64 and I32", directory),
            )
            self.shapes[name] = weight.whole.shape
        if not self.shapes:
            raise InvalidFile(
                f"{directory}: its config.json has quantization_config, and none of its weights is packed",
                field="quantization_config", expected=f"tensors NAME{int4.PACKED_SUFFIX}",
            )  # fmt: skip

    def _num_bytes(self, name: str) -> int:
        size, (scale, shape) = math.prod(self.shapes[name]), self.dtypes[name]
        return size * int4.BITS // 8 + size // self.kind.group * scale.itemsize + 2 * shape.itemsize

    def _parts(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        scale_dtype, shape_dtype = self.dtypes[name]
        packed, scales = int4.quantize(weight, self.kind.group, scale_dtype=scale_dtype)
        shape = torch.tensor(weight.shape, dtype=shape_dtype, device=weight.device)
        return dict(zip((name + suffix for suffix in int4.SUFFIXES), (packed, scales, shape), strict=True))


def _dtype(name: str, dtype: str, allowed: tuple[torch.dtype, ...], written: str, directory: str | Path) -> torch.dtype:
    found = DTYPES.get(dtype)
    if found not in allowed:
        raise NotAvailable.unavailable(f"{name} of dtype {dtype}", f"{directory} holds it; {written} are written")
    return found


def form_of(directory: str | Path) -> QuantizedForm | None:
    """Returns the form of the checkpoint in `directory`; None for a plain one.

    Raises NotAvailable as `updatable` does, and what the forms raise.
    """
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    kind = updatable(config, f"--hf-checkpoint {directory}")
    if kind is None:
        return None
    return Fp8Form(directory, kind) if isinstance(kind, Fp8Blocks) else Int4Form(directory, kind)
