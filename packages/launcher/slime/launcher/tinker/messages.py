"""Protobuf messages of Tinker's protocol, as far as the service reads or writes them.

The SDK sends `forward_backward`, and receives its results and those of samples, as protobuf; everything else is JSON.
Fields that the service refuses are declared as bytes: it only has to notice that they are set.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CONTENT_TYPE = "application/x-protobuf"
PACKAGE = "slime.tinker"
# Values of DType.
FLOAT32, INT64, INT32, BFLOAT16 = 1, 2, 3, 4
# Values of StopReason.
STOPPED, LENGTH = 0, 1

# name -> (number, type). "[T]" is repeated, "{T}" a map from strings, "T?" may be missing.
_MESSAGES: dict[str, dict[str, tuple[int, str]]] = {
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {"dense": (1, "bytes?"), "sparse_csr": (2, "SparseCsr"), "dtype": (3, "int32"), "shape": (4, "[int64]")},
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "bytes?"), "dmel": (3, "bytes?")},
    "Datum": {"model_input": (1, "[Chunk]"), "loss_fn_inputs": (2, "{Tensor}")},
    "LossConfigValue": {"number": (1, "double?"), "text": (2, "string?")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"), "seq_id": (2, "int32"), "data": (3, "[Datum]"), "loss_fn": (4, "string"),
        "loss_fn_config": (5, "{double}"), "forward_only": (6, "bool"), "loss_fn_config_v2": (7, "{LossConfigValue}"),
    },
    "BatchedTensor": {
        "data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32"), "trailing_shape": (4, "[int64]"),
    },
    "ArrayRecord": {"type_tag": (1, "string"), "fields": (2, "{BatchedTensor}"), "num_datums": (3, "int64")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"), "loss_fn_outputs": (2, "[ArrayRecord]"), "metrics": (3, "{double}"),
    },
    "SampledSequence": {"stop_reason": (1, "int32"), "tokens": (2, "bytes"), "logprobs": (3, "bytes?")},
    "SampleResponse": {"sequences": (1, "[SampledSequence]"), "prompt_logprobs": (2, "bytes?")},
}  # fmt: skip

_FIELD = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "bytes": _FIELD.TYPE_BYTES, "string": _FIELD.TYPE_STRING, "double": _FIELD.TYPE_DOUBLE, "bool": _FIELD.TYPE_BOOL,
    "int32": _FIELD.TYPE_INT32, "int64": _FIELD.TYPE_INT64,
}  # fmt: skip


def _typed(field: Any, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


def _declare(message: Any, name: str, number: int, kind: str) -> None:
    field = message.field.add(name=name, number=number, label=_FIELD.LABEL_OPTIONAL)
    if kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=_FIELD.LABEL_OPTIONAL, type=_FIELD.TYPE_STRING)
        _typed(entry.field.add(name="value", number=2, label=_FIELD.LABEL_OPTIONAL), kind.strip("{}"))
        field.label, field.type = _FIELD.LABEL_REPEATED, _FIELD.TYPE_MESSAGE
        field.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
        return
    if kind.startswith("["):
        field.label = _FIELD.LABEL_REPEATED
    if kind.endswith("?"):
        # proto3 tracks the presence of a scalar through a oneof with the scalar as its only member.
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
    _typed(field, kind.strip("[]?"))


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="slime/tinker.proto", package=PACKAGE, syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, kind) in fields.items():
            _declare(message, field, number, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}")) for name in _MESSAGES
    }


_CLASSES = _classes()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
