"""A policy and a judge in one rollout service, on real embedded engines: addresses, weight updates, and losses."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from rollout_tiny_model import write_tiny_model

from slime.rollout.fleet.engine_weights import EngineWeights
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.generate.state import RolloutState
from slime.rollout.launch import close_state, open_state
from slime.rollout.models import model_url
from slime.rollout.models.addresses import reward_url
from slime.rollout.on_policy_distillation import reward_func
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sglang_rollout import get_model_url
from slime.types import Sample
from slime.types.errors import EngineError, InvalidSetting, MissingFile, NotFound
from slime.utils.http_utils import post
from slime.v1 import rollout_pb2

GREEDY: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}


def write_config(directory: Path, **more: Any) -> RolloutSettings:
    config = directory / "models.yaml"
    models = [
        {"name": "policy", "server_groups": [{"num_engines": 1}]},
        {"name": "judge", "model_path": str(directory / "judge"), "server_groups": [{"num_engines": 1}]},
    ]
    config.write_text(json.dumps({"sglang": models}))
    values = {"rollout_engine_threads": 1, "rollout_engine": "embedded"} | more
    return RolloutSettings(hf_checkpoint=str(directory / "policy"), sglang_config=str(config), **values)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("policy", "judge")):
        write_tiny_model(directory / name, seed, context=4096)
    return directory


@pytest.fixture(scope="module")
def state(directory: Path) -> Iterator[RolloutState]:
    opened = open_state(write_config(directory))
    yield opened
    close_state(opened)


def ask(url: str, **params: Any) -> Any:
    return asyncio.run(asyncio.wait_for(post(url, {"input_ids": [3, 4, 5], "sampling_params": GREEDY | params}), 120))


def wait_until(condition: Callable[[], bool], fleet: Fleet) -> None:
    async def wait() -> None:
        while not condition():
            await asyncio.sleep(0.01)

    fleet.loop.run(asyncio.wait_for(wait(), 120))


def on_loop(fleet: Fleet, work: Coroutine[Any, Any, Any]) -> Any:
    return fleet.loop.run(work, timeout=120)


def test_each_model_answers_at_an_address_of_its_own(state: RolloutState) -> None:
    args, (judge,) = state.args, state.models.values()
    assert [member.name for member in state.fleet.members] == ["embedded-0"]
    assert [member.name for member in judge.members] == ["embedded-1"]
    answers = {name: ask(model_url(args, name))["output_ids"] for name in ("default", "judge")}
    assert answers["default"] == ask(f"{state.fleet.members[0].url}/generate")["output_ids"]
    assert answers["judge"] == ask(f"{judge.members[0].url}/generate")["output_ids"]
    assert answers["default"] != answers["judge"]
    # The trained model has three names, and slime's function is the same.
    assert model_url(args) == model_url(args, "policy") == model_url(args, "actor") == get_model_url(args, "actor")
    chat = get_model_url(args, "judge", "/v1/chat/completions")
    assert chat == model_url(args, "judge", "/v1/chat/completions") != get_model_url(args, "policy", "/v1/completions")
    answer = asyncio.run(
        post(chat, {"model": "judge", "messages": [{"role": "user", "content": "1"}], "max_tokens": 2})
    )
    assert answer["choices"][0]["message"]["content"] is not None
    args = copy.copy(args)
    args.rm_url = "model://judge"
    assert reward_url(args) == model_url(args, "judge", "/generate")
    args.rm_url = "http://elsewhere/v1/score"
    assert reward_url(args) == "http://elsewhere/v1/score"
    with pytest.raises(NotFound, match="serves no model 'jugde'; it serves default, policy, judge"):
        model_url(args, "jugde")


def test_a_teacher_may_be_a_model_of_the_run(state: RolloutState) -> None:
    (judge,) = state.models.values()
    args, log_probs = copy.copy(state.args), []
    for url in ("model://judge/generate", f"{judge.members[0].url}/generate", f"{state.fleet.members[0].url}/generate"):
        args.rm_url = url
        sample = Sample(prompt="12", tokens=[3, 4, 5, 6], response="ab", response_length=2)
        assert asyncio.run(reward_func(args, sample)) == 0.0
        log_probs.append(list(sample.teacher_log_probs or ()))
    assert len(log_probs[0]) == 2 and log_probs[0] == log_probs[1] != log_probs[2]


def test_weight_updates_are_for_the_trained_model_alone(state: RolloutState) -> None:
    (judge,) = state.models.values()
    weights = EngineWeights(state.fleet, 60.0)
    members = on_loop(state.fleet, weights.begin(weights.version + 1))
    assert [member.name for member in members] == ["embedded-0"]
    # The judge serves while the policy is held.
    assert state.fleet.members[0].held and not judge.members[0].held
    assert ask(model_url(state.args, "judge"))["output_ids"]
    on_loop(state.fleet, weights.abort(weights.version + 1, "the test ends"))


def test_a_lost_engine_of_a_frozen_model_comes_back_with_its_own_weights(state: RolloutState, directory: Path) -> None:
    (judge,) = state.models.values()
    state.fleet.weights_as_started = False  # as after a weight update of the policy
    before = ask(model_url(state.args, "judge"))["output_ids"]
    member = judge.members[0]
    old = member.engine

    async def lose_it_and_ask() -> Any:
        body = {"input_ids": [3, 4, 5], "sampling_params": GREEDY | {"max_new_tokens": 3000}}
        request = asyncio.create_task(post(model_url(state.args, "judge"), body))
        while not judge.router.in_flight:
            await asyncio.sleep(0.01)
        os.kill(old.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        return await request

    # The request waits for its successor, which needs nothing of the trainer.
    answer = asyncio.run(asyncio.wait_for(lose_it_and_ask(), 120))
    assert answer["output_ids"][:12] == before
    assert member.engine is not old and not member.awaits_weights and not member.out
    assert judge.num_restarts == 1 and state.fleet.num_restarts == 0 and state.fleet.error is None
    # The trainer, whose update failed meanwhile, is told that no engine of its own was lost.
    service = RolloutService(write_config(directory), state, "127.0.0.1:1")
    status = service.GetStatus(rollout_pb2.GetStatusRequest(), cast(grpc.ServicerContext, None))
    assert (status.engine_restarts, status.trained_engine_restarts) == (1, 0)
    assert [(engine.model, engine.keeps_weights) for engine in status.engines] == [("policy", False), ("judge", True)]


def test_a_frozen_model_that_is_lost_for_good_ends_the_run(directory: Path) -> None:
    opened = open_state(write_config(directory, use_fault_tolerance=False))
    try:
        (judge,) = opened.models.values()
        os.kill(judge.members[0].engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        wait_until(lambda: opened.fleet.error is not None, opened.fleet)
        with pytest.raises(EngineError, match="model judge: engine embedded-1 .* ended with signal SIGKILL"):
            raise opened.fleet.error  # type: ignore[misc]
    finally:
        close_state(opened)
    assert all(member.exited for fleet in (opened.fleet, judge) for member in fleet.members)


def test_a_model_that_is_not_there_is_named_before_an_engine_starts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = write_config(directory)
    path = directory / "judge" / "tokenizer.json"
    monkeypatch.setattr("slime.rollout.launch.start_models", None)
    moved = path.rename(directory / "kept.json")
    (config := directory / "judge" / "tokenizer_config.json").rename(directory / "kept_config.json")
    try:
        with pytest.raises(MissingFile, match="--sglang-config .*models.yaml: model judge"):
            open_state(settings)
    finally:
        moved.rename(path)
        (directory / "kept_config.json").rename(config)


def test_gpus_go_to_groups_in_their_order(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime.rollout.engines.sglang.kind import SGLang
    from slime.rollout.engines.sglang.launch import server_command
    from slime.rollout.models.start import starts_of_models

    monkeypatch.setattr(SGLang, "is_installed", lambda self: True)
    (directory / "gpus.yaml").write_text(
        json.dumps(
            {"sglang": [
                {"name": "judge", "model_path": str(directory / "judge"), "server_groups": [{"num_gpus": 1}]},
                {"name": "policy", "server_groups": [{"num_gpus": 4, "num_gpus_per_engine": 2},
                                                     {"num_gpus": 1, "overrides": {"mem_fraction_static": 0.5}}]},
            ]}
        )
    )  # fmt: skip
    settings = RolloutSettings(hf_checkpoint=str(directory / "policy"), sglang_config=str(directory / "gpus.yaml"))
    starts = starts_of_models(settings, ["2", "3", "4", "5", "6", "7"])
    shown = {
        name: [(s.args[0].model_path, s.keywords["name"], s.args[0].gpus) for s in each]  # type: ignore[attr-defined]
        for name, each in starts.items()
    }
    policy, judge = str(directory / "policy"), str(directory / "judge")
    assert shown == {
        "judge": [(judge, "sglang-0", ["2"])],
        "policy": [(policy, "sglang-1", ["3", "4"]), (policy, "sglang-2", ["5", "6"]), (policy, "sglang-3", ["7"])],
    }
    assert starts["policy"][2].args[0].args["mem_fraction_static"] == 0.5  # type: ignore[attr-defined]
    commands = [server_command(s.args[0]) for each in starts.values() for s in each]  # type: ignore[attr-defined]
    assert not any("--disaggregation-mode" in word for words in commands for word in words)
    in_pairs = RolloutSettings(hf_checkpoint=policy, prefill_num_servers=2, rollout_num_gpus=3)
    ((name, each),) = starts_of_models(in_pairs, ["0", "1", "2"]).items()
    words = [server_command(s.args[0]) for s in each]  # type: ignore[attr-defined]
    assert name == "default" and ["--disaggregation-mode=prefill" in line for line in words] == [True, True, False]
    assert "--disaggregation-mode=decode" in words[2]
    with pytest.raises(InvalidSetting, match=r"sglang\[1\].server_groups\[1\].num_gpus must be at most 0, got 1"):
        starts_of_models(settings, ["2", "3", "4", "5", "6"])
