"""Codec between `Sample` and `slime.v1.Sample`, lossless for every field.

`wire.fields` knows how each field travels; only the three oneofs are named here. Some types change on the way: numpy
scalars become plain numbers, tuples become lists, a reward that is an int or a bool becomes the float of the same
value, and torch tensors in `multimodal_*` become numpy arrays. A value that cannot travel raises InvalidField with its
path.
Per-token arrays of a decoded sample are its own and may be written to; with `copy=False` they are read-only views
of the message's bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from slime.types.errors import InvalidField
from slime.types.sample import FIELD_NAMES, Sample, SampleGroup
from slime.types.sample.status import STATUS_BY_NUMBER, STATUS_NUMBERS
from slime.types.wire.encoded import MessagePieces, tag_of, varint
from slime.types.wire.fields import (
    EXTRA,
    PARTS,
    FieldsDiffer,
    Kind,
    check_wire_type,
    expected_scalars,
    fields_of,
    record_types,
)
from slime.types.wire.json_fields import from_json, to_json
from slime.types.wire.tensor import DATA_TYPES, Resolver, fill_tensor, fill_value, tensor_from_proto, value_from_proto
from slime.v1 import sample_pb2, tensor_pb2

_Decoder = Callable[[dict[str, Any], str, Any, Any], None]

_FIELDS = frozenset(FIELD_NAMES)
# Wire type, numpy type and size of an element of each array; one of several dimensions may be of any integer type.
_ARRAYS = {
    name: (DATA_TYPES[declared.dtype], declared.dtype, declared.dtype.itemsize)
    for name, declared in Sample.array_fields.items()
}
_CONVERT = {name: functools.partial(declared.convert, name) for name, declared in Sample.array_fields.items()}
_FLAT = frozenset(name for name, declared in Sample.array_fields.items() if declared.ndim == 1)
_REQUIRED_ARRAYS = {name: declared.dtype for name, declared in Sample.array_fields.items() if declared.required}
# Cached, because a descriptor makes a new string each time its name is read.
_NAMES = {field.number: field.name for field in sample_pb2.Sample.DESCRIPTOR.fields}
_OPTIONAL = fields_of(Kind.OPTIONAL)
_SCALARS = fields_of(Kind.SCALAR)
_STATUSES = fields_of(Kind.STATUS)
_EXPECTED = expected_scalars()
_RECORD = record_types(Kind.RECORD)
_RECORDS = record_types(Kind.RECORDS)
_NO_RECORD = {name: cls().__dict__ for name, cls in _RECORD.items()}
# A decoded sample begins with these; the fields of _FACTORIES get a value of their own where the message has none.
_DEFAULTS = {
    field.name: None if field.default is dataclasses.MISSING else field.default for field in dataclasses.fields(Sample)
}
_FACTORIES = tuple(
    (field.name, functools.partial(np.empty, 0, _REQUIRED_ARRAYS[field.name]))
    if field.name in _REQUIRED_ARRAYS
    else (field.name, field.default_factory)
    for field in dataclasses.fields(Sample)
    if field.default_factory is not dataclasses.MISSING
)


def encode_sample(sample: Sample) -> bytes:
    """Encodes as `sample_to_proto(sample).SerializeToString()` does, but copies each array once instead of three times.

    The fields of an encoded message may stand in any order, so the arrays are appended to the other fields.
    """
    return sample_pieces(sample).join()


def sample_pieces(sample: Sample) -> MessagePieces:
    """Returns the encoded sample with its arrays as they are, to be joined before they change."""
    message = sample_pb2.Sample()
    values = sample.__dict__
    pieces: list[Any] = [b""]
    size = 0
    for name, (number, _, itemsize) in _ARRAYS.items():
        array = values[name]
        if isinstance(array, list):
            array = _CONVERT[name](array)
        if array is not None and _is_plain(name, array):
            header = _array_header(name, number, array.size, itemsize)
            pieces += (header, array)
            size += len(header) + array.nbytes
        elif array is not None:
            _fill_array(message, name, array)
    _fill_fields(message, values)
    pieces[0] = message.SerializeToString()
    return MessagePieces(pieces, size + len(pieces[0]))


def _is_plain(name: str, array: np.ndarray) -> bool:
    """Tells whether the bytes of the array can be written as they are: one dimension, contiguous, not empty."""
    return array.size > 0 and array.ndim == 1 and array.flags.c_contiguous and name in _FLAT


@functools.lru_cache(maxsize=4096)
def _array_header(name: str, number: int, size: int, itemsize: int) -> bytes:
    """Returns the encoded `Tensor` field up to the beginning of its bytes."""
    tensor = tensor_pb2.Tensor(dtype=number, shape=[size])  # type: ignore[arg-type]
    inner = tensor.SerializeToString() + tag_of(tensor, "inline") + varint(size * itemsize)
    return tag_of(sample_pb2.Sample, name) + varint(len(inner) + size * itemsize) + inner


def decode_sample(data: bytes, *, resolve: Resolver | None = None, copy: bool = True) -> Sample:
    """Decodes a sample, as `sample_from_proto` does, from the bytes of its message. Raises InvalidField."""
    try:
        message = sample_pb2.Sample.FromString(data)
    except DecodeError as error:
        raise InvalidField("sample", f"{len(data)} bytes", f"an encoded slime.v1.Sample ({error})") from None
    return sample_from_proto(message, resolve=resolve, copy=copy)


def sample_to_proto(sample: Sample) -> sample_pb2.Sample:
    """Converts a sample without validating it. Raises InvalidField for a value that the message cannot hold."""
    message = sample_pb2.Sample()
    fill_sample(message, sample)
    return message


def fill_sample(message: sample_pb2.Sample, sample: Sample) -> None:
    values = sample.__dict__
    for name in _ARRAYS:
        array = sample.array(name)
        if array is not None:
            _fill_array(message, name, array)
    _fill_fields(message, values)


def _fill_array(message: sample_pb2.Sample, name: str, array: np.ndarray) -> None:
    if array.size or name not in _REQUIRED_ARRAYS:  # a required array is empty where the field is not set
        fill_tensor(getattr(message, name), array, name)


def _fill_fields(message: sample_pb2.Sample, values: dict[str, Any]) -> None:
    """Fills all fields except the arrays."""
    try:
        for name in _OPTIONAL:
            if values[name] is not None:
                setattr(message, name, values[name])
        for name in _SCALARS:
            setattr(message, name, values[name])
    except (TypeError, ValueError):
        raise InvalidField(name, values[name], _EXPECTED.get(name, "text, or None")) from None
    for name in _STATUSES:
        _fill_status(message, name, values[name])
    for name, write in _WHERE_SET:
        if values[name] is not None:
            write(message, name, values[name])
    for name, write, default in _WHERE_CHANGED:
        if values[name] != default:
            write(message, name, values[name])
    for name, unchanged in _NO_RECORD.items():
        record = values[name]
        if record.__dict__ != unchanged:
            for key, value in record.__dict__.items():
                _set(getattr(message, name), key, value, f"{name}.{key}")
    if len(values) > len(_FIELDS):
        extra = {name: value for name, value in values.items() if name not in _FIELDS}
        message.extra_json = "{" + ",".join(f"{to_json(k, 'name')}:{to_json(v, k)}" for k, v in extra.items()) + "}"


def _set(message: Any, name: str, value: Any, path: str) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        kind = message.DESCRIPTOR.fields_by_name[name].type
        raise InvalidField(
            path, value, "text that UTF-8 can hold" if kind == FieldDescriptor.TYPE_STRING else "a whole number"
        ) from None


def _fill_bool(message: Any, name: str, value: Any) -> None:
    setattr(message, name, bool(value))


def _fill_status(message: Any, name: str, value: Any) -> None:
    number = STATUS_NUMBERS.get(value)
    if number is None:
        raise InvalidField(name, value, "a Sample.Status")
    setattr(message, name, number)


def _fill_texts(message: Any, name: str, values: Any) -> None:
    for position, value in enumerate(values):
        if not isinstance(value, str):
            raise InvalidField(f"{name}[{position}]", value, "text")
    getattr(message, name).extend(values)


def _fill_records(message: Any, name: str, records: Any) -> None:
    for position, record in enumerate(records):
        added = getattr(message, name).add()
        for key in _RECORDS[name].__annotations__:
            _set(added, key, getattr(record, key), f"{name}[{position}].{key}")


def _fill_tree(message: Any, name: str, tree: Any) -> None:
    fill_value(getattr(message, name), tree, name)


def _fill_object(message: Any, name: str, value: Any) -> None:
    if not isinstance(value, dict):
        raise InvalidField(name, value, "a dict")
    setattr(message, f"{name}_json", to_json(value, name))


def _fill_prompt(message: Any, name: str, prompt: Any) -> None:
    if isinstance(prompt, str):
        _set(message, "prompt_text", prompt, name)
    elif isinstance(prompt, (list, tuple)):
        for position, turn in enumerate(prompt):
            if not isinstance(turn, dict):
                raise InvalidField(f"{name}[{position}]", turn, "a chat message (a dict)")
        message.prompt_messages_json = to_json(prompt, name)
    else:
        raise InvalidField(name, prompt, "text, or a list of chat messages")


def _fill_reward(message: Any, name: str, reward: Any) -> None:
    # Larger whole numbers need not have an exact float.
    if (
        isinstance(reward, (float, np.floating))
        or isinstance(reward, (int, np.integer, np.bool_))
        and abs(int(reward)) <= 2**53
    ):
        message.reward_value = float(reward)
    else:
        message.reward_json = to_json(reward, name)


def _fill_label(message: Any, name: str, label: Any) -> None:
    if isinstance(label, str):
        _set(message, "label_text", label, name)
    else:
        message.label_json = to_json(label, name)


_CHOICES = {"prompt": _fill_prompt, "reward": _fill_reward, "label": _fill_label}
for _name in set(fields_of(Kind.CHOICE)) ^ set(_CHOICES):
    raise FieldsDiffer(
        f"{_name}: a oneof has a function of its own in codec._CHOICES, and nothing else has", field=_name
    )
_WRITERS: dict[str, Callable[[Any, str, Any], None]] = _CHOICES | {
    name: write
    for kind, write in (
        (Kind.BOOL, _fill_bool), (Kind.TEXTS, _fill_texts), (Kind.RECORDS, _fill_records), (Kind.TREE, _fill_tree),
        (Kind.JSON_OBJECT, _fill_object),
    )
    for name in fields_of(kind)
}  # fmt: skip
_UNSET = _DEFAULTS | {name: make() for name, make in _FACTORIES}
# Fields with trees of arrays are compared with None only: `!=` fails for arrays.
_WHERE_SET = tuple((name, write) for name, write in _WRITERS.items() if _UNSET[name] is None)
_WHERE_CHANGED = tuple((name, write, _UNSET[name]) for name, write in _WRITERS.items() if _UNSET[name] is not None)


def sample_from_proto(
    message: sample_pb2.Sample, *, resolve: Resolver | None = None, copy: bool = True, check_types: bool = False
) -> Sample:
    """Converts a message to a sample. Raises InvalidField naming the field that breaks the contract.

    resolve: reads the bytes of a BlobReference; without it a reference is an error.
    copy: see the module's docstring. check_types: call `check_wire_type` for arrays of another type than their field's.
    """
    values = _DEFAULTS.copy()
    for descriptor, value in message.ListFields():
        name = _NAMES[descriptor.number]
        if name in _ARRAYS:
            values[name] = _array(name, value, resolve, copy, check_types)
        elif name in _DECODERS:
            field, decode = _DECODERS[name]
            decode(values, field, value, resolve)
        else:
            values[name] = value
    for name, make in _FACTORIES:
        if values[name] is None:
            values[name] = make()
    sample = object.__new__(Sample)
    # __setattr__ is bypassed: every array is converted already.
    object.__setattr__(sample, "__dict__", values)
    return sample


def _array(name: str, tensor: Any, resolve: Resolver | None, copy: bool, check_types: bool) -> np.ndarray:
    number, dtype, itemsize = _ARRAYS[name]
    data, shape = tensor.inline, tensor.shape
    if data and tensor.dtype == number and len(shape) == 1 and shape[0] * itemsize == len(data):
        return np.ndarray(shape[0], dtype, bytearray(data) if copy else data)
    # Slow path: another shape or integer type, an empty array, a reference, or an error.
    if check_types:
        check_wire_type(name, tensor.dtype)
    return _CONVERT[name](tensor_from_proto(tensor, field=name, resolve=resolve, copy=copy))


def _decode_status(values: dict[str, Any], name: str, number: int, _: Any) -> None:
    if number not in STATUS_BY_NUMBER:
        raise InvalidField(name, number, "a SampleStatus of slime.v1")
    values[name] = STATUS_BY_NUMBER[number]


def _decode_texts(values: dict[str, Any], name: str, texts: Any, _: Any) -> None:
    values[name] = list(texts)


def _decode_record(values: dict[str, Any], name: str, message: Any, _: Any) -> None:
    values[name] = _RECORD[name](*[getattr(message, key) for key in _NO_RECORD[name]])


def _decode_records(values: dict[str, Any], name: str, messages: Any, _: Any) -> None:
    cls = _RECORDS[name]
    keys = tuple(cls.__annotations__)
    values[name] = [cls(*[getattr(message, key) for key in keys]) for message in messages]


def _decode_tree(values: dict[str, Any], name: str, value: Any, resolve: Resolver | None) -> None:
    values[name] = value_from_proto(value, name, resolve)


def _decode_renamed(values: dict[str, Any], name: str, value: Any, _: Any) -> None:
    values[name] = value


def _decode_json(part: str, kind: type | None) -> _Decoder:
    return lambda values, name, text, _: values.__setitem__(name, from_json(text, part, kind))


def _decode_extra(values: dict[str, Any], name: str, text: str, _: Any) -> None:
    for key, value in from_json(text, name, dict, outer_levels=1).items():
        # The attribute would hide a field or a method of this version.
        if key in _FIELDS or hasattr(Sample, key):
            raise InvalidField(f"{name}.{key}", value, "a name that Sample does not have")
        values[key] = value


def _decoders() -> dict[str, tuple[str, _Decoder]]:
    """Returns, for each part of the message that has to be converted, its field of Sample and the conversion."""
    decoders: dict[str, tuple[str, _Decoder]] = {EXTRA: (EXTRA, _decode_extra)}
    for kind, decode in (
        (Kind.STATUS, _decode_status), (Kind.TEXTS, _decode_texts), (Kind.RECORD, _decode_record),
        (Kind.RECORDS, _decode_records), (Kind.TREE, _decode_tree),
    ):  # fmt: skip
        decoders |= {name: (name, decode) for name in fields_of(kind)}
    for name in fields_of(Kind.JSON_OBJECT):
        decoders[f"{name}_json"] = (name, _decode_json(f"{name}_json", dict))
    for name in fields_of(Kind.CHOICE):
        for part in PARTS[name]:
            json = _decode_json(part.name, list if part.name == "prompt_messages_json" else None)
            decoders[part.name] = (name, json if part.name.endswith("_json") else _decode_renamed)
    return decoders


_DECODERS = _decoders()


def group_to_proto(group: SampleGroup) -> sample_pb2.SampleGroup:
    message = sample_pb2.SampleGroup(group_index=group.group_index, dataset=group.dataset)
    for sample in group.samples:
        fill_sample(message.samples.add(), sample)
    return message


def group_from_proto(message: sample_pb2.SampleGroup, *, resolve: Resolver | None = None) -> SampleGroup:
    samples = [sample_from_proto(sample, resolve=resolve) for sample in message.samples]
    return SampleGroup(message.group_index, message.dataset or "train", samples)
