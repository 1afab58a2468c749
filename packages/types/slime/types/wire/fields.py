"""Matches the fields of `Sample` with those of `slime.v1.Sample`; a field that only one of them has fails at import.

A field `name` of `Sample` travels as `name`, as the JSON text `name_json`, or as the members of a oneof `name`. Their
types decide how it is converted (`Kind`), so a field of a known kind needs no further code.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable
from enum import Enum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from slime.types.errors import InvalidField, SlimeError
from slime.types.sample import FIELD_NAMES, Sample
from slime.types.sample.fields import ArrayField
from slime.v1 import sample_pb2, tensor_pb2

# Holds the attributes of a sample that are not fields.
EXTRA = "extra_json"
_INTEGER_TYPES = tuple(
    getattr(tensor_pb2, f"DATA_TYPE_{name}") for name in ("UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64")
)
_FLOAT_TYPES = tuple(getattr(tensor_pb2, f"DATA_TYPE_{name}") for name in ("FLOAT16", "FLOAT32", "FLOAT64"))


class FieldsDiffer(SlimeError, TypeError):
    """A field of `Sample` that is not declared everywhere, or in two ways."""


class Kind(Enum):
    ARRAY = "a Tensor"
    TREE = "a Value"
    RECORD = "another message"
    RECORDS = "a list of messages"
    TEXTS = "a list of text"
    STATUS = "an enum"
    JSON_OBJECT = "a JSON object"
    CHOICE = "a oneof"
    OPTIONAL = "an optional scalar"
    SCALAR = "a scalar"
    BOOL = "a bool"


def match_fields(
    names: Iterable[str], array_fields: dict[str, ArrayField], descriptor: Any
) -> dict[str, tuple[FieldDescriptor, ...]]:
    """Returns the parts of the message that carry each field. Raises FieldsDiffer naming a field without a partner."""
    parts_by_name: dict[str, tuple[FieldDescriptor, ...]] = dict.fromkeys(names, ())
    for part in descriptor.fields:
        if part.name == EXTRA:
            continue
        name = _owner(part)
        if name not in parts_by_name:
            raise FieldsDiffer(
                f"{part.name} is a field of {descriptor.full_name} and {name} none of Sample: declare it in "
                "slime/types/sample/sample.py, too",
                field=name, expected="a field of Sample",
            )  # fmt: skip
        parts_by_name[name] += (part,)
    for name, parts in parts_by_name.items():
        if not parts:
            raise FieldsDiffer(
                f"{name} is a field of Sample and none of {descriptor.full_name}: declare it in "
                "proto/slime/v1/sample.proto, too, and run scripts/generate_proto",
                field=name, expected=f"a field of {descriptor.full_name}",
            )  # fmt: skip
        if (name in array_fields) != (kind_of(parts) is Kind.ARRAY):
            raise FieldsDiffer(
                f"{name} is {kind_of(parts).value} in {descriptor.full_name}: a field is a Tensor there where "
                "slime/types/sample/sample.py declares it with array_field(), and only there",
                field=name, expected="array_field() and Tensor, or neither",
            )  # fmt: skip
    return parts_by_name


def _owner(part: FieldDescriptor) -> str:
    """Returns the field of Sample that a field of the message belongs to."""
    oneof = part.containing_oneof
    # An optional field is alone in a oneof whose name begins with an underscore.
    if oneof is not None and not oneof.name.startswith("_"):
        return oneof.name
    return part.name.removesuffix("_json")


def kind_of(parts: tuple[FieldDescriptor, ...]) -> Kind:
    part = parts[0]
    if part.name != _owner(part):
        return Kind.JSON_OBJECT if part.name == f"{_owner(part)}_json" else Kind.CHOICE
    if part.message_type is not None:
        known = {tensor_pb2.Tensor.DESCRIPTOR.full_name: Kind.ARRAY, tensor_pb2.Value.DESCRIPTOR.full_name: Kind.TREE}
        return known.get(part.message_type.full_name, Kind.RECORDS if _is_list(part) else Kind.RECORD)
    if _is_list(part):
        return Kind.TEXTS
    if part.type == FieldDescriptor.TYPE_ENUM:
        return Kind.STATUS
    if part.has_presence:
        return Kind.OPTIONAL
    return Kind.BOOL if part.type == FieldDescriptor.TYPE_BOOL else Kind.SCALAR


def _is_list(part: FieldDescriptor) -> bool:
    return bool(part.default_value == [])


PARTS = match_fields(FIELD_NAMES, Sample.array_fields, sample_pb2.Sample.DESCRIPTOR)


def fields_of(kind: Kind) -> tuple[str, ...]:
    return tuple(name for name, parts in PARTS.items() if kind_of(parts) is kind)


def record_types(kind: Kind) -> dict[str, Any]:
    """Returns the class of each field with records. Raises FieldsDiffer if its fields are not the message's."""
    hints = typing.get_type_hints(Sample)
    classes = {name: (typing.get_args(hints[name]) or (hints[name],))[0] for name in fields_of(kind)}
    for name, cls in classes.items():
        message: Any = PARTS[name][0].message_type
        of_class, in_message = (
            set(cls().__dict__ if kind is Kind.RECORD else cls.__annotations__),
            set(message.fields_by_name),
        )
        if of_class != in_message:
            raise FieldsDiffer(
                f"{cls.__name__} and {message.full_name} differ in {', '.join(sorted(of_class ^ in_message))}",
                field=name, expected="the same fields in both",
            )  # fmt: skip
    return classes


def expected_scalars() -> dict[str, str]:
    """Describes the values of each scalar, for errors."""
    words = {
        FieldDescriptor.TYPE_STRING: ("text, or None", "text that UTF-8 can hold"),
        FieldDescriptor.TYPE_INT64: ("a whole number of 64 bits, or None", "a whole number"),
    }
    return {
        name: words.get(PARTS[name][0].type, ("a number, or None", "a number"))[kind is Kind.SCALAR]
        for kind in (Kind.OPTIONAL, Kind.SCALAR)
        for name in fields_of(kind)
    }


_WIRE_TYPES = {
    name: _FLOAT_TYPES
    if declared.dtype.kind == "f"
    else (*_INTEGER_TYPES, tensor_pb2.DATA_TYPE_BOOL)
    if declared.dtype.itemsize == 1
    else _INTEGER_TYPES
    for name, declared in Sample.array_fields.items()
}


def check_wire_type(name: str, got: Any) -> None:
    """Raises InvalidField if the array `name` has the wrong kind of number, which decoding would convert if its values
    fit. got: a DataType."""
    allowed = _WIRE_TYPES[name]
    if got not in allowed:
        known = tensor_pb2.DataType.values()
        kind = "a float" if allowed is _FLOAT_TYPES else "an integer"
        raise InvalidField(
            f"{name}.dtype", tensor_pb2.DataType.Name(got) if got in known else got, f"{kind} DataType of slime.v1"
        )
