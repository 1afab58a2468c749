"""A model takes deltas of the version that it holds, and no others."""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.rollout.engines.sglang import local_checkpoint
from slime.rollout.engines.sglang.launch import SGLangOptions, server_command
from slime.rollout.engines.sglang.local_checkpoint import pull
from slime.types.directories import whole_directory
from slime.types.errors import DataLoss, InvalidField, MissingFile, WrongState
from slime.types.weight_deltas import PULL
from slime.types.weight_deltas.buckets import VersionDelta, encode_tensor, write_buckets, write_index


def weights(dtype: torch.dtype = torch.float32) -> ModelWeights:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3, bias=False)).to(dtype)
    return ModelWeights(module, "3")


def delta(
    held: ModelWeights, changed: dict[str, torch.Tensor], dtype: str = "float32", base: int = 3, max_bytes: int = 10**6
) -> list[bytes]:
    about = VersionDelta(base + 1, base, "a", "xor", "xxh3-128")
    tensors = []
    for name, tensor in held.tensors.items():
        old, new = (t.detach().to(getattr(torch, dtype)) for t in (tensor, changed.get(name, tensor)))
        before, after = (t.contiguous().view(-1).view(torch.uint8).numpy().copy() for t in (old, new))
        tensors.append(encode_tensor(about, name, dtype, tensor.shape, before, after))
    return [bucket for bucket, _ in write_buckets(about, tensors, max_bytes)]


@pytest.mark.parametrize(("dtype", "sent"), [(torch.float32, "float32"), (torch.float32, "bfloat16")])
def test_a_delta_is_applied_to_the_tensors(dtype: torch.dtype, sent: str) -> None:
    held = weights(dtype)
    # Weights that were sent before have the type of the wire.
    held.write({name: tensor.detach().to(getattr(torch, sent)) for name, tensor in held.tensors.items()})
    new = held.tensors["0.weight"].detach().clone()
    new[1, 2], new[3, 4] = float("inf"), -0.0
    buckets = delta(held, {"0.weight": new}, sent, max_bytes=1)
    assert len(buckets) == len(held.tensors) > 1
    for number, bucket in enumerate(buckets):
        assert held.version == "3"
        held.load_delta(bucket, "4", last=number == len(buckets) - 1)
    assert held.version == "4" and not held.incomplete
    assert np.array_equal(held.tensors["0.weight"].detach().view(torch.int32), new.view(torch.int32))


def test_deltas_of_other_versions_are_refused() -> None:
    held = weights()
    (bucket,) = delta(held, {}, base=2)
    with pytest.raises(WrongState, match="version 3 is a delta of version 2, and the model holds version 3"):
        held.load_delta(bucket, "3", last=True)
    with pytest.raises(InvalidField, match="weight_version: got 9, expected 3"):
        held.load_delta(bucket, "9", last=True)
    assert held.version == "3" and not held.incomplete and held.writes == 0


def test_other_weights_are_noticed_before_anything_is_copied() -> None:
    held = weights()
    (bucket,) = delta(held, {"0.weight": held.tensors["0.weight"] + 1})
    with torch.no_grad():
        held.tensors["1.weight"][0, 0] += 1
    with pytest.raises(DataLoss, match=r"tensor 1\.weight has checksum .* not the trainer's version 3"):
        held.load_delta(bucket, "4", last=True)
    assert held.version == "3" and not held.incomplete and held.writes == 0


def test_a_type_that_the_model_cannot_hold_is_refused() -> None:
    held = weights(torch.bfloat16)
    (bucket,) = delta(held, {}, "float32")
    with pytest.raises(InvalidField, match="requires --update-weight-dtype bfloat16"):
        held.load_delta(bucket, "4", last=True)


@pytest.mark.parametrize("dtype", ["int64", "float8_e4m3fn", "bool"])
def test_types_that_say_nothing_of_the_bits_of_weights_are_refused(dtype: str) -> None:
    held = weights()
    # As int64, 0.4 is 0: nothing would differ from these, whatever the weights are.
    zeros = {name: torch.zeros_like(tensor) for name, tensor in held.tensors.items()}
    of_zeros = weights()
    of_zeros.write(zeros)
    (bucket,) = delta(of_zeros, {}, dtype)
    with pytest.raises(InvalidField, match="requires --update-weight-dtype float32"):
        held.load_delta(bucket, "4", last=True)
    assert held.version == "3" and held.writes == 0


def test_sglang_is_started_with_the_function_that_brings_its_checkpoint_up_to_date() -> None:
    module, _, name = PULL.rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    own = {"custom_weight_loader": ["mine.load"]}
    words = server_command(SGLangOptions(model_path="m", gpus=["0"], deltas=True, args=own))
    place = words.index("--custom-weight-loader")
    assert words[place + 1 : place + 3] == ["mine.load", PULL]
    assert PULL not in server_command(SGLangOptions(model_path="m", gpus=["0"]))


def test_a_checkpoint_is_not_made_of_a_directory_that_is_gone(tmp_path: Path) -> None:
    local = tmp_path / "local"
    with pytest.raises(MissingFile, match="not a whole directory"):
        pull(str(tmp_path / "weight_v000001"), str(local), 1, "a")
    assert not list(local.glob("weight_v*"))


def test_a_file_of_others_in_an_old_version_blocks_no_later_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local"
    for version in (1, 2, 3):
        with whole_directory(tmp_path / f"v{version}", "test") as partial:
            (partial / "model.safetensors").write_bytes(b"weights")
    first = pull(str(tmp_path / "v1"), str(local), 1, "a")
    (first / "notes").write_text("mine")
    with caplog.at_level(logging.WARNING):
        for version in (2, 3):
            target = pull(str(tmp_path / f"v{version}"), str(local), version, "a")
            assert (target / "model.safetensors").read_bytes() == b"weights"
    assert [path.name for path in first.iterdir()] == ["notes"]
    (said,) = caplog.messages
    assert f"{first} holds what slime did not write (notes): only the weights were removed" in said


def test_a_version_is_used_in_the_boot_that_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, local = weights(), tmp_path / "local"
    with whole_directory(tmp_path / "whole", "slime-trainer") as partial:
        save_file({name: tensor.detach() for name, tensor in held.tensors.items()}, partial / "model.safetensors")
    pull(str(tmp_path / "whole"), str(local), 3, "a")
    changed = {"0.weight": held.tensors["0.weight"].detach() + 1}
    for version in (4, 5):
        (bucket,) = delta(held, changed)
        with whole_directory(tmp_path / f"delta-{version}", "slime-trainer") as partial:
            (partial / "0.bin").write_bytes(bucket)
            write_index(partial, VersionDelta(version, version - 1, "a", "xor", "xxh3-128"), ["0.bin"])
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", flushed.append)
    target = pull(str(tmp_path / "delta-4"), str(local), 4, "a")
    assert torch.equal(load_file(target / "model.safetensors")["0.weight"], changed["0.weight"])
    # Flushing a checkpoint takes as long as its disk; after a power failure it is copied whole instead.
    assert flushed == []
    monkeypatch.setattr(local_checkpoint, "_boot", lambda: "the next")
    with pytest.raises(WrongState, match="of an earlier boot"):
        pull(str(tmp_path / "delta-5"), str(local), 5, "a")
    (target / "model.safetensors").write_bytes(b"half of one version and half of another")
    target = pull(str(tmp_path / "whole"), str(local), 4, "a")
    assert torch.equal(load_file(target / "model.safetensors")["0.weight"], held.tensors["0.weight"])
