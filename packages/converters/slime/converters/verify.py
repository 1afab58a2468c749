"""Whether two weight directories hold the same tensors, one tensor of each in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from slime.converters.safetensors_dir import SafetensorsDir, TensorInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Difference:
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


def compare(first: str | Path, second: str | Path, *, atol: float = 0.0) -> Iterator[Difference]:
    """Differences between the tensors of two safetensors files or directories, by name in sorted order.

    atol 0: every tensor has the same dtype, shape and bits, those of NaN included. Above 0: the same shape, and no two
    elements further apart than `atol`; dtypes may differ, NaN equals NaN.
    """
    a, b = SafetensorsDir(first), SafetensorsDir(second)
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        if name not in a.tensors or name not in b.tensors:
            yield Difference(name, f"only in {a.path if name in a.tensors else b.path}")
            continue
        reason = _headers_differ(a.tensors[name], b.tensors[name], exact=atol == 0)
        if not reason:
            reason = _values_differ(a.load(name), b.load(name), atol)
        if reason:
            yield Difference(name, reason)


def _headers_differ(a: TensorInfo, b: TensorInfo, *, exact: bool) -> str:
    if a.shape != b.shape:
        return f"shape {list(a.shape)} and {list(b.shape)}"
    if exact and a.dtype != b.dtype:
        return f"dtype {a.dtype} and {b.dtype}"
    return ""


def _values_differ(a: torch.Tensor, b: torch.Tensor, atol: float) -> str:
    import torch

    if a.numel() == 0:
        return ""
    if atol == 0:
        bits_a, bits_b = (x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b))
        if torch.equal(bits_a, bits_b):
            return ""
    left, right = a.double(), b.double()
    apart = torch.where(left == right, 0.0, (left - right).abs())
    apart = torch.where(left.isnan() & right.isnan(), 0.0, apart)
    apart = torch.nan_to_num(apart, nan=float("inf"), posinf=float("inf"))
    largest = apart.max().item()
    if atol > 0 and largest <= atol:
        return ""
    count = int((apart > atol).sum())
    return (
        f"{count:,} of {a.numel():,} elements differ, by up to {largest:.3g}" if count else "bits differ, values do not"
    )
