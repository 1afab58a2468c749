"""Queues of `slime tinker`: samples for the engine's weights, requests for their turn, clients for results."""

import asyncio
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.launcher.tinker import futures, models, service
from slime.launcher.tinker.futures import Futures
from slime.launcher.tinker.messages import SampleResponse
from slime.launcher.tinker.models import Models, TrainingRun
from slime.launcher.tinker.paths import CheckpointStore
from slime.launcher.tinker.requests import Sampling
from slime.launcher.tinker.sampling import Sampler, SamplerWeights
from slime.launcher.tinker.service import Served, Service
from slime.launcher.tiny_model import write_model
from slime.trainer import trainer
from slime.trainer.settings.checks import EMULATED_BFLOAT16
from slime.types.errors import Busy, DeadlineExceeded, EngineError, InvalidField, WrongState

ONE = Sampling([1, 2], 1, {"max_new_tokens": 1}, None, False)
BASE, NEW, BROKEN = (SamplerWeights(Path(name), name) for name in ("base", "new", "broken"))


class Engine:
    """Records what it is asked for, and answers when it is told to."""

    def __init__(self) -> None:
        self.version = "base"
        self.calls: list[str] = []
        self.go = asyncio.Event()

    async def generate(self, prompts: list[list[int]], params: Any) -> Any:
        self.calls.append(self.version)
        before = self.version
        await self.go.wait()
        assert self.version == before
        meta = {"finish_reason": {"type": "length"}, "output_token_logprobs": [[-0.5, 3, None]]}
        return [{"meta_info": meta} for _ in prompts]

    async def update_weights_from_disk(self, path: str, version: str) -> None:
        self.calls.append(f"load {version}")
        await asyncio.sleep(0)
        if version == "broken":
            raise EngineError("no such tensor")
        self.version = version


def sampler_of(engine: Engine) -> Sampler:
    return Sampler(engine, BASE)  # type: ignore[arg-type]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_samples_of_the_same_weights_run_together_and_none_is_passed_over() -> None:
    async def run() -> list[str]:
        engine = Engine()
        sampler = sampler_of(engine)
        tasks = []
        for weights in (BASE, BASE, NEW, BASE, NEW):
            tasks.append(asyncio.create_task(sampler.sample(weights, ONE)))
            await settle()
        assert engine.calls == ["base", "base"]
        engine.go.set()
        answers = await asyncio.gather(*tasks)
        assert all(len(SampleResponse.FromString(each).sequences) == 1 for each in answers)
        return engine.calls

    assert asyncio.run(run()) == ["base", "base", "load new", "new", "new", "load base", "base"]


def test_weights_that_cannot_be_loaded_fail_their_own_samples_alone() -> None:
    async def run() -> None:
        engine = Engine()
        engine.go.set()
        sampler = sampler_of(engine)
        wanted = [sampler.sample(weights, ONE) for weights in (BROKEN, BASE, BROKEN, NEW)]
        found = await asyncio.gather(*wanted, return_exceptions=True)
        assert [type(each).__name__ for each in found] == ["EngineError", "bytes", "EngineError", "bytes"]
        assert engine.calls == ["load broken", "load base", "base", "load new", "new"]

    asyncio.run(run())


def test_a_sample_that_is_cancelled_while_it_waits_holds_nobody_up() -> None:
    async def run() -> None:
        engine = Engine()
        sampler = sampler_of(engine)
        running = asyncio.create_task(sampler.sample(BASE, ONE))
        await settle()
        waiting, last = (asyncio.create_task(sampler.sample(weights, ONE)) for weights in (NEW, BASE))
        await settle()
        waiting.cancel()
        engine.go.set()
        await asyncio.gather(running, last)
        assert "load new" not in engine.calls

    asyncio.run(run())


@pytest.fixture
def registry() -> Iterator[Models]:
    found = Models(1)
    yield found
    found.close()


def test_requests_run_by_their_numbers(registry: Models) -> None:
    ran: list[int] = []

    def append(number: int, _: Any) -> None:
        ran.append(number)

    async def run() -> list[int]:
        model = TrainingRun("m", "s")
        model.trained = object()  # type: ignore[assignment]
        registry.add(model, lambda _: False)
        # The results are waited for in the order of arrival, the last first.
        waited = [asyncio.ensure_future(registry.in_turn(model, n, partial(append, n))) for n in (3, 2, 4, 1)]
        await asyncio.gather(*waited)
        return ran

    assert asyncio.run(run()) == [1, 2, 3, 4]


def test_a_request_whose_forerunner_never_comes_fails(registry: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "GAP_SECONDS", 0.01)

    async def run() -> None:
        model = TrainingRun("m", "s")
        registry.add(model, lambda _: False)
        with pytest.raises(DeadlineExceeded, match="request 2 of m waited .* for request 1, which never came"):
            await registry.in_turn(model, 2, lambda _: None)

    asyncio.run(run())


@pytest.mark.parametrize("late", [False, True])
def test_a_pass_that_is_not_wanted_any_more_is_missed_in_its_turn(registry: Models, late: bool) -> None:
    ran: list[str] = []

    def work(name: str, _: Any) -> None:
        ran.append(name)

    async def run() -> list[str]:
        model = TrainingRun("m", "s")
        model.trained = object()  # type: ignore[assignment]
        registry.add(model, lambda _: False)
        gate = threading.Event()
        passed = asyncio.ensure_future(
            registry.in_turn(model, 2, partial(work, "pass"), missed=lambda _: ran.append("missed"))
        )
        step = asyncio.ensure_future(registry.in_turn(model, 3, partial(work, "step")))
        if not late:
            first = asyncio.ensure_future(registry.in_turn(model, 1, lambda _: gate.wait(10)))
        await settle()
        passed.cancel()
        await settle()
        if late:
            first = asyncio.ensure_future(registry.in_turn(model, 1, lambda _: gate.wait(10)))
        gate.set()
        await asyncio.gather(first, step)
        return ran

    assert asyncio.run(run()) == ["missed", "step"]


def test_models_of_clients_that_are_gone_make_room(registry: Models) -> None:
    registry.add(TrainingRun("a:train:0", "a"), lambda _: False)
    with pytest.raises(WrongState, match="--max-models 1: as many models of session a are in training already"):
        registry.add(TrainingRun("b:train:0", "b"), lambda _: False)
    registry.add(TrainingRun("b:train:0", "b"), lambda session: session == "a")
    assert "a:train:0" not in registry and "b:train:0" in registry


def test_a_model_is_not_replaced_by_another_of_its_number() -> None:
    registry = Models(2)
    model = TrainingRun("a:train:0", "a")
    registry.add(model, lambda _: False)
    with pytest.raises(InvalidField, match="model_seq_id"):
        registry.add(TrainingRun("a:train:0", "a"), lambda _: False)
    assert registry.find("a:train:0") is model
    registry.close()


def test_a_result_stays_a_while_after_it_was_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        kept = Futures()
        done = asyncio.Event()

        async def work() -> dict[str, Any]:
            await done.wait()
            return {"n": 1}

        kept.add("a", work)
        assert await kept.get("a", 0.01) is None
        done.set()
        assert await kept.get("a", 5.0) == {"n": 1} == await kept.get("a", 5.0)
        monkeypatch.setattr(futures, "FETCHED_SECONDS", -1.0)
        await kept.get("a", 5.0)
        kept.add("b", work)
        with pytest.raises(KeyError):
            await kept.get("a", 5.0)
        done.clear()
        kept.add("c", work)
        await settle()
        kept.cancel("c")
        assert await kept.get("c", 5.0) == {"error": "the request was cancelled", "category": "user"}
        await kept.close()

    asyncio.run(run())


def test_a_result_of_long_work_stays_and_what_is_refused_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(futures.time, "monotonic", lambda: now)
    monkeypatch.setattr(futures, "MOST", 2)

    async def run() -> None:
        nonlocal now
        kept = Futures()
        done = asyncio.Event()
        begun: list[str] = []

        async def work(name: str) -> dict[str, Any]:
            await done.wait()
            return {"n": name}

        def begin(name: str) -> Any:
            begun.append(name)
            return work(name)

        kept.add("a", partial(begin, "a"))
        now = 2 * futures.KEPT_SECONDS
        done.set()
        await settle()
        kept.add("b", partial(begin, "b"))
        assert "a" in kept
        with pytest.raises(Busy):
            kept.add("c", partial(begin, "c"))
        assert begun == ["a", "b"]
        now += 2 * futures.KEPT_SECONDS
        await settle()
        kept.add("c", partial(begin, "c"))
        assert "a" not in kept
        await settle()
        await kept.close()

    asyncio.run(run())


def test_a_model_that_cannot_be_recorded_takes_no_place_of_another(tmp_path: Path) -> None:
    model, root = write_model(tmp_path / "model", "0123456789+=>", seed=3), tmp_path / "runs"
    root.touch()

    async def run() -> None:
        served = Served(model, ("m",), 64, CheckpointStore(root), tmp_path)
        service = Service(served, Models(1), sampler_of(Engine()))
        body = {"base_model": "m", "lora_config": {"rank": 2}, **service.create_session({})}
        refused = await service.futures.get(service.create_model(body | {"model_seq_id": 0})["request_id"], 60.0)
        assert isinstance(refused, dict) and "Not a directory" in refused["error"]
        root.unlink()
        made = await service.futures.get(service.create_model(body | {"model_seq_id": 1})["request_id"], 60.0)
        await service.close()
        assert isinstance(made, dict) and made["type"] == "create_model"

    asyncio.run(run())


@pytest.mark.parametrize("bf16", [True, False])
def test_a_service_warns_of_bfloat16_on_a_processor_that_emulates_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, bf16: bool
) -> None:
    monkeypatch.setattr(service, "pick_device", lambda rank: torch.device("cpu"))
    monkeypatch.setattr(trainer, "multiplies_bfloat16", lambda torch: False)

    async def run() -> None:
        served = Served(tmp_path, ("m",), 64, CheckpointStore(tmp_path), tmp_path, bf16=bf16)
        await Service(served, Models(1), sampler_of(Engine())).close()

    asyncio.run(run())
    assert caplog.messages.count(EMULATED_BFLOAT16) == bf16
