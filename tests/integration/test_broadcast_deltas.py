"""--update-weight-mode delta by NCCL: an engine of two ranks holds what was sent; gloo stands for NCCL."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from broadcast_engine import RANKS, BroadcastEngine, Part
from slime.types.errors import EngineError, NotAvailable
from weight_delta_engines import change, post, sender, version_of, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: str) -> Iterator[BroadcastEngine]:
    engine = BroadcastEngine(model, os.pathsep.join(sys.path))
    yield engine
    engine.stop()


def check_held(engine: BroadcastEngine, backend: Any, model: str) -> None:
    with urllib.request.urlopen(f"{engine.url}/held", timeout=60) as answer:
        held = json.load(answer)["held"]
    for rank in range(RANKS):
        part = Part(rank, model)
        part.load_weights((name, tensor.detach().bfloat16()) for name, tensor in backend.named_weights())
        assert held[rank] == part.checksums()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_an_engine_of_two_ranks_holds_every_version(engine: BroadcastEngine, model: str, encoding: str) -> None:
    updates, backend = sender(
        engine, model, update_weight_dtype="bfloat16", update_weight_delta_encoding=encoding,
        update_weight_transport="nccl",
    )  # fmt: skip
    sent = []
    for version in range(1, 5):
        change(backend, version)
        sent.append(updates.push(version))
        assert version_of(engine) == str(version)
        assert updates.metrics["perf/update_weights_whole_engines"] == (version == 1)
        check_held(engine, backend, model)
    updates.close()
    assert sent[0] == updates.metrics["perf/update_weights_whole_bytes"] > 5 * max(sent[1:])


def test_an_engine_that_lost_its_weights_gets_all_of_them_in_the_same_update(
    engine: BroadcastEngine, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Without a transport, `auto` finds this one.
    updates, backend = sender(engine, model, update_weight_dtype="bfloat16")
    updates.push(1)
    post(engine, "/reset", {})
    change(backend, 1)
    updates.push(2)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    assert "all weights are sent in place of a delta" in caplog.text and "has checksum" in caplog.text
    check_held(engine, backend, model)
    change(backend, 2)
    updates.push(3)
    assert updates.metrics["perf/update_weights_whole_engines"] == 0
    check_held(engine, backend, model)
    updates.close()


CARRIER = "slime.trainer.weight_sync.deltas.nccl_carrier"


def test_an_engine_without_the_plug_in_is_named_before_anything_is_trained(
    engine: BroadcastEngine, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Gloo leaves a group only when its broadcast has ended, NCCL at once.
    updates, _ = sender(engine, model, update_weight_dtype="bfloat16", update_weight_timeout_seconds=5.0)
    with monkeypatch.context() as patched:
        # SGLang without it finds no such type.
        patched.setattr(f"{CARRIER}.BROADCAST", "of_tomorrow")
        with pytest.raises(NotAvailable, match="engine sglang-0 has no plug-in .* use --update-weight-transport disk"):
            updates.push(1)
    updates.push(1)
    updates.close()


def test_an_engine_that_cannot_load_a_delta_ends_the_update_and_gets_all_weights_next(
    engine: BroadcastEngine, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, backend = sender(engine, model, update_weight_dtype="bfloat16", update_weight_timeout_seconds=5.0)
    updates.push(1)
    change(backend, 1)
    with monkeypatch.context() as patched:
        # A failure that is not a refusal.
        patched.setattr(f"{CARRIER}.REFUSED", "another text")
        post(engine, "/reset", {})
        with pytest.raises(EngineError, match="engine sglang-0 .* delta bucket .* of weight version 2.*has checksum"):
            updates.push(2)
    updates.push(2)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    check_held(engine, backend, model)
    updates.close()
