"""--update-weight-mode delta: an embedded engine, and a stand-in that speaks SGLang's routes, hold what was sent."""

from __future__ import annotations

import errno
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.converters.convert.quantized import form_of
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.types.errors import EngineError, NotAvailable, OutOfSpace
from weight_delta_engines import (
    SGLangStandIn,
    change,
    on_disk,
    post,
    sender,
    stand_in,
    version_of,
    write_fp8_model,
    write_model,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def embedded(model: str) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=model), env={"OMP_NUM_THREADS": "1"}) as process:
        yield process.wait_ready(120)


@pytest.fixture
def sglang() -> Iterator[SGLangStandIn]:
    with stand_in() as engine:
        yield engine


@pytest.mark.parametrize("transport", ["auto", "disk"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_an_embedded_engine_holds_every_version(
    embedded: EngineProcess, model: str, tmp_path: Path, transport: str, encoding: str
) -> None:
    (tmp_path / "shared").mkdir()
    values = on_disk(tmp_path, update_weight_delta_encoding=encoding) | {"update_weight_transport": transport}
    # The comparison of the checksums with those of the whole weights from a disk is part of every push.
    updates, backend = sender(embedded, model, check_weight_update_equal=True, **values)
    first = int(version_of(embedded)) + 1
    sent = []
    for version in range(first, first + 3):
        change(backend, version)
        sent.append(updates.push(version))
        assert version_of(embedded) == str(version)
        assert updates.metrics["perf/update_weights_whole_engines"] == (version == first)
    updates.close()
    whole = updates.metrics["perf/update_weights_whole_bytes"]
    assert sent[0] >= whole > 10 * max(sent[1:])
    assert 0 < updates.metrics["perf/update_weights_changed"] < 0.01
    assert list((tmp_path / "shared").iterdir()) == []


def train(embedded: EngineProcess, model: str, mode: str) -> list[Any]:
    """Three rounds of sampling, a step on what was sampled, and a push; returns what was sampled, and the weights."""
    from transformers import AutoModelForCausalLM

    post(embedded, "/update_weights_from_disk", {"model_path": model, "weight_version": "0"})
    updates, backend = sender(embedded, model, update_weight_mode=mode, update_weight_dtype="bfloat16")
    # The backend's own forward pass takes packed rows.
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    found: list[Any] = []
    for version in range(1, 5):
        updates.push(version)
        sampling = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": version, "ignore_eos": True}
        body = {"input_ids": [2, 3, 4], "sampling_params": sampling, "return_logprob": True}
        answer = post(embedded, "/generate", body)
        found.append([answer["output_ids"], answer["meta_info"]["output_token_logprobs"]])
        ids = torch.tensor([[2, 3, 4, *answer["output_ids"]]])
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.policy.load_state_dict(policy.state_dict())
    if mode == "delta":
        assert updates.metrics["perf/update_weights_whole_engines"] == 0
    updates.close()
    return [*found, {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}]


def test_training_with_deltas_is_training_with_all_weights(embedded: EngineProcess, model: str) -> None:
    *sampled, weights = train(embedded, model, "full")
    *sampled_too, weights_too = train(embedded, model, "delta")
    assert sampled == sampled_too
    assert len({tuple(tokens) for tokens, _ in sampled}) > 1
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)


def test_an_engine_that_lost_its_weights_gets_all_of_them(
    embedded: EngineProcess, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    updates, backend = sender(embedded, model, check_weight_update_equal=True)
    first = int(version_of(embedded)) + 1
    updates.push(first)
    # It still names its version.
    post(embedded, "/weights_checker", {"action": "reset_tensors"})
    change(backend, 1)
    updates.push(first + 1)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    assert "all weights are sent in place of a delta" in caplog.text and "has checksum" in caplog.text
    change(backend, 2)
    updates.push(first + 2)
    assert updates.metrics["perf/update_weights_whole_engines"] == 0
    # As one that was started again: it names another version.
    body = {"model_path": model, "weight_version": "0"}
    post(embedded, "/update_weights_from_disk", body)
    updates.push(first + 3)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    updates.close()


def test_after_a_failed_update_all_weights_are_sent(
    embedded: EngineProcess, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, backend = sender(embedded, model, check_weight_update_equal=True)
    first = int(version_of(embedded)) + 1
    updates.push(first)
    change(backend, 1)
    weights = backend.named_weights

    def stops_half_way(**options: Any) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(weights(**options)):
            if number == 5:
                raise EngineError("gone")
            yield item

    with monkeypatch.context() as patched, pytest.raises(EngineError, match="gone"):
        patched.setattr(backend, "named_weights", stops_half_way)
        updates.push(first + 1)
    updates.push(first + 1)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    updates.close()


def test_sglang_loads_a_checkpoint_on_its_host_that_deltas_bring_up_to_date(
    sglang: SGLangStandIn, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local"
    values = on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local), update_weight_dtype="bfloat16")
    updates, backend = sender(sglang, model, **values)
    for version in range(1, 6):
        change(backend, version)
        if version == 4:
            shutil.rmtree(local)
        sent = updates.push(version)
        wanted = dict(backend.named_weights())
        assert sglang.version == str(version) and sglang.held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(sglang.held[name].view(torch.int16), tensor.detach().bfloat16().view(torch.int16)), name
        whole = version in (1, 4)
        assert updates.metrics["perf/update_weights_whole_engines"] == whole
        assert (sent >= updates.metrics["perf/update_weights_whole_bytes"]) is whole
        assert [path.name[:14] for path in local.glob("*weight_v*")] == [f"weight_v{version:06d}"]
    assert "weight version 4 is a delta to it" in caplog.text
    # Sent again, as one of an engine that was lost, but trained since.
    change(backend, 6)
    updates.push(5)
    trained = backend.policy.model.norm.weight.detach().bfloat16()
    assert torch.equal(sglang.held["model.norm.weight"].view(torch.int16), trained.view(torch.int16))
    assert "perf/update_weights_changed" not in updates.metrics
    updates.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_deltas_bring_a_checkpoint_in_fp8_up_to_date(sglang: SGLangStandIn, tmp_path: Path) -> None:
    model = write_fp8_model(tmp_path / "model")
    values = on_disk(tmp_path, update_weight_local_checkpoint_dir=str(tmp_path / "local"))
    updates, backend = sender(sglang, model, **values)
    form = form_of(model)
    assert form is not None
    for version in range(1, 4):
        change(backend, version)
        updates.push(version)
        assert updates.metrics["perf/update_weights_whole_engines"] == (version == 1)
        wanted = dict(form.quantized((name, tensor.detach()) for name, tensor in backend.named_weights()))
        assert sglang.version == str(version) and sglang.held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            held = sglang.held[name]
            assert held.dtype == tensor.dtype and torch.equal(held.view(torch.uint8), tensor.view(torch.uint8)), name
    updates.close()


def test_sglang_needs_a_directory_on_its_host_and_a_shared_one(
    sglang: SGLangStandIn, model: str, tmp_path: Path
) -> None:
    updates, _ = sender(sglang, model, **on_disk(tmp_path))
    with pytest.raises(NotAvailable, match="delta requires --update-weight-local-checkpoint-dir DIR: engine sglang-0"):
        updates.push(1)
    updates, _ = sender(sglang, model, colocate=True)
    with pytest.raises(NotAvailable, match="delta requires --update-weight-transport disk: the engines .sglang."):
        updates.push(1)


def test_engines_that_the_run_has_not_started_take_no_deltas(
    sglang: SGLangStandIn, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(KINDS["sglang"]), "delta_carriers", ())
    updates, _ = sender(sglang, model)
    with pytest.raises(
        NotAvailable,
        match="delta is not supported yet: some .* where this run started it; use --update-weight-mode full",
    ):
        updates.push(1)
    for values in (on_disk(tmp_path), {"update_weight_transport": "nccl"}):
        updates, _ = sender(sglang, model, **values)
        with pytest.raises(NotAvailable, match="engine sglang-0 .sglang. takes no deltas by (disk|nccl)"):
            updates.push(1)


@pytest.mark.parametrize("package", ["zstandard", "xxhash"])
def test_a_missing_package_is_named_before_anything_is_trained(
    sglang: SGLangStandIn, model: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(NotAvailable, match=f'requires the package {package}: pip install "slime-types.deltas."'):
        sender(sglang, model)


def test_a_full_disk_is_named_and_nothing_is_left(
    embedded: EngineProcess, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, backend = sender(embedded, model, **on_disk(tmp_path))
    first = int(version_of(embedded)) + 1
    updates.push(first)
    change(backend, 1)

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched, pytest.raises(OutOfSpace, match="--update-weight-disk-dir: no space left"):
        patched.setattr(Path, "write_bytes", full)
        updates.push(first + 1)
    assert not list((tmp_path / "shared").rglob("*weight_v*"))
    updates.push(first + 1)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    updates.close()
