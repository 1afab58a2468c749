"""Array fields of `Sample`: their declaration, their storage as arrays, and their view as lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from slime.types.sample import arrays

if TYPE_CHECKING:
    from slime.types.sample.sample import Sample

Value = TypeVar("Value")


class RowCount(Enum):
    """The length of an array in a sample of L tokens, of which R are the response."""

    ANY = "any"
    RESPONSE = "R"
    BOUNDS = "R + 1"
    PAIRS = "L - 1"


@dataclasses.dataclass(frozen=True)
class ArrayField:
    """The declaration of an array field; codec, validation, `append_response_tokens` and JSON follow it.

    dtype: of the array; an array of several dimensions keeps its own integer type, and only a list gets this one.
    check: raises InvalidField, which names the field, for values that the field cannot have.
    fill: the value of response tokens that are appended without one; None: they must bring one.
    """

    dtype: np.dtype
    rows: RowCount
    check: Callable[[str, np.ndarray], None] | None = None
    fill: float | None = None
    ndim: int = 1
    required: bool = False

    def convert(self, name: str, value: Any) -> Any:
        """Returns `value` as an array of this field, or None. Raises InvalidField."""
        if value is None and not self.required:
            return None
        return arrays.convert(name, value, self.dtype) if self.ndim == 1 else arrays.convert_integers(name, value)

    def expected_rows(self, length: int, response_length: int) -> int | None:
        """Returns how many rows the array of a sample of so many tokens has; None: any number."""
        rows = self.rows
        if rows is RowCount.RESPONSE:
            return response_length
        if rows is RowCount.BOUNDS:
            return response_length + 1
        return max(0, length - 1) if rows is RowCount.PAIRS else None


def array_field(
    dtype: Any,
    rows: RowCount,
    *,
    check: Callable[[str, np.ndarray], None] | None = None,
    fill: float | None = None,
    ndim: int = 1,
    required: bool = False,
) -> Any:
    """Declares a field of `Sample` that is kept as an array; see ArrayField. required: empty, not None, where unset."""
    metadata = {"array": ArrayField(np.dtype(dtype), rows, check, fill, ndim, required)}
    if required:
        return dataclasses.field(default_factory=list, metadata=metadata)
    return dataclasses.field(default=None, metadata=metadata)


class PerToken(Generic[Value]):
    """A per-token field: arrays and sequences are set, a list of numbers (or None) is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, sample: Sample | None, owner: type) -> Value:
        if sample is None:
            return self  # type: ignore[return-value]
        try:
            value = sample.__dict__[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}") from None
        if isinstance(value, np.ndarray):
            value = sample.__dict__[self.name] = value.tolist()
        return value

    def __set__(self, sample: Sample, value: Value | Sequence[float] | np.ndarray) -> None:
        # Sample.__setattr__ bypasses it; with it the descriptor takes precedence over the instance's dictionary.
        sample.__dict__[self.name] = value
