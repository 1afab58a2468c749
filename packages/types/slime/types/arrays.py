"""Per-token arrays: what a `Sample` holds where other code may pass a list.

`TokenArray` is a numpy array that, besides, understands the three list idioms that code written for lists of tokens
uses: `tokens + [1, 2]` and `[1, 2] + tokens` concatenate (numpy would add element by element), `tokens += [1, 2]`
does the same, and `if tokens:` asks whether there are any. Everything else, and arithmetic with anything but a list,
is numpy's, and gives plain numpy arrays and scalars.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from slime.types.errors import InvalidField


class TokenArray(np.ndarray):
    """A numpy array in which `+` with a list concatenates."""

    def __add__(self, other: Any) -> Any:
        if isinstance(other, (list, tuple)):
            return concatenate(self, convert("tokens", other, self.dtype))
        return super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, (list, tuple)):
            return concatenate(convert("tokens", other, self.dtype), self)
        return super().__radd__(other)

    def __iadd__(self, other: Any) -> Any:
        if isinstance(other, (list, tuple)):
            return self + other
        return super().__iadd__(other)

    def __getattr__(self, name: str) -> Any:
        # Arrays have one length: what a list does in place has to be an assignment.
        how = {"append": "tokens += [token]", "extend": "tokens += [...]"}.get(name)
        hint = f": an array does not grow in place; `sample.{how}` does it (likewise loss_mask, ...)" if how else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        # Results of arithmetic are plain numpy: only fields and slices of them are TokenArrays.
        plain = np.asarray(array)
        return plain[()] if return_scalar or plain.ndim == 0 else plain

    def __bool__(self) -> bool:
        # A comparison's result keeps numpy's rule, so that `if a == b` stays an error rather than becoming true.
        if self.dtype == np.bool_ or self.ndim != 1:
            return bool(self.view(np.ndarray))
        return self.size > 0


def concatenate(*parts: np.ndarray) -> TokenArray:
    return np.concatenate([part.view(np.ndarray) for part in parts]).view(TokenArray)


def empty(dtype: Any) -> TokenArray:
    return np.empty(0, dtype).view(TokenArray)


def convert(field: str, value: Any, dtype: Any, ndim: int | None = 1) -> TokenArray:
    """`value` (an array, list or CPU tensor) as a TokenArray of `dtype`; shares memory where nothing has to change.

    An integer `dtype` takes only whole numbers in its range. Raises InvalidField naming `field`.
    """
    target = np.dtype(dtype)
    if type(value) is TokenArray and value.dtype == target and value.ndim == ndim:
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
            f"{ndim} dimension(s)",
            f"{field}: got shape {array.shape}, expected {ndim} dimension(s)",
        )
    if array.dtype != target:
        array = _cast(field, array, target)
    return array.view(TokenArray)


def convert_integers(field: str, value: Any) -> TokenArray:
    """Like `convert`, keeping the integer dtype that `value` has; lists become int32. Any number of dimensions."""
    array = value if isinstance(value, np.ndarray) else None
    if array is not None and array.dtype.kind in "iu" and array.dtype.isnative:
        return array.view(TokenArray)
    return convert(field, value, np.int32, ndim=None)


def _cast(field: str, array: np.ndarray, target: np.dtype) -> np.ndarray:
    if target.kind == "f" or array.size == 0:
        # float64 beyond float32's range becomes infinite, as everywhere in numpy.
        with np.errstate(over="ignore"):
            return array.astype(target)
    with np.errstate(invalid="ignore"):
        cast = array.astype(target)
    # Values that wrap around compare unequal, except unsigned 64-bit ones, whose sign has to be looked at.
    wrong = np.flatnonzero((cast != array) | ((cast < 0) != (array < 0)))
    if wrong.size:
        first = int(wrong[0])
        raise InvalidField(f"{field}[{first}]", array.reshape(-1)[first].item(), f"{_kind(target)} of {target.name}")
    return cast


def _kind(target: np.dtype) -> str:
    return "numbers" if target.kind == "f" else "whole numbers"
