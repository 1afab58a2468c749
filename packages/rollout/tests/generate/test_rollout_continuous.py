"""Generation without end: weights are swapped under running requests, and every token knows its version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from rollout_fakes import VOCABULARY, CharTokenizer, FakeBuffer, FakeEngine, prompt_groups

from slime.rollout import service as service_module
from slime.rollout.fleet.concurrency import START
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.service import RolloutService
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.sources import LeasedDataSource
from slime.types import Sample
from slime.types.clients import RolloutClient, Writer
from slime.types.clients.rollout import StopSignal
from slime.types.errors import EngineError, InvalidField, LeaseLost, WrongState
from slime.types.pace import TrainerPace
from slime.types.rpc import RpcSettings, Server
from slime.v1 import rollout_pb2_grpc

DEADLINE = 60.0


@dataclass
class PacedBuffer(FakeBuffer):
    """A buffer that leases `size` groups for each version of the engines' weights. late: groups whose lease is lost."""

    size: int = 2
    late: set[int] = field(default_factory=set)
    paces: list[TrainerPace] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.given = 0
        self.asked: list[int] = []
        self.changed = threading.Condition()

    def lease_groups(self, max_groups: int, pace: TrainerPace | None = None, **options: Any) -> list[Any]:
        assert pace is not None
        self.paces.append(pace)
        self.asked.append(max_groups)
        room = (pace.weight_version + pace.max_staleness + 1) * self.size - self.given
        leased = super().lease_groups(max(0, min(max_groups, room)), **options)
        self.given += len(leased)
        return leased

    def complete_group(self, token: str, samples: list[Sample]) -> bool:
        if self.leased[token].group_index in self.late:
            self._end(token)
            raise LeaseLost("the lease ended by stale", field="lease_token")
        with self.changed:
            super().complete_group(token, samples)
            self.changed.notify_all()
        return False

    def reject_group(self, token: str, reason: str) -> None:
        super().reject_group(token, reason)
        self.given -= 1

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.completed) >= count, DEADLINE), sorted(self.completed)


@pytest.fixture
def open_service(make_state, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RolloutClient]]:
    opened: list[tuple[RolloutClient, Server]] = []

    def start(buffer: FakeBuffer, *engines: FakeEngine, **settings: Any) -> RolloutClient:
        monkeypatch.setattr(service_module, "BufferClient", lambda *args, **kwargs: buffer)
        values = {"hf_checkpoint": "none"} | settings
        service = RolloutService(RolloutSettings(**values), make_state(*engines, **settings), "none")
        add = rollout_pb2_grpc.add_RolloutServiceServicer_to_server
        server = Server([(add, service)], RpcSettings(), service_names=["slime.v1.RolloutService"])
        client = RolloutClient(server.start(), writer=Writer("run", 1))
        opened.append((client, server))
        return client

    yield start
    for client, server in opened:
        client.close()
        server.stop(0)


@contextmanager
def generating(client: RolloutClient, staleness: int = 1) -> Iterator[list[dict[str, float]]]:
    """Generates in a thread; yields the metrics that came. Raises what the call raised."""
    stop, seen, errors = StopSignal(), list[dict[str, float]](), list[BaseException]()
    pace = TrainerPace(max_staleness=staleness, groups_per_step=2, stop_step=100)

    def run() -> None:
        try:
            client.generate_on(0, pace, stop, seen.append)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(DEADLINE)
    if errors:
        raise errors[0]


def push(client: RolloutClient, engine: FakeEngine, version: int) -> None:
    client.begin_weight_update(version)
    assert engine.paused
    engine.version = str(version)
    client.commit_weight_update(version)


def ids(text: str) -> list[int]:
    return [VOCABULARY.index(character) for character in text]


def test_generation_goes_on_by_itself_as_far_as_the_pace_allows(engine, open_service) -> None:
    buffer = PacedBuffer(prompt_groups(40, 2))
    client = open_service(buffer, engine, n_samples_per_prompt=2)
    with generating(client) as seen:
        buffer.wait_for(4)
        push(client, engine, 1)
        buffer.wait_for(6)
        push(client, engine, 2)
        buffer.wait_for(8)
    assert len(buffer.completed) == 8 and not buffer.leased
    versions = [buffer.completed[index][0].weight_versions for index in range(8)]
    assert versions == [["0"]] * 4 + [["1"]] * 2 + [["2"]] * 2
    assert seen[-1]["perf/engine_wait_time"] > 0
    assert {pace.weight_version for pace in buffer.paces} == {0, 1, 2}


def test_a_request_goes_on_with_its_tokens_under_the_new_weights(engine, open_service) -> None:
    groups = prompt_groups(1, 1)
    prompt = groups[0].samples[0].prompt
    engine.held_prompts = {tuple(ids(prompt))}
    engine.answer = lambda prompt, params: ids("789")
    buffer = PacedBuffer(groups)
    client = open_service(buffer, engine)
    with generating(client):
        assert engine.busy.wait(DEADLINE)
        push(client, engine, 1)
        buffer.wait_for(1)
    (sample,) = buffer.completed[0]
    assert [(span.start, span.end, span.weight_version) for span in sample.spans] == [(0, 1, "0"), (1, 4, "1")]
    assert list(sample.tokens) == ids(prompt) + ids("7") + ids("789") and sample.response == "7789"
    assert sample.weight_versions == ["0", "1"] and len(sample.rollout_log_probs) == 4
    assert list(sample.loss_mask) == [1, 1, 1, 1]
    first, second = engine.requests
    assert second["input_ids"] == [first["input_ids"][0] + ids("7")] and second["rid"] != first["rid"]
    assert second["sampling_params"][0]["max_new_tokens"] == first["sampling_params"][0]["max_new_tokens"] - 1


def test_tokens_of_older_weights_are_masked_if_asked_for(engine, open_service) -> None:
    groups = prompt_groups(1, 1)
    engine.held_prompts = {tuple(ids(groups[0].samples[0].prompt))}
    engine.answer = lambda prompt, params: ids("789")
    buffer = PacedBuffer(groups)
    client = open_service(buffer, engine, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    with generating(client):
        assert engine.busy.wait(DEADLINE)
        push(client, engine, 1)
        buffer.wait_for(1)
    assert list(buffer.completed[0][0].loss_mask) == [0, 1, 1, 1]


def test_a_dropped_group_is_replaced_and_a_late_one_is_left(engine, open_service, tmp_path) -> None:
    file = tmp_path / "filters.py"
    file.write_text("def odd(args, group):\n    return group[0].group_index % 2 == 1\n")
    buffer = PacedBuffer(prompt_groups(40, 1), late={3})
    client = open_service(buffer, engine, dynamic_sampling_filter_path=f"{file}:odd")
    with generating(client):
        buffer.wait_for(3)
    assert {1, 5, 7} <= set(buffer.completed) and 3 not in buffer.completed
    assert {(0, "filtered"), (2, "filtered")} <= set(buffer.rejected)


def test_over_sampling_bounds_the_groups_in_flight(engine, open_service) -> None:
    groups = prompt_groups(40, 1)
    engine.held_prompts = {tuple(ids(groups[0].samples[0].prompt))}
    buffer = PacedBuffer(groups, size=10)
    client = open_service(buffer, engine, rollout_batch_size=2, over_sampling_batch_size=3)
    with generating(client):
        buffer.wait_for(19)
    # One group is in flight all the time.
    assert buffer.asked[0] == 3 and max(buffer.asked[1:]) <= 2


def test_with_a_tuned_limit_a_few_more_groups_are_leased_than_the_engines_take(engine, open_service) -> None:
    engine.loads = {"loads": [{"num_running_reqs": 1, "num_waiting_reqs": 99, "token_usage": 0.0}]}
    groups = prompt_groups(40, 2)
    engine.held_prompts = {tuple(ids(groups[0].samples[0].prompt))}
    buffer = PacedBuffer(groups, size=40)
    client = open_service(buffer, engine, n_samples_per_prompt=2, rollout_batch_size=2, rollout_tune_concurrency=True)
    with generating(client) as seen:
        buffer.wait_for(30)
    most = START // 2 * 5 // 4
    assert buffer.asked[0] == most and max(buffer.asked[1:]) < most and seen[-1]["rollout/concurrency"] <= START


def test_what_runs_at_the_end_goes_back_and_a_second_call_is_refused(engine, open_service) -> None:
    groups = prompt_groups(2, 1)
    engine.held_prompts = {tuple(ids(group.samples[0].prompt)) for group in groups}
    buffer = PacedBuffer(groups)
    client = open_service(buffer, engine)
    with generating(client):
        assert engine.busy.wait(DEADLINE)
        with pytest.raises(WrongState, match="a call of Generate with a pace is running"), generating(client):
            threading.Event().wait(0.2)
    client.status()
    returned = threading.Event()
    for _ in range(100):
        if len(buffer.returned) == 2:
            break
        returned.wait(0.1)
    assert sorted(index for index, _ in buffer.returned) == [0, 1] and not buffer.leased


def test_an_engine_that_dies_ends_the_call_with_its_name(engine, open_service) -> None:
    engine.status = 500
    client = open_service(PacedBuffer(prompt_groups(4, 1)), engine)
    with pytest.raises(EngineError, match="fake-0"), generating(client):
        threading.Event().wait(2)


def test_the_name_of_the_original_makes_one_iteration_where_it_is_called(engine, make_state) -> None:
    state = make_state(engine, rollout_batch_size=2)
    with LeasedDataSource(FakeBuffer(prompt_groups(4, 1)), worker_id="test") as source:
        output = generate_rollout_fully_async(state.args, 0, source)
    assert [group[0].response for group in output.samples] == ["000", "700"]


def test_a_text_whose_characters_are_split_between_weights_is_decoded_as_one(engine, open_service, monkeypatch) -> None:
    """A tokenizer that joins two tokens into one character shows what decoding part by part would give."""
    monkeypatch.setattr(CharTokenizer, "decode", lambda self, tokens, skip_special_tokens=False: f"<{len(tokens)}>")
    groups = prompt_groups(1, 1)
    engine.held_prompts = {tuple(ids(groups[0].samples[0].prompt))}
    engine.answer = lambda prompt, params: ids("789")
    buffer = PacedBuffer(groups)
    client = open_service(buffer, engine)
    with generating(client):
        assert engine.busy.wait(DEADLINE)
        push(client, engine, 1)
        buffer.wait_for(1)
    assert buffer.completed[0][0].response == "<4>"


def test_a_group_that_the_buffer_refuses_ends_the_call_though_nothing_else_runs(engine, open_service) -> None:
    class Refusing(PacedBuffer):
        def complete_group(self, token: str, samples: list[Sample]) -> bool:
            raise InvalidField("samples[0].reward", None, "a number")

    client = open_service(Refusing(prompt_groups(1, 1)), engine)
    stop = StopSignal()
    timer = threading.Timer(DEADLINE, stop.set)
    timer.start()
    with pytest.raises(InvalidField, match="reward"):
        client.generate_on(
            0, TrainerPace(max_staleness=1, groups_per_step=2, stop_step=100), stop, lambda metrics: None
        )
    timer.cancel()


def test_generating_one_request_for_all_is_no_wait_of_the_engines(engine, open_service) -> None:
    answer, never = engine.answer, threading.Event()
    engine.answer = lambda prompt, params: (never.wait(1.0), answer(prompt, params))[1]
    buffer = PacedBuffer(prompt_groups(1, 1))
    client = open_service(buffer, engine, deterministic=True)
    with generating(client, staleness=0) as seen:
        buffer.wait_for(1)
        while not seen:
            never.wait(0.01)
    assert seen[-1]["perf/engine_wait_time"] < 0.9


def test_the_next_request_of_a_deterministic_run_replaces_all_that_were_dropped(engine, open_service, tmp_path) -> None:
    class Slow(PacedBuffer):
        def reject_group(self, token: str, reason: str) -> None:
            if self.leased[token].group_index == 2:
                threading.Event().wait(0.3)
            super().reject_group(token, reason)

    file = tmp_path / "filters.py"
    file.write_text("def odd(args, group):\n    return group[0].group_index % 2 == 1\n")
    buffer = Slow(prompt_groups(40, 1), size=4)
    client = open_service(buffer, engine, deterministic=True, dynamic_sampling_filter_path=f"{file}:odd")
    with generating(client, staleness=0):
        buffer.wait_for(4)
    assert [len(request["input_ids"]) for request in engine.requests] == [4, 2, 1, 1]
