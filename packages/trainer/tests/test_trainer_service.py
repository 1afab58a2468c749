"""The gRPC service over a buffer and a rollout service that stand in."""

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_stack import WRITER, Stack
from trainer_tiny import make_samples, summarize
from transformers import AutoModelForCausalLM

from slime.trainer import service, trainer
from slime.trainer.service import Worker
from slime.trainer.settings.checks import EMULATED_BFLOAT16
from slime.types.errors import (
    DeadlineExceeded,
    InvalidField,
    InvalidSetting,
    LeaseLost,
    RemoteError,
    SlimeError,
    WrongState,
)


@pytest.fixture
def stack(model: str) -> Iterator[Stack]:
    stack = Stack(model)
    yield stack
    stack.close()


def test_a_step_is_sealed_planned_trained_and_acknowledged(stack: Stack, model: str, tmp_path: Path):
    info = stack.client.info()
    assert (info.rank, info.world_size, info.backend, info.device, info.next_step) == (
        0,
        1,
        "fsdp",
        str(stack.trainer.backend.device),
        0,
    )
    metrics = stack.client.train_step(0, 3, timeout=60)
    assert stack.buffer.calls == [("seal", 0, 3), ("plan", 0), ("acknowledge", 0)]
    assert stack.buffer.writer == WRITER
    assert metrics["train/grad_norm"] > 0
    assert {"perf/train_time", "perf/actor_train_tokens_per_second", "train/lr-pg_0", "train/step"} <= metrics.keys()
    assert "perf/update_weights_time" in stack.client.update_weights(1, timeout=60)
    assert stack.rollout.calls == [("begin", 1), ("commit", 1)]
    path = str(tmp_path / "step_0")
    assert stack.client.save_checkpoint(0, path, timeout=60) == path
    assert stack.buffer.calls[-1] == ("commit", 0)
    assert (Path(path) / "data_place.jsonl").read_bytes() == stack.buffer.read_place(0)
    info = stack.client.info()
    assert (info.next_step, info.weight_version) == (1, 1)
    exported = stack.client.export_model(str(tmp_path / "model"), timeout=60)
    assert (Path(exported) / "model.safetensors").is_file()

    resumed = Stack(model, load=path)
    try:
        assert (resumed.client.info().next_step, resumed.client.info().weight_version) == (1, 1)
        again, straight = resumed.client.train_step(1, 3, timeout=60), stack.client.train_step(1, 3, timeout=60)
        assert {k: v for k, v in again.items() if k[0] == "t"} == {k: v for k, v in straight.items() if k[0] == "t"}
    finally:
        resumed.close()


def test_a_state_for_a_restart_has_the_optimizer_and_commits_nothing(model: str, tmp_path: Path):
    stack = Stack(model, no_save_optim=True)
    stack.client.train_step(0, 3, timeout=60)
    path = stack.client.save_checkpoint(0, str(tmp_path / "step_0"), timeout=60, for_restart=True)
    assert stack.buffer.calls[-1] == ("acknowledge", 0)
    again = Stack(model, load=path)
    try:
        metrics = [s.client.train_step(1, 3, timeout=60) for s in (stack, again)]
        assert metrics[0]["train/loss"] == metrics[1]["train/loss"]
        weights = [dict(s.trainer.backend.named_weights()) for s in (stack, again)]
        assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    finally:
        again.close()
        stack.close()


@pytest.mark.parametrize("more", [{}, {"num_steps_per_rollout": 2}])
def test_a_step_returns_the_log_probs_of_the_samples_that_are_asked_for(stack: Stack, model: str, more: dict[str, Any]):
    samples = make_samples(0)
    other = Stack(model, **more)
    try:
        scored = other.client.train_and_score(0, 3, [0, 5, 99], timeout=60)
        again = other.client.train_and_score(0, 3, [0], timeout=60)
    finally:
        other.close()
    assert sorted(scored.log_probs) == sorted(again.log_probs) == [0, 5]
    plain = stack.client.train_step(0, 3, timeout=60)
    assert more or {k: v for k, v in plain.items() if k[0] == "t"} == {
        k: v for k, v in scored.metrics.items() if k[0] == "t"
    }
    # Sample 0 is of the first update, before which the weights are those of the directory.
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sample = samples[0]
    with torch.no_grad():
        logits = reference(torch.tensor([sample.tokens])).logits[0]
    tokens = torch.tensor(sample.tokens)[-sample.response_length :]
    expected = logits.double().log_softmax(-1)[-sample.response_length - 1 : -1].gather(1, tokens[:, None])[:, 0]
    expected[torch.tensor(sample.loss_mask) == 0] = torch.nan
    assert scored.log_probs[0] == pytest.approx(expected.numpy(), abs=1e-4, nan_ok=True)
    assert len(scored.log_probs[5]) == samples[5].response_length


def test_a_repeated_call_does_not_train_twice(stack: Stack):
    stack.buffer.fail_next = "acknowledge"
    with pytest.raises(LeaseLost, match="acknowledge"):
        stack.client.train_step(0, 3, timeout=60)
    metrics = stack.client.train_step(0, 3, timeout=60)
    assert metrics == stack.client.train_step(0, 3, timeout=60)
    assert [call[0] for call in stack.buffer.calls] == ["seal", "plan", "acknowledge"]
    assert metrics["train/step"] == 1
    assert isinstance(stack.buffer.plans[0]["rewards"], str)  # packed


def test_a_failure_before_training_can_be_repeated(stack: Stack):
    stack.buffer.fail_next = "seal"
    with pytest.raises(LeaseLost):
        stack.client.train_step(0, 3, timeout=60)
    assert stack.client.train_step(0, 3, timeout=60)["train/step"] == 1


@pytest.mark.parametrize("by_an_earlier_version", [False, True])
def test_a_stored_plan_wins(stack: Stack, by_an_earlier_version: bool):
    from slime.trainer.batching.plan import Planner, packed

    plan = Planner(stack.trainer.settings).plan(0, summarize(make_samples(0)))
    plan["updates"][0]["train"] = plan["updates"][0]["train"][:2]
    stack.buffer.plans[0] = plan if by_an_earlier_version else packed(plan)
    assert stack.client.train_step(0, 3, timeout=60)["train/micro_batches"] == 1


@pytest.mark.parametrize(
    ("call", "error", "field"),
    [
        (lambda c: c.train_step(4, 3, timeout=60), WrongState, "step"),
        (lambda c: c.train_step(0, 0, timeout=60), InvalidField, "num_groups"),
        (lambda c: c.save_checkpoint(0, "", timeout=60), InvalidField, "path"),
        (lambda c: c.save_checkpoint(5, "x", timeout=60), WrongState, "step"),
        (lambda c: c.update_weights(-1, timeout=60), InvalidField, "weight_version"),
    ],
)
def test_wrong_calls_name_the_field(stack: Stack, call: Any, error: type[SlimeError], field: str):
    with pytest.raises(error) as caught:
        call(stack.client)
    assert caught.value.field == field


def test_a_path_that_cannot_be_written_leaves_the_rank_at_work(stack: Stack, tmp_path: Path):
    (tmp_path / "file").write_text("precious")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    (tmp_path / "link").symlink_to("mine")
    stack.client.train_step(0, 3, timeout=60)
    for name in ("file", "file/below", "n" * 300, "mine", "link", "n" * 250):
        for call in (stack.client.export_model, functools.partial(stack.client.save_checkpoint, 0)):
            with pytest.raises(InvalidSetting, match=name) as caught:
                call(str(tmp_path / name), timeout=60)
            assert caught.value.field == "path"
    assert stack.client.train_step(1, 3, timeout=60)["train/step"] == 2
    assert (tmp_path / "file").read_text() == (tmp_path / "mine" / "notes.txt").read_text() == "precious"


def test_calls_save_only_below_the_directories_of_the_run(model: str, tmp_path: Path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "leads-out").symlink_to(tmp_path)
    for write_below, expected in (([str(tmp_path / "out")], "below"), ([], "--write-below")):
        stack = Stack(model, write_below=write_below)
        try:
            for path in ("elsewhere", "out/../elsewhere", "out/leads-out/elsewhere", "outside"):
                with pytest.raises(InvalidField, match=f"path: .*{expected}"):
                    stack.client.export_model(str(tmp_path / path), timeout=60)
            if write_below:
                stack.client.export_model(str(tmp_path / "out" / "model"), timeout=60)
        finally:
            stack.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_after_an_unexpected_error_the_rank_refuses_work(stack: Stack, monkeypatch: pytest.MonkeyPatch):
    def explode(*_: Any) -> None:
        raise MemoryError("no memory left")

    monkeypatch.setattr(stack.trainer._step, "run", explode)
    with pytest.raises(RemoteError, match="no memory left"):
        stack.client.train_step(0, 3, timeout=60)
    with pytest.raises(WrongState, match="has to be started again"):
        stack.client.update_weights(1, timeout=60)


def test_a_worker_keeps_one_thread_one_job_and_deadlines():
    worker, gate, started = Worker("w"), threading.Event(), threading.Event()
    assert worker.run("a", threading.get_ident, 10) == worker.run("b", threading.get_ident, 10) != threading.get_ident()

    def wait() -> None:
        started.set()
        gate.wait(30)

    with pytest.raises(DeadlineExceeded, match="slow: not done"):
        worker.run("slow", wait, 0.01)
    assert started.wait(10)
    with pytest.raises(WrongState, match="slow is still running"):
        worker.run("next", lambda: None, 10)
    gate.set()
    worker.stop()


def test_a_job_that_waits_for_a_rank_that_has_left_ends_with_the_error_of_that_rank(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(service, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(service, "LAST_SECONDS", 0.01)
    worker, release = Worker("test"), threading.Event()
    try:
        with pytest.raises(RemoteError, match="rank 1: MemoryError"):
            worker.run("job", lambda: release.wait(60), 60, lambda: RemoteError("rank 1: MemoryError: full"))
    finally:
        release.set()
        worker.stop()


@pytest.mark.parametrize("multiplies", [True, False])
@pytest.mark.parametrize("bf16", [True, False])
def test_bfloat16_on_a_processor_that_emulates_it_is_warned_of_once(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, multiplies: bool, bf16: bool
):
    monkeypatch.setattr(trainer, "pick_device", lambda rank: torch.device("cpu"))
    monkeypatch.setattr(trainer, "multiplies_bfloat16", lambda torch: multiplies)
    stack = Stack(model, bf16=bf16)
    try:
        stack.client.train_step(0, 3, timeout=60)
    finally:
        stack.close()
    assert caplog.messages.count(EMULATED_BFLOAT16) == (bf16 and not multiplies)
