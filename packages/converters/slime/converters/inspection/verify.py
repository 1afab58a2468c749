"""Compares two sets of weights, holding one piece of a tensor of each in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.converters.files.safetensors_dir import TensorInfo
from slime.converters.inspection.weights import open_two

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Difference:
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def compare(first: str | Path, second: str | Path, *, atol: float = 0.0) -> Iterator[Difference]:
    """Yields differences between the tensors of two directories, files or checkpoints, by name in sorted order.

    Two torch_dist checkpoints are compared by their keys; one and a Hugging Face directory, by the tensors that the
    checkpoint converts to.
    atol 0: every tensor has the same dtype, shape and bits, those of NaN included. Above 0: the same shape, and no two
    elements further apart than `atol`; dtypes may differ, NaN equals NaN.
    """
    a, b = open_two(first, second)
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        if name not in a.tensors or name not in b.tensors:
            yield Difference(name, f"only in {a.path if name in a.tensors else b.path}")
            continue
        reason = _headers_differ(a.tensors[name], b.tensors[name], exact=atol == 0)
        if not reason:
            reason = _values_differ(a.parts(name), b.parts(name), atol)
        if reason:
            yield Difference(name, reason)


def _headers_differ(a: TensorInfo, b: TensorInfo, *, exact: bool) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    if exact and a.dtype != b.dtype:
        return f"dtype {a.dtype} and {b.dtype}"
    return ""


def _values_differ(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor], atol: float) -> str:
    count, total, largest, same_bits = 0, 0, 0.0, True
    for a, b in _aligned(first, second):
        total += a.numel()
        if atol == 0 and _same_bits(a, b):
            continue
        same_bits = False
        apart = _distance(a, b)
        count += int((apart > atol).sum())
        largest = max(largest, apart.max().item() if apart.numel() else 0.0)
    if count:
        return f"{count:,} of {total:,} elements differ, by up to {largest:.3g}"
    return "" if same_bits or atol > 0 else "bits differ, values do not"


def _aligned(
    first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields parts of both tensors with the same rows, although a wider dtype comes in more parts."""
    left, right = iter(first), iter(second)
    a, b = next(left, None), next(right, None)
    while a is not None and b is not None:
        rows = min(a.shape[0], b.shape[0]) if a.dim() else 1
        yield (a[:rows], b[:rows]) if a.dim() else (a, b)
        a = a[rows:] if a.dim() and a.shape[0] > rows else next(left, None)
        b = b[rows:] if b.dim() and b.shape[0] > rows else next(right, None)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    import torch

    left, right = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
    return torch.equal(left, right)


def _distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns the distance of each pair; infinite if only one of the two is NaN."""
    import torch

    left, right = a.double(), b.double()
    apart = torch.where(left == right, 0.0, (left - right).abs())
    apart = torch.where(left.isnan() & right.isnan(), 0.0, apart)
    return torch.nan_to_num(apart, nan=float("inf"), posinf=float("inf"))
