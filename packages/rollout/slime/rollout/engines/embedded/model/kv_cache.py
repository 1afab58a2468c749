"""Keys and values of running sequences, each in a row of its own that is written in place.

L: layers, R: rows, K: key-value heads, C: tokens that a row has room for, D: size of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

SMALLEST_ROWS, SMALLEST_TOKENS = 8, 64


class KvCache:
    """Has room for what `reserve` asked for, and keeps what is in use when it grows."""

    def __init__(self, layers: int, heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._shape = layers, heads, head_dim
        self._dtype = dtype
        self._kv_L2RKCD = self._zeros(SMALLEST_ROWS, SMALLEST_TOKENS)

    @property
    def room(self) -> tuple[int, int]:
        """Returns (rows, tokens of a row)."""
        return self._kv_L2RKCD.shape[2], self._kv_L2RKCD.shape[4]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns keys and values, each [R, K, C, D], to be read and written."""
        keys, values = self._kv_L2RKCD[index]
        return keys, values

    def reserve(self, rows: int, tokens: int, used: Sequence[int]) -> None:
        """used: how many tokens each of the first rows has by now. Nothing else is copied, and so takes memory."""
        old = self._kv_L2RKCD
        if rows <= old.shape[2] and tokens <= old.shape[4]:
            return
        rows = max(old.shape[2], 1 << (rows - 1).bit_length())
        tokens = max(old.shape[4], 1 << (tokens - 1).bit_length())
        self._kv_L2RKCD = self._zeros(rows, tokens)
        for row, count in enumerate(used):
            self._kv_L2RKCD[:, :, row, :, :count] = old[:, :, row, :, :count]

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copies the first `tokens` of a row into another."""
        self._kv_L2RKCD[:, :, target, :, :tokens] = self._kv_L2RKCD[:, :, source, :, :tokens]

    def _zeros(self, rows: int, tokens: int) -> torch.Tensor:
        layers, heads, head_dim = self._shape
        shape = layers, 2, rows, heads, tokens, head_dim
        # numpy's zeros take memory only where something is written. They are zeros because masked values are still
        # multiplied by 0, and must be numbers.
        empty = np.zeros(math.prod(shape) * self._dtype.itemsize, np.uint8)
        return torch.from_numpy(empty).view(self._dtype).view(shape)
