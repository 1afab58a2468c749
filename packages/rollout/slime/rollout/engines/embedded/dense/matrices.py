"""Matrices of linear layers, packed for their products.

N: tokens, I: inputs, O: outputs.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

# oneDNN packs weights for an expected number of tokens; any number computes correctly.
PACKED_FOR = 64


class Matrix(ABC):
    """One matrix for one or several linear layers that read the same input."""

    @abstractmethod
    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        """Returns x . weight^T + bias in the type of x, which the next call of a matrix of the model may overwrite.

        out_NO: what is written and returned instead, in its own type, for as many tokens as it has, from the first on.
        """


class TorchMatrix(Matrix):
    """Matrix that torch multiplies, by oneDNN in its layout where it has one."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._bias = bias_O
        self._packed = has_packing()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_OI, PACKED_FOR) if self._packed else weight_OI

    def __call__(self, x_NI: Tensor, out_NO: Tensor | None = None) -> Tensor:
        if self._packed:
            found = torch.ops.mkldnn._linear_pointwise.default(x_NI, self._weight, self._bias, "none", [], "")
        else:
            found = F.linear(x_NI, self._weight, self._bias)
        return found if out_NO is None else out_NO.copy_(found[: len(out_NO)])


def has_packing() -> bool:
    """Returns whether oneDNN has a layout of its own for weights on this processor."""
    return platform.machine() in ("x86_64", "AMD64") and torch.backends.mkldnn.is_available()
