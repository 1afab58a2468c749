"""Summarises a directory of weights or a checkpoint from headers alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from slime.converters.inspection.weights import open_weights


def summarize(path: str | Path, *, containing: str = "") -> dict[str, Any]:
    """Returns plain data, ready for JSON.

    tensors: [{name, dtype, shape, num_bytes, file}] of those whose name has `containing` in it; the totals are theirs:
    num_tensors, num_parameters, num_bytes, num_files, parameters_by_dtype.
    """
    weights = open_weights(path)
    tensors = [tensor for name, tensor in weights.tensors.items() if containing in name]
    by_dtype: Counter[str] = Counter()
    for tensor in tensors:
        by_dtype[tensor.dtype] += tensor.num_elements
    return {
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


def as_text(summary: dict[str, Any]) -> str:
    """Returns a line for each tensor, then the totals."""
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
    return "\n".join(lines)
