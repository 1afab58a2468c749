"""Runs at the same time, and one after the other, whose weights go through the same directories."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from weight_delta_engines import SGLangStandIn, change, on_disk, sender, stand_in, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def sglang() -> Iterator[SGLangStandIn]:
    with stand_in() as engine:
        yield engine


def test_a_checkpoint_of_another_run_or_with_other_weights_is_not_built_on(
    sglang: SGLangStandIn, model: str, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    values = on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local))
    for run in range(2):
        updates, backend = sender(sglang, model, **values)
        sglang.version = "0"
        change(backend, run)
        for version in (1, 2):
            updates.push(version)
            assert torch.equal(
                sglang.held["model.norm.weight"].view(torch.int32),
                backend.policy.model.norm.weight.detach().view(torch.int32),
            )
            (file,) = local.glob(f"weight_v{version:06d}-*/model.safetensors")
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        updates.push(3)
        assert updates.metrics["perf/update_weights_whole_engines"] == 1
        updates.close()


def test_no_engine_loads_the_checkpoint_of_another_run_with_the_same_directory(
    sglang: SGLangStandIn, model: str, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    updates, backend = sender(sglang, model, **on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local)))
    updates.push(1)
    theirs = local / "weight_v000002"
    for path in local.glob("weight_v*"):
        path.rename(theirs)
    # A file of others stays, and makes no version of this run.
    (theirs / "notes.txt").write_text("mine")
    mark = theirs / "slime-files.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "lineage": "another"}))
    change(backend, 1)
    updates.push(2)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    assert sglang.version == "2" and holds(sglang, backend)
    assert [path.name for path in theirs.iterdir()] == ["notes.txt"]
    updates.close()


def test_a_checkpoint_of_an_earlier_boot_is_not_built_on(sglang: SGLangStandIn, model: str, tmp_path: Path) -> None:
    local = tmp_path / "local"
    updates, backend = sender(sglang, model, **on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local)))
    for version, whole in ((1, 1), (2, 0)):
        change(backend, version)
        updates.push(version)
        assert updates.metrics["perf/update_weights_whole_engines"] == whole
    # A power failure of the host leaves this.
    (mark,) = local.glob("weight_v000002-*/slime-files.json")
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "boot": "an earlier one"}))
    change(backend, 3)
    updates.push(3)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    assert holds(sglang, backend) and len(list(local.glob("weight_v*"))) == 1
    updates.close()


def holds(engine: SGLangStandIn, backend: Any) -> bool:
    wanted = backend.policy.model.norm.weight.detach()
    return torch.equal(engine.held["model.norm.weight"].view(torch.int32), wanted.view(torch.int32))


def run_once(work: list[Callable[[], Any]]) -> None:
    if work:
        work.pop()()


@pytest.mark.parametrize("mode", ["full", "delta"])
def test_two_runs_with_one_shared_directory_publish_the_same_versions_at_once(
    sglang: SGLangStandIn, model: str, tmp_path: Path, mode: str
) -> None:
    with stand_in() as other:
        runs = []
        for number, engine in enumerate((sglang, other)):
            # The engines have hosts of their own.
            local = {"update_weight_local_checkpoint_dir": str(tmp_path / f"local-{number}")} if mode == "delta" else {}
            runs.append(sender(engine, model, update_weight_mode=mode, **on_disk(tmp_path, **local)))
        (first, weights), (second, other_weights) = runs
        for version in (1, 2):
            change(weights, version)
            change(other_weights, version + 10)
            # All of the second run's update happens while the first run's engine is about to load.
            work = [partial(second.push, version)]
            sglang.before_loading = partial(run_once, work)
            first.push(version)
            assert holds(sglang, weights) and holds(other, other_weights)
            assert not list((tmp_path / "shared").rglob("weight_v*"))
        first.close()
        second.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_versions_that_a_run_keeps_are_left_by_the_next(sglang: SGLangStandIn, model: str, tmp_path: Path) -> None:
    for run in range(2):
        values = on_disk(tmp_path, update_weight_mode="full", update_weight_disk_keep_files=True)
        updates, backend = sender(sglang, model, **values)
        change(backend, run)
        updates.push(1)
        updates.close()
    assert len(list((tmp_path / "shared").glob("*/weight_v000001/model.safetensors"))) == 2


def test_a_checkpoint_that_another_run_has_loaded_stays(
    sglang: SGLangStandIn, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local"
    values = on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local))
    updates, backend = sender(sglang, model, **values)
    updates.push(1)
    (theirs,) = local.glob("weight_v*")
    # As the processes of their engine do.
    handle = os.open(theirs, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_SH)
    sglang.version = "0"
    later, backend = sender(sglang, model, **values)
    for version in (1, 2):
        change(backend, version)
        later.push(version)
        assert holds(sglang, backend) and theirs.is_dir() and len(list(local.glob("weight_v*"))) == 2
    os.close(handle)
    later.push(2)
    assert not theirs.exists() and len(list(local.glob("weight_v*"))) == 1
    updates.close()
    later.close()
