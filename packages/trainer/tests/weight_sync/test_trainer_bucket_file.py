"""Buckets in memory that engines on this machine read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from slime.trainer.weight_sync.bucket_file import BucketFile, may_read_files
from slime.types.clients import Engine

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@st.composite
def buckets(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    made = draw(st.lists(st.tuples(st.sampled_from(DTYPES), shapes, st.booleans()), max_size=5))
    tensors = [torch.randn(shape).to(dtype) for dtype, shape, _ in made]
    tensors = [t.mT if turned and t.ndim > 1 else t for t, (_, _, turned) in zip(tensors, made, strict=True)]
    return {f"w{i}": t for i, t in enumerate(sorted(tensors, key=lambda t: -t.itemsize))}


@given(st.lists(buckets(), min_size=1, max_size=3))
def test_a_reader_finds_the_last_bucket_whatever_was_there_before(written: list[dict[str, torch.Tensor]]) -> None:
    file = BucketFile()
    try:
        for bucket in written:
            assert file.write(bucket) == os.path.getsize(file.path)
            found = load_file(file.path)
            assert found.keys() == bucket.keys()
            for name, tensor in bucket.items():
                assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(found[name].float(), tensor.float())
    finally:
        file.close()


def test_only_this_user_reads_it_and_it_ends_when_it_is_closed() -> None:
    file = BucketFile()
    assert os.stat(file.path).st_mode & 0o777 == 0o600
    file.close()
    assert not Path(file.path).exists()


@pytest.mark.parametrize(
    ("urls", "may"),
    [
        (["http://127.0.0.1:1", "http://[::1]:2", "http://localhost:3"], True),
        (["http://127.0.0.1:1", "http://10.0.0.2:1"], False),
        (["http://node:1"], False),
    ],
)
def test_engines_on_other_machines_get_buckets_sent(urls: list[str], may: bool) -> None:
    assert may_read_files([Engine(url, url, "embedded", True, 0) for url in urls]) is may
