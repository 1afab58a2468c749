"""A field of `Sample` that is not declared on both sides fails at import."""

from __future__ import annotations

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool

from slime.types.sample import FIELD_NAMES, Sample
from slime.types.sample.fields import ArrayField, RowCount
from slime.types.wire.fields import FieldsDiffer, match_fields
from slime.v1 import sample_pb2, tensor_pb2


def wire(**types: str):
    """The descriptor of a message with fields of these messages or scalar types."""
    file = descriptor_pb2.FileDescriptorProto(name="changed.proto", package="changed", syntax="proto3")
    file.dependency.append("slime/v1/tensor.proto")
    message = file.message_type.add(name="Sample")
    for number, (name, kind) in enumerate(types.items(), start=1):
        field = message.field.add(name=name, number=number, label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL)
        if kind == "Tensor":
            field.type, field.type_name = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, ".slime.v1.Tensor"
        else:
            field.type = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(tensor_pb2.DESCRIPTOR.serialized_pb)
    pool.Add(file)
    return pool.FindMessageTypeByName("changed.Sample")


ARRAYS = {"tokens": ArrayField(np.dtype(np.int32), RowCount.ANY)}


def test_fields_of_both_sides_are_matched() -> None:
    found = match_fields(
        ["tokens", "label", "metadata"], ARRAYS, wire(tokens="Tensor", label="string", metadata_json="string")
    )
    assert {name: [part.name for part in parts] for name, parts in found.items()} == {
        "tokens": ["tokens"],
        "label": ["label"],
        "metadata": ["metadata_json"],
    }


@pytest.mark.parametrize(
    ("names", "types", "words"),
    [
        (["tokens", "entropies"], dict(tokens="Tensor"), "entropies is a field of Sample and none of .*generate_proto"),
        (
            ["tokens"],
            dict(tokens="Tensor", entropies="Tensor"),
            "entropies is a field of changed.Sample and entropies none",
        ),
        (["tokens"], dict(tokens="Tensor", notes_json="string"), "notes_json is .* and notes none of Sample"),
        (["tokens", "label"], dict(tokens="Tensor", label="Tensor"), "label is a Tensor .* array_field"),
        (["tokens"], dict(tokens="string"), "tokens is a scalar .* array_field"),
    ],
)
def test_a_field_of_one_side_is_named_with_the_file_that_lacks_it(
    names: list[str], types: dict[str, str], words: str
) -> None:
    with pytest.raises(FieldsDiffer, match=words):
        match_fields(names, ARRAYS, wire(**types))


def test_every_field_of_the_message_belongs_to_a_field_of_sample() -> None:
    carried = {
        part.name
        for parts in match_fields(FIELD_NAMES, Sample.array_fields, sample_pb2.Sample.DESCRIPTOR).values()
        for part in parts
    }
    assert carried == {field.name for field in sample_pb2.Sample.DESCRIPTOR.fields} - {"extra_json"}
