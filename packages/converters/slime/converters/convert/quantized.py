"""The quantized form of a checkpoint, into which new weights of the same model are brought.

The tensors of the checkpoint say which weights are quantized: routers, norms, embeddings and some layers stay as they
are, by rules that differ from model to model, and that config.json names for some models only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slime.converters.convert import fp8
from slime.converters.convert.fp8 import SCALE_SUFFIX
from slime.converters.convert.quantization_config import Fp8Blocks, updatable
from slime.converters.files.dtypes import DTYPES
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.types.errors import InvalidFile, NotAvailable

FACTOR_DTYPES = (torch.float32, torch.bfloat16)


class QuantizedForm:
    """The form in which the checkpoint in `directory` holds weights. factors: the dtype of each weight's factors, by
    the weight's name.

    Raises MissingFile, InvalidFile; NotAvailable as `updatable` does, and for factors of an unknown dtype.
    """

    def __init__(self, directory: str | Path, kind: Fp8Blocks) -> None:
        self.kind = kind
        self.factors: dict[str, torch.dtype] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
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
            dtype = DTYPES.get(factors.dtype)
            if dtype not in FACTOR_DTYPES:
                raise NotAvailable.unavailable(
                    f"{name}{SCALE_SUFFIX} of dtype {factors.dtype}",
                    f"{directory} holds it; factors in F32 and BF16 are written",
                )
            self.factors[name], self._shapes[name] = dtype, info.shape
        if not self.factors:
            raise InvalidFile(
                f"{directory}: its config.json has quantization_config, and none of its tensors is fp8",
                field="quantization_config", expected="weights in float8_e4m3fn",
            )  # fmt: skip

    def num_bytes(self, sizes: Mapping[str, int], dtype: torch.dtype) -> int:
        """Returns the bytes of weights with these numbers of elements, plain ones in `dtype`."""
        factors = sum(
            math.prod(fp8.grid(self._shapes[name], self.kind.block)) * self.factors[name].itemsize
            for name in sizes.keys() & self.factors.keys()
        )
        return factors + sum(
            size * (fp8.DTYPE if name in self.factors else dtype).itemsize for name, size in sizes.items()
        )

    def quantized(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a whole model as the checkpoint has them, each weight before its factors, on the device
        where they are. Tensors that are plain in the checkpoint stay as they are.

        Raises InvalidFile for a weight of another shape than in the checkpoint.
        """
        for name, tensor in weights:
            if name not in self.factors:
                yield name, tensor
                continue
            if tuple(tensor.shape) != self._shapes[name]:
                raise InvalidFile(
                    f"{name}: the checkpoint has {list(self._shapes[name])}, the model {list(tensor.shape)}",
                    field=name, value=list(tensor.shape), expected=str(list(self._shapes[name])),
                )  # fmt: skip
            weight, factors = fp8.quantize(
                tensor, self.kind.block, factor_dtype=self.factors[name], power_of_two=self.kind.power_of_two
            )
            del tensor
            yield name, weight
            yield name + SCALE_SUFFIX, factors


def form_of(directory: str | Path) -> QuantizedForm | None:
    """Returns the form of the checkpoint in `directory`; None for a plain one. Raises as QuantizedForm does."""
    config = json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))
    kind = updatable(config, f"--hf-checkpoint {directory}")
    return None if kind is None else QuantizedForm(directory, kind)
