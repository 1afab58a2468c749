"""Conversion of lists, arrays and tensors to the arrays that a `Sample` keeps."""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.types.errors import InvalidField, counted


def convert(field: str, value: Any, dtype: Any, ndim: int | None = 1) -> np.ndarray:
    """Converts an array, list or CPU tensor to an array of `dtype`, without a copy if it is one already.

    An integer `dtype` takes only whole numbers in its range. Raises InvalidField naming `field`.
    """
    target = np.dtype(dtype)
    if type(value) is np.ndarray and value.dtype == target and value.ndim == ndim:
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise InvalidField(field, value, f"an array of {_kind(target)}") from None
    if array.dtype.kind not in "biuf":
        raise InvalidField(field, value, f"an array of {_kind(target)}")
    if ndim is not None and array.ndim != ndim:
        raise InvalidField(
            field,
            array.shape,
            counted(ndim, "dimension"),
            f"{field}: got shape {array.shape}, expected {counted(ndim, 'dimension')}",
        )
    if array.dtype != target:
        array = _cast(field, array, target)
    return array


def convert_integers(field: str, value: Any) -> np.ndarray:
    """Converts to an array of any integer dtype and number of dimensions; lists become int32."""
    array = value if isinstance(value, np.ndarray) else None
    if array is not None and array.dtype.kind in "iu" and array.dtype.isnative:
        return array
    return convert(field, value, np.int32, ndim=None)


def _cast(field: str, array: np.ndarray, target: np.dtype) -> np.ndarray:
    if target.kind == "f" or array.size == 0:
        # float64 values beyond the range of float32 become infinite, as everywhere in numpy.
        with np.errstate(over="ignore"):
            return array.astype(target)
    with np.errstate(invalid="ignore"):
        cast = array.astype(target)
    # Values that wrap around compare unequal, except unsigned 64-bit ones, whose sign is compared.
    wrong = np.flatnonzero((cast != array) | ((cast < 0) != (array < 0)))
    if wrong.size:
        first = int(wrong[0])
        raise InvalidField(f"{field}[{first}]", array.reshape(-1)[first].item(), f"{_kind(target)} of {target.name}")
    return cast


def _kind(target: np.dtype) -> str:
    return "numbers" if target.kind == "f" else "whole numbers"
