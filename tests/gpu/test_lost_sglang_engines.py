"""SGLang engines that are killed or stopped: their requests go on, nothing of them is left, and they come back.

    pytest tests/gpu/test_lost_sglang_engines.py

Two engines share a GPU. The model is small and has random weights. SLIME_TEST_ATTENTION: see
`--sglang-attention-backend`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from gpu_needs import ATTENTION, needs, write_qwen3
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import stop_all
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.restarts import RestartLimits
from slime.rollout.fleet.watched import FleetOptions

NUM_GPUS = 1

START_SECONDS = 400
REQUESTS, TOKENS = 32, 1500
pytestmark = needs(NUM_GPUS, "sglang")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_qwen3(
        tmp_path_factory.mktemp("model"),
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=4096, tie_word_embeddings=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def fleet(model: str) -> Iterator[Fleet]:
    args = {
        "mem_fraction_static": 0.4, "max_total_tokens": 131072, "skip_tokenizer_init": True,
        "attention_backend": ATTENTION,
    }  # fmt: skip
    engines: list[Any] = []
    try:
        for i in range(2):
            options = SGLangOptions(model_path=model, gpus=visible_gpus()[:1], random_seed=1, args=args)
            engines.append(start_sglang(options, name=f"sglang-{i}"))
        for engine in engines:
            engine.wait_ready(START_SECONDS)
        limits = RestartLimits(start_seconds=START_SECONDS)
        fleet = Fleet(engines, LoopThread(), FleetOptions(restarts=limits, health_interval=1.0, health_timeout=5.0))
        fleet.start()
    except BaseException:
        stop_all(engines, 0)
        raise
    yield fleet
    left = [process for member in fleet.members for process in processes_of(member)]
    fleet.stop()
    fleet.loop.stop()
    assert not running(left), "an engine left processes behind"


def processes_of(member: Member) -> list[psutil.Process]:
    process = psutil.Process(member.engine.pid)  # type: ignore[attr-defined]
    return [process, *process.children(recursive=True)]


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    """A container's first process may not collect orphans that have ended."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def server_of(member: Member) -> psutil.Process:
    return next(p for p in processes_of(member) if "sglang.launch_server" in p.cmdline())


def scheduler_of(member: Member) -> psutil.Process:
    return next(p for p in processes_of(member) if "scheduler" in " ".join(p.cmdline()))


def wait_for(condition: Callable[[], Any], seconds: float = START_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def send(fleet: Fleet, member: Member | None = None) -> Any:
    """Returns the future answers."""
    params = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}

    async def ask() -> list[dict[str, Any]]:
        calls = (
            fleet.generate([[10 + i, 11, 12]], [params], rids=[f"{time.monotonic_ns()}-{i}"], member=member)
            for i in range(REQUESTS)
        )
        return [answer for (answer,) in await asyncio.gather(*calls)]

    return asyncio.run_coroutine_threadsafe(ask(), fleet.loop.loop)


def check(answers: list[dict[str, Any]]) -> None:
    assert len(answers) == REQUESTS
    for answer in answers:
        meta = answer["meta_info"]
        assert meta["finish_reason"]["type"] == "length" and len(meta["output_token_logprobs"]) == TOKENS


def lose(fleet: Fleet, number: int, find: Callable[[Member], psutil.Process], which: signal.Signals) -> Member:
    """Signals a process of an engine that generates; waits until its requests have ended, and for its successor."""
    member, restarts = fleet.members[number], fleet.num_restarts
    assert fleet.error is None and not member.out
    former = processes_of(member)
    answers = send(fleet)
    wait_for(lambda: all(fleet.router.load_of(member) for member in fleet.members), 60)
    time.sleep(0.5)  # they are not only sent, but worked on
    assert not answers.done()
    began = time.monotonic()
    find(member).send_signal(which)
    wait_for(lambda: fleet.error is not None or member.out or fleet.num_restarts > restarts, 60)
    found = time.monotonic() - began
    print(f"{which.name}: found after {found:.1f} s", end="", flush=True)
    check(answers.result(START_SECONDS))
    done = time.monotonic() - began
    wait_for(lambda: fleet.error is not None or not member.out)
    print(f", all answered after {done:.1f} s, back after {time.monotonic() - began:.1f} s", flush=True)
    assert fleet.error is None and fleet.num_restarts == restarts + 1
    assert not running(former), "an engine left processes behind"
    return member


@pytest.mark.parametrize("find", [server_of, scheduler_of])
def test_requests_of_a_killed_engine_go_on_and_it_serves_again(fleet: Fleet, find) -> None:
    member = lose(fleet, 0, find, signal.SIGKILL)
    assert not member.awaits_weights
    check(send(fleet, member).result(120))


def test_an_engine_that_stands_still_is_replaced_and_serves_once_it_has_the_weights(fleet: Fleet, model: str) -> None:
    weights = EngineWeights(fleet, 60)

    async def load(members: list[Member], version: int) -> None:
        for member in members:
            await member.client.update_weights_from_disk(model, version)
        await weights.commit(version)

    async def update() -> None:
        await load(await weights.begin(3), 3)

    async def join() -> list[str]:
        joining = await weights.begin_joining(3)
        await load(joining, 3)
        return [member.name for member in joining]

    fleet.loop.run(update(), timeout=120)
    member = lose(fleet, 1, scheduler_of, signal.SIGSTOP)
    assert member.awaits_weights and member not in fleet.router.in_rotation
    answers = send(fleet, member)
    assert fleet.loop.run(join(), timeout=120) == [member.name]
    found = answers.result(120)
    check(found)
    assert {answer["meta_info"]["weight_version"] for answer in found} == {"3"}
