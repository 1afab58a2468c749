"""Samples are freed when their call ends, without Python's collector, which runs rarely in a rollout service."""

from __future__ import annotations

import contextvars
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from rollout_fakes import CharTokenizer, FakeBuffer, prompt_groups

from slime.rollout import service as service_module
from slime.rollout.calls.call import CALL
from slime.rollout.calls.jobs import Progress, Result, RolloutJob
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.clients import RolloutClient, Writer
from slime.types.errors import DataLoss, SlimeError
from slime.types.rpc import RpcSettings, Server
from slime.v1 import rollout_pb2_grpc

DEADLINE = 20.0


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class ForgetfulBuffer(FakeBuffer):
    """A buffer that keeps no sample that it leased, but counts those that are still alive."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_leased = 0
        self._alive = 0
        self._freed = threading.Condition(threading.RLock())

    def lease_groups(self, *args: Any, **options: Any) -> list[Any]:
        leases = super().lease_groups(*args, **options)
        for sample in (sample for lease in leases for sample in lease.group.samples):
            with self._freed:
                self.num_leased, self._alive = self.num_leased + 1, self._alive + 1
            weakref.finalize(sample, self._free)
        return leases

    def complete_group(self, token: str, samples: list[Sample]) -> bool:
        super().complete_group(token, samples)
        self.completed.clear()
        return False

    def _free(self) -> None:
        with self._freed:
            self._alive -= 1
            self._freed.notify_all()

    def alive_at_last(self) -> int:
        """Returns how many of the samples are alive once all are freed, or after `DEADLINE`."""
        with self._freed:
            self._freed.wait_for(lambda: not self._alive, DEADLINE)
            return self._alive


def test_samples_are_freed_when_generate_ends(engine, make_state, monkeypatch):
    buffer = ForgetfulBuffer(prompt_groups(12, 2))
    monkeypatch.setattr(service_module, "BufferClient", lambda *args, **kwargs: buffer)
    settings = RolloutSettings(hf_checkpoint="none", n_samples_per_prompt=2, rm_type="exact_partial")
    service = RolloutService(settings, make_state(engine, n_samples_per_prompt=2), "none")
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server = Server([(add, service)], RpcSettings(), service_names=["slime.v1.RolloutService"])
    try:
        with RolloutClient(server.start(), writer=Writer("run", 1)) as client:
            for rollout_id in range(3):
                client.generate(rollout_id, 4, timeout=60)
        assert buffer.num_leased == 24 and buffer.alive_at_last() == 0
    finally:
        server.stop(0)


class BrokenBuffer(ForgetfulBuffer):
    """A buffer that takes no group, and forgets those that it got back."""

    def complete_group(self, token: str, samples: list[Sample]) -> bool:
        raise DataLoss("the disk is broken")

    def return_group(self, token: str, samples: list[Sample] = ()) -> None:  # type: ignore[assignment]
        super().return_group(token, samples)
        self.returned.clear()


class ReturningBuffer(BrokenBuffer):
    """A buffer that takes groups, and forgets those that it got back."""

    def complete_group(self, token: str, samples: list[Sample]) -> bool:
        return ForgetfulBuffer.complete_group(self, token, samples)


@pytest.mark.parametrize("fault", ["reward", "unexpected", "buffer", "engine", "client"])
def test_samples_of_calls_that_fail_are_freed(engine, make_state, monkeypatch, tmp_path, fault):
    # Records of the log keep tracebacks, in a test that collects them.
    for name in ("slime.types.rpc.status", "slime.rollout.rewards.score"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    groups = prompt_groups(4, 2)
    buffer = BrokenBuffer(groups) if fault == "buffer" else ReturningBuffer(groups)
    monkeypatch.setattr(service_module, "BufferClient", lambda *args, **kwargs: buffer)
    options: dict[str, Any] = {"n_samples_per_prompt": 2}
    if fault in ("reward", "unexpected"):
        error = {"reward": "InvalidField('label', 'x', 'y')", "unexpected": "ValueError('x')"}[fault]
        code = f"from slime.types.errors import InvalidField\ndef reward(args, sample, **more):\n    raise {error}\n"
        (tmp_path / "rewards.py").write_text(code)
        options["custom_rm_path"] = f"{tmp_path / 'rewards.py'}:reward"
    engine.status = 400 if fault == "engine" else 200
    if fault == "client":
        engine.held_prompts = {tuple(CharTokenizer().encode(group.samples[0].prompt)) for group in groups}
    settings = RolloutSettings(hf_checkpoint="none", rm_type="exact_partial", **options)
    service = RolloutService(settings, make_state(engine, **options), "none")
    add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
    server = Server([(add, service)], RpcSettings(), service_names=["slime.v1.RolloutService"])
    try:
        with RolloutClient(server.start(), writer=Writer("run", 1)) as client, pytest.raises(SlimeError):
            client.generate(0, 2, timeout=2 if fault == "client" else 60)
        assert buffer.num_leased == 4 and buffer.alive_at_last() == 0
    finally:
        server.stop(0)


def test_a_context_that_outlives_a_call_keeps_neither_its_function_nor_its_result():
    fleet = SimpleNamespace(error=None, on_failure=lambda put: lambda: None)
    contexts: list[contextvars.Context] = []

    def run(sample: Sample) -> list[Sample]:
        # As the timer of a request does.
        contexts.append(contextvars.copy_context())
        call = contexts[0][CALL]
        assert call is not None
        call.advance()
        return [sample]

    sample = Sample(index=0)
    job: RolloutJob[list[Sample]] = RolloutJob(fleet, 0, 1, lambda sample=sample: run(sample))  # type: ignore[arg-type]
    kinds = [type(event) for event in job.events()]
    assert kinds == [Progress, Result]
    alive = weakref.ref(sample)
    del sample, job
    assert alive() is None and contexts[0][CALL].done == 1
    contexts[0][CALL].advance()  # tells nobody
