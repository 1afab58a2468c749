"""Summarises a directory of weights or a checkpoint, from headers alone unless its values are asked for."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from slime.converters.inspection.weights import Weights, open_weights
from slime.types.errors import counted


def summarize(path: str | Path, *, containing: str = "", finite: bool = False) -> dict[str, Any]:
    """Returns plain data, ready for JSON.

    tensors: [{name, dtype, shape, num_bytes, file}] of those whose name has `containing` in it; the totals are theirs:
    num_tensors, num_parameters, num_bytes, num_files, parameters_by_dtype.
    finite: whether to read the values too, a part of a tensor at a time, and add num_nonfinite to each tensor and to
    the totals: the number of values that are infinite or not a number.
    """
    weights = open_weights(path)
    tensors = [tensor for name, tensor in weights.tensors.items() if containing in name]
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.num_elements
    summary: dict[str, Any] = {
        "path": str(weights.path),
        "num_tensors": len(tensors),
        "num_parameters": sum(by_dtype.values()),
        "num_bytes": sum(tensor.num_bytes for tensor in tensors),
        "num_files": len({tensor.file for tensor in tensors}),
        "parameters_by_dtype": dict(by_dtype),
        "tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "num_bytes": tensor.num_bytes,
                "file": tensor.file.name,
            }
            for tensor in tensors
        ],
    }
    if finite:
        for tensor in summary["tensors"]:
            tensor["num_nonfinite"] = _num_nonfinite(weights, tensor["name"])
        summary["num_nonfinite"] = sum(tensor["num_nonfinite"] for tensor in summary["tensors"])
    return summary


def as_text(summary: dict[str, Any]) -> str:
    """Returns a line for each tensor, the totals, and which tensors have values that are not finite, if counted."""
    rows = [(t["name"], t["dtype"], str(t["shape"]), f"{t['num_bytes']:,}") for t in summary["tensors"]]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {dtype:<{widths[1]}}  {shape:<{widths[2]}}  {size:>{widths[3]}}"
        for name, dtype, shape, size in rows
    ]
    dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in summary["parameters_by_dtype"].items())
    lines.append(
        f"{summary['num_tensors']} tensors, {summary['num_parameters']:,} parameters ({dtypes}), "
        f"{summary['num_bytes'] / 2**20:,.1f} MiB in {summary['num_files']} files"
    )
    if "num_nonfinite" in summary:
        bad = [tensor for tensor in summary["tensors"] if tensor["num_nonfinite"]]
        lines += [
            f"{t['name']}: {t['num_nonfinite']:,} of {math.prod(t['shape']):,} values are infinite or not a number"
            for t in bad
        ]
        total = f"{counted(len(bad), 'tensor has', 'tensors have')} such values"
        lines.append(total if bad else "all values are finite")
    return "\n".join(lines)


def _num_nonfinite(weights: Weights, name: str) -> int:
    count = 0
    for part in weights.parts(name):
        if part.is_floating_point():
            # torch has no isfinite for 8 bits.
            values = part.float() if part.element_size() == 1 else part
            count += int(values.isfinite().logical_not_().count_nonzero())
    return count
