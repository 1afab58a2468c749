"""Reads recordings that `torch.save` wrote: {"rollout_id": 3, "samples": [{...}, ...]}, one dictionary per sample.

Such a file is a pickle. It is opened by torch's restricted reader, which makes tensors, arrays and plain values, and
refuses everything else, naming it.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slime.types import Sample
from slime.types.errors import NotAvailable

EMPTY_WHERE_NONE = (
    "spans", "weight_versions", "metadata", "apply_chat_template_kwargs", "spec_info", "prefix_cache_info",
)  # fmt: skip


# Errors of torch's reader for other files, whose bytes it runs as pickle instructions for as long as they are valid.
UNREADABLE = (
    pickle.UnpicklingError, RuntimeError, EOFError, AttributeError, AssertionError, LookupError, TypeError, ValueError,
    struct.error, OverflowError,
)  # fmt: skip


def read_torch(path: Path) -> tuple[int | None, list[Sample]]:
    """Returns (rollout_id, samples).

    Raises ValueError where the file is something else, InvalidField for a sample, NotAvailable without torch.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise NotAvailable.not_installed(str(path), "torch", "slime-rollout[embedded]") from error

    # Constructors of plain arrays, and nothing else; numpy has renamed the module between versions.
    kinds = [type(np.dtype(code)) for code in "?bhilqBHILQefd"]
    makers: list[Any] = [np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0]]
    names = [(make, f"{core}.multiarray.{make.__name__}") for make in makers for core in ("numpy.core", "numpy._core")]
    try:
        with torch.serialization.safe_globals([*names, np.ndarray, np.dtype, *kinds]):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except UNREADABLE as error:
        raise ValueError(f"neither a recorded rollout nor one that torch reads safely: {_reason(error)}") from error
    if not isinstance(content, Mapping) or not isinstance(content.get("samples"), list):
        raise ValueError(f"holds {_shape(content)}, expected a dictionary with a list of samples")
    rollout_id = content.get("rollout_id")
    samples = [Sample.from_dict(_without_none(item)) for item in _flat(content["samples"])]
    return rollout_id if isinstance(rollout_id, int) else None, samples


def _reason(error: BaseException) -> str:
    refused = str(error).split("GLOBAL ", 1)
    if len(refused) > 1:
        return f"it would make a {refused[1].split()[0]}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _shape(content: Any) -> str:
    return f"the keys {', '.join(map(str, content))}" if isinstance(content, Mapping) else type(content).__name__


def _flat(items: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    for item in items:
        if isinstance(item, list):
            yield from _flat(item)
        elif isinstance(item, Mapping):
            yield item
        else:
            raise ValueError(f"a sample is a {type(item).__name__}, expected a dictionary")


def _without_none(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a sample without the None values of fields that are never None here: these become empty."""
    return {name: value for name, value in sample.items() if value is not None or name not in EMPTY_WHERE_NONE}
