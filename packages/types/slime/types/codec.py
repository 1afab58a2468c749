"""`Sample` <-> `slime.v1.Sample`, lossless for every field.

What changes on the way: numpy scalars become plain numbers, tuples lists, a reward that is an int or a bool the float
of the same value, tensors in `multimodal_*` numpy arrays. What cannot travel is an InvalidField that names it.
Per-token arrays of a decoded sample are its own and may be written to; with `copy=False` they are read-only views
of the message's bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError

from slime.types.errors import InvalidField
from slime.types.json_fields import from_json, to_json
from slime.types.sample import CONVERTERS, FIELD_NAMES, PrefixCacheInfo, Sample, SampleGroup, SpecInfo, TokenSpan
from slime.types.status import STATUS_BY_NUMBER, STATUS_NUMBERS, SampleStatus
from slime.types.tensor import DATA_TYPES, Resolver, fill_tensor, fill_value, tensor_from_proto, value_from_proto
from slime.v1 import sample_pb2, tensor_pb2

_FIELDS = frozenset(FIELD_NAMES)
# Wire type and numpy type of a field in its usual form; routed experts may be of any integer type.
_ARRAYS = {
    name: (DATA_TYPES[np.dtype(dtype)], np.dtype(dtype), np.dtype(dtype).itemsize)
    for name, dtype in {
        "loss_mask": np.uint8, "rollout_log_probs": np.float32, "teacher_log_probs": np.float32,
        "rollout_top_p_token_ids": np.int32, "rollout_top_p_token_offsets": np.int64, "tokens": np.int32,
        "rollout_routed_experts": np.int32,
    }.items()
}  # fmt: skip
# A descriptor's name is made anew each time it is asked for.
_NAMES = {field.number: field.name for field in sample_pb2.Sample.DESCRIPTOR.fields}
# None where they are not set, on both sides.
_OPTIONAL = (
    "group_index",
    "index",
    "rollout_id",
    "session_id",
    "multimodal_train_input_id",
    "generate_function_path",
    "custom_rm_path",
)
_SCALARS = ("response", "response_length", "non_generation_time")
_EXPECTED = dict.fromkeys(("group_index", "index", "rollout_id"), "a whole number of 64 bits, or None") | {
    "response_length": "a whole number",
    "non_generation_time": "a number of seconds",
    "response": "text that UTF-8 can hold",
}


def encode_sample(sample: Sample) -> bytes:
    """What `sample_to_proto(sample).SerializeToString()` means, with each array copied once instead of three times.

    A message is the concatenation of its fields, in any order.
    """
    message = sample_pb2.Sample()
    values = sample.__dict__
    aside: list[Any] = []
    for name, (number, _, itemsize) in _ARRAYS.items():
        array = values[name]
        if isinstance(array, list):
            array = CONVERTERS[name](name, array)
        if array is not None and _is_plain(name, array):
            aside += (_array_header(name, number, array.size, itemsize), array)
        elif array is not None:
            _fill_array(message, name, array)
    _fill_fields(message, values)
    return b"".join((message.SerializeToString(), *aside))


def _is_plain(name: str, array: np.ndarray) -> bool:
    """Whether the array has the one wire type of its field, and its bytes, of which there are some, in one piece."""
    return array.size > 0 and array.ndim == 1 and array.flags.c_contiguous and name != "rollout_routed_experts"


@functools.lru_cache(maxsize=4096)
def _array_header(name: str, number: int, size: int, itemsize: int) -> bytes:
    """The encoded `Tensor` field up to where its bytes begin."""
    tensor = tensor_pb2.Tensor(dtype=number, shape=[size])  # type: ignore[arg-type]
    inner = tensor.SerializeToString() + _tag(tensor, "inline") + _varint(size * itemsize)
    return _tag(sample_pb2.Sample, name) + _varint(len(inner) + size * itemsize) + inner


def _tag(message: Any, name: str) -> bytes:
    return _varint(message.DESCRIPTOR.fields_by_name[name].number << 3 | 2)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def decode_sample(data: bytes, *, resolve: Resolver | None = None, copy: bool = True) -> Sample:
    try:
        message = sample_pb2.Sample.FromString(data)
    except DecodeError as error:
        raise InvalidField("sample", f"{len(data)} bytes", f"an encoded slime.v1.Sample ({error})") from None
    return sample_from_proto(message, resolve=resolve, copy=copy)


def sample_to_proto(sample: Sample) -> sample_pb2.Sample:
    """Raises InvalidField for a value that its field on the wire cannot hold. Does not call `validate`."""
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
    if array.size or name != "tokens":  # tokens are empty where the field is not set
        fill_tensor(getattr(message, name), array, name)


def _fill_fields(message: sample_pb2.Sample, values: dict[str, Any]) -> None:
    """Everything but the arrays."""
    try:
        for name in _OPTIONAL:
            if values[name] is not None:
                setattr(message, name, values[name])
        for name in _SCALARS:
            setattr(message, name, values[name])
    except (TypeError, ValueError):
        raise InvalidField(name, values[name], _EXPECTED.get(name, "text, or None")) from None
    _fill_prompt(message, values["prompt"])
    status = STATUS_NUMBERS.get(values["status"])
    if status is None:
        raise InvalidField("status", values["status"], "a Sample.Status")
    message.status = status  # type: ignore[assignment]
    if values["reward"] is not None:
        _fill_reward(message, values["reward"])
    if values["label"] is not None:
        _fill_label(message, values["label"])
    if values["remove_sample"]:
        message.remove_sample = bool(values["remove_sample"])
    if values["weight_versions"]:
        _extend(message, "weight_versions", values["weight_versions"])
    for position, span in enumerate(values["spans"]):
        added = message.spans.add()
        for name in ("start", "end", "model", "weight_version"):
            _set(added, name, getattr(span, name), f"spans[{position}].{name}")
    if values["metadata"] != {}:
        message.metadata_json = _object_json(values["metadata"], "metadata")
    if values["apply_chat_template_kwargs"] != {}:
        message.apply_chat_template_kwargs_json = _object_json(
            values["apply_chat_template_kwargs"], "apply_chat_template_kwargs"
        )
    if values["train_metadata"] is not None:
        message.train_metadata_json = _object_json(values["train_metadata"], "train_metadata")
    for name in ("multimodal_inputs", "multimodal_train_inputs"):
        if values[name] is not None:
            fill_value(getattr(message, name), values[name], name)
    for name, default in (("spec_info", _NO_SPEC), ("prefix_cache_info", _NO_CACHE)):
        info = values[name]
        if info.__dict__ != default:
            for key, value in info.__dict__.items():
                _set(getattr(message, name), key, value, f"{name}.{key}")
    if len(values) > len(_FIELDS):
        extra = {name: value for name, value in values.items() if name not in _FIELDS}
        message.extra_json = "{" + ",".join(f"{to_json(k, 'name')}:{to_json(v, k)}" for k, v in extra.items()) + "}"


_NO_SPEC = SpecInfo().__dict__
_NO_CACHE = PrefixCacheInfo().__dict__


def _set(message: Any, name: str, value: Any, path: str) -> None:
    try:
        setattr(message, name, value)
    except (TypeError, ValueError):
        kind = message.DESCRIPTOR.fields_by_name[name].type
        raise InvalidField(
            path, value, "text that UTF-8 can hold" if kind == FieldDescriptor.TYPE_STRING else "a whole number"
        ) from None


def _extend(message: Any, name: str, values: Any) -> None:
    for position, value in enumerate(values):
        if not isinstance(value, str):
            raise InvalidField(f"{name}[{position}]", value, "text")
    getattr(message, name).extend(values)


def _fill_prompt(message: sample_pb2.Sample, prompt: Any) -> None:
    if isinstance(prompt, str):
        if prompt:
            _set(message, "prompt_text", prompt, "prompt")
    elif isinstance(prompt, (list, tuple)):
        for position, turn in enumerate(prompt):
            if not isinstance(turn, dict):
                raise InvalidField(f"prompt[{position}]", turn, "a chat message (a dict)")
        message.prompt_messages_json = to_json(prompt, "prompt")
    else:
        raise InvalidField("prompt", prompt, "text, or a list of chat messages")


def _fill_reward(message: sample_pb2.Sample, reward: Any) -> None:
    # Whole numbers beyond 2**53 have no float of their own.
    if (
        isinstance(reward, (float, np.floating))
        or isinstance(reward, (int, np.integer, np.bool_))
        and abs(int(reward)) <= 2**53
    ):
        message.reward_value = float(reward)
    else:
        message.reward_json = to_json(reward, "reward")


def _fill_label(message: sample_pb2.Sample, label: Any) -> None:
    if isinstance(label, str):
        _set(message, "label_text", label, "label")
    else:
        message.label_json = to_json(label, "label")


def _object_json(value: Any, name: str) -> str:
    if not isinstance(value, dict):
        raise InvalidField(name, value, "a dict")
    return to_json(value, name)


def sample_from_proto(message: sample_pb2.Sample, *, resolve: Resolver | None = None, copy: bool = True) -> Sample:
    """The sample that `message` holds. Raises InvalidField naming the field that breaks the contract.

    resolve: reads what a BlobReference names; without it a reference is an error.
    copy: see the module's docstring.
    """
    values: dict[str, Any] = {
        "group_index": None, "index": None, "rollout_id": None, "prompt": "", "tokens": None,
        "multimodal_inputs": None, "multimodal_train_inputs": None, "multimodal_train_input_id": None,
        "apply_chat_template_kwargs": {}, "response": "", "response_length": 0, "label": None, "reward": None,
        "loss_mask": None, "weight_versions": [], "rollout_log_probs": None, "rollout_top_p_token_ids": None,
        "rollout_top_p_token_offsets": None, "rollout_routed_experts": None, "remove_sample": False,
        "teacher_log_probs": None, "status": SampleStatus.PENDING, "metadata": {}, "generate_function_path": None,
        "custom_rm_path": None, "train_metadata": None, "session_id": None, "non_generation_time": 0.0,
        "spec_info": SpecInfo(), "prefix_cache_info": PrefixCacheInfo(), "spans": [],
    }  # fmt: skip
    for descriptor, value in message.ListFields():
        name = _NAMES[descriptor.number]
        if name in _ARRAYS:
            values[name] = _array(name, value, resolve, copy)
        elif name in _DECODERS:
            _DECODERS[name](values, value, resolve)
        else:
            values[name] = value
    if values["tokens"] is None:
        values["tokens"] = np.empty(0, np.int32)
    sample = object.__new__(Sample)
    # Past __setattr__: every array here is converted already.
    object.__setattr__(sample, "__dict__", values)
    return sample


def _array(name: str, tensor: Any, resolve: Resolver | None, copy: bool) -> np.ndarray:
    number, dtype, itemsize = _ARRAYS[name]
    data, shape = tensor.inline, tensor.shape
    if data and tensor.dtype == number and len(shape) == 1 and shape[0] * itemsize == len(data):
        return np.ndarray(shape[0], dtype, bytearray(data) if copy else data)
    # Another shape or integer type, an empty array, a reference, or an error.
    return CONVERTERS[name](name, tensor_from_proto(tensor, field=name, resolve=resolve, copy=copy))


def _decode_status(values: dict[str, Any], number: int, _: Any) -> None:
    if number not in STATUS_BY_NUMBER:
        raise InvalidField("status", number, "a SampleStatus of slime.v1")
    values["status"] = STATUS_BY_NUMBER[number]


def _decode_info(name: str, cls: type) -> Callable[[dict[str, Any], Any, Any], None]:
    names = tuple(cls().__dict__)

    def decode(values: dict[str, Any], message: Any, _: Any) -> None:
        values[name] = cls(*(getattr(message, key) for key in names))

    return decode


def _decode_spans(values: dict[str, Any], spans: Any, _: Any) -> None:
    values["spans"] = [TokenSpan(span.start, span.end, span.model, span.weight_version) for span in spans]


def _decode_extra(values: dict[str, Any], text: str, _: Any) -> None:
    for key, value in from_json(text, "extra_json", dict).items():
        # Such a name would hide a field or a method of this version.
        if key in _FIELDS or hasattr(Sample, key):
            raise InvalidField(f"extra_json.{key}", value, "a name that Sample does not have")
        values[key] = value


def _decode_json(name: str, field: str, kind: type | None) -> Callable[[dict[str, Any], Any, Any], None]:
    def decode(values: dict[str, Any], text: str, _: Any) -> None:
        values[name] = from_json(text, field, kind)

    return decode


def _decode_renamed(name: str) -> Callable[[dict[str, Any], Any, Any], None]:
    return lambda values, value, _: values.__setitem__(name, value)


def _decode_tree(name: str) -> Callable[[dict[str, Any], Any, Any], None]:
    return lambda values, value, resolve: values.__setitem__(name, value_from_proto(value, name, resolve))


_DECODERS: dict[str, Callable[[dict[str, Any], Any, Any], None]] = {
    "prompt_text": _decode_renamed("prompt"),
    "prompt_messages_json": _decode_json("prompt", "prompt_messages_json", list),
    "apply_chat_template_kwargs_json": _decode_json(
        "apply_chat_template_kwargs", "apply_chat_template_kwargs_json", dict
    ),
    "multimodal_inputs": _decode_tree("multimodal_inputs"),
    "multimodal_train_inputs": _decode_tree("multimodal_train_inputs"),
    "label_text": _decode_renamed("label"),
    "label_json": _decode_json("label", "label_json", None),
    "reward_value": _decode_renamed("reward"),
    "reward_json": _decode_json("reward", "reward_json", None),
    "status": _decode_status,
    "weight_versions": lambda values, value, _: values.__setitem__("weight_versions", list(value)),
    "spans": _decode_spans,
    "metadata_json": _decode_json("metadata", "metadata_json", dict),
    "train_metadata_json": _decode_json("train_metadata", "train_metadata_json", dict),
    "spec_info": _decode_info("spec_info", SpecInfo),
    "prefix_cache_info": _decode_info("prefix_cache_info", PrefixCacheInfo),
    "extra_json": _decode_extra,
}


def group_to_proto(group: SampleGroup) -> sample_pb2.SampleGroup:
    message = sample_pb2.SampleGroup(group_index=group.group_index, dataset=group.dataset)
    for sample in group.samples:
        fill_sample(message.samples.add(), sample)
    return message


def group_from_proto(message: sample_pb2.SampleGroup, *, resolve: Resolver | None = None) -> SampleGroup:
    samples = [sample_from_proto(sample, resolve=resolve) for sample in message.samples]
    return SampleGroup(message.group_index, message.dataset or "train", samples)
