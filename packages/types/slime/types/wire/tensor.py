"""Conversion of arrays and trees of values to and from `Tensor` and `Value`.

numpy has no bfloat16: a BFLOAT16 tensor is read as a uint16 array of its bit patterns, and a uint16 array is written as
one by `tensor_to_proto(array, dtype=tensor_pb2.DATA_TYPE_BFLOAT16)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from slime.types.errors import InvalidField
from slime.v1 import tensor_pb2

# Reads the bytes of a blob, as bytes or a flat array; the receiver's configuration decides which stores it knows.
Resolver = Callable[[tensor_pb2.BlobReference], Any]

BFLOAT16 = tensor_pb2.DATA_TYPE_BFLOAT16
_DTYPES: dict[int, np.dtype] = {
    tensor_pb2.DATA_TYPE_BOOL: np.dtype("?"),
    tensor_pb2.DATA_TYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DATA_TYPE_INT8: np.dtype("i1"),
    tensor_pb2.DATA_TYPE_UINT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_INT16: np.dtype("<i2"),
    tensor_pb2.DATA_TYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DATA_TYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DATA_TYPE_BFLOAT16: np.dtype("<u2"),
    tensor_pb2.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DATA_TYPE_FLOAT64: np.dtype("<f8"),
}
DATA_TYPES: dict[np.dtype, int] = {dtype: number for number, dtype in _DTYPES.items() if number != BFLOAT16}

# Protobuf allows 100 levels; a map in a map takes three.
_MAX_DEPTH = 30
_VALUE_TYPES = "None, a bool, a number, text, bytes, an array, or lists and dicts of these"


def tensor_to_proto(array: np.ndarray, *, field: str = "tensor", dtype: int | None = None) -> tensor_pb2.Tensor:
    """Converts an array to a Tensor: its shape, and its bytes in row-major, little-endian order."""
    tensor = tensor_pb2.Tensor()
    fill_tensor(tensor, array, field, dtype)
    return tensor


def fill_tensor(tensor: tensor_pb2.Tensor, array: np.ndarray, field: str, dtype: int | None = None) -> None:
    number = DATA_TYPES.get(array.dtype)
    if number is None:
        little = array.dtype.newbyteorder("<")
        number = DATA_TYPES.get(little)
        if number is None:
            raise InvalidField(field, array.dtype, "an array of " + ", ".join(str(d) for d in DATA_TYPES))
        array = array.astype(little)
    if dtype is not None:
        if dtype != BFLOAT16 or array.dtype != np.uint16:
            raise InvalidField(field, array.dtype, "a uint16 array where the wire type is BFLOAT16")
        number = dtype
    tensor.dtype = number  # type: ignore[assignment]
    tensor.shape.extend(array.shape)
    tensor.inline = array.tobytes()


def tensor_from_proto(
    tensor: tensor_pb2.Tensor, *, field: str = "tensor", resolve: Resolver | None = None, copy: bool = True
) -> np.ndarray:
    """Converts a Tensor to an array. copy: False for a read-only view of the message's bytes.

    Raises InvalidField if dtype, shape and bytes disagree, and for a reference without `resolve`.
    """
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidField(f"{field}.dtype", tensor.dtype, "a DataType of slime.v1")
    shape = tuple(tensor.shape)
    data = tensor.inline or _other_data(tensor, field, resolve)
    if any(size < 0 for size in shape):
        raise InvalidField(f"{field}.shape", shape, "sizes of at least 0")
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise InvalidField(
            f"{field}.inline",
            f"{len(data)} bytes",
            f"{expected} bytes (shape {shape}, {dtype.itemsize} bytes an element)",
        )
    try:
        array = np.frombuffer(data, dtype).reshape(shape)
    except (ValueError, OverflowError) as error:
        # The shape has too many dimensions, or sizes beside a 0 that are too large.
        raise InvalidField(f"{field}.shape", shape, f"a shape that numpy can hold ({error})") from None
    if dtype.kind == "b" and array.view(np.uint8).max(initial=0) > 1:
        raise InvalidField(f"{field}.inline", "a byte above 1", "0 or 1 for each bool")
    return array.copy() if copy else array


def _other_data(tensor: tensor_pb2.Tensor, field: str, resolve: Resolver | None) -> Any:
    kind = tensor.WhichOneof("data")
    if kind == "inline":
        return b""
    if kind is None:
        raise InvalidField(f"{field}.data", "nothing", "inline bytes or a reference")
    reference = tensor.reference
    if resolve is None:
        raise InvalidField(
            f"{field}.reference", f"store {reference.store!r}", "inline bytes: no blob store is configured here"
        )
    data = resolve(reference)
    if len(data) != reference.length:
        raise InvalidField(
            f"{field}.reference.length", reference.length, f"{len(data)}, the length of what the store holds"
        )
    return data


def fill_value(out: tensor_pb2.Value, value: Any, path: str, depth: int = 0) -> None:
    """Fills a Value with a tree of plain values and arrays. Numpy scalars become Python numbers, tuples become lists,
    torch tensors become arrays.

    Raises InvalidField with the path of a value that does not fit.
    """
    if depth > _MAX_DEPTH:
        raise InvalidField(path, "a deeper tree", f"at most {_MAX_DEPTH} levels")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None:
        out.null_value = True
    elif isinstance(value, bool):
        out.bool_value = value
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**63:
            raise InvalidField(path, value, "a whole number of 64 bits")
        out.int_value = value
    elif isinstance(value, float):
        out.float_value = value
    elif isinstance(value, str):
        try:
            out.string_value = value
        except ValueError:
            raise InvalidField(path, value, "text that UTF-8 can hold") from None
    elif isinstance(value, (bytes, bytearray)):
        out.bytes_value = bytes(value)
    elif isinstance(value, np.ndarray):
        fill_tensor(out.tensor_value, value, path)
    elif isinstance(value, (list, tuple)):
        out.list_value.SetInParent()
        for position, item in enumerate(value):
            fill_value(out.list_value.values.add(), item, f"{path}[{position}]", depth + 1)
    elif isinstance(value, Mapping):
        out.map_value.SetInParent()
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidField(path, key, "text as the key of a dict")
            fill_value(out.map_value.values[key], item, f"{path}.{key}", depth + 1)
    elif hasattr(value, "detach") and hasattr(value, "__array__"):
        fill_tensor(out.tensor_value, _cpu_array(value, path), path)
    else:
        raise InvalidField(path, type(value).__name__, _VALUE_TYPES)


def _cpu_array(tensor: Any, path: str) -> np.ndarray:
    try:
        return np.asarray(tensor.detach())
    except (TypeError, RuntimeError) as error:
        raise InvalidField(path, type(tensor).__name__, f"a tensor that numpy can read ({error})") from None


def value_from_proto(value: tensor_pb2.Value, path: str, resolve: Resolver | None = None) -> Any:
    """Converts a Value to the tree that `fill_value` wrote. A Value without a kind is None."""
    kind = value.WhichOneof("kind")
    if kind is None or kind == "null_value":
        return None
    if kind == "tensor_value":
        return tensor_from_proto(value.tensor_value, field=path, resolve=resolve)
    if kind == "list_value":
        return [value_from_proto(v, f"{path}[{i}]", resolve) for i, v in enumerate(value.list_value.values)]
    if kind == "map_value":
        return {k: value_from_proto(v, f"{path}.{k}", resolve) for k, v in value.map_value.values.items()}
    return getattr(value, kind)
