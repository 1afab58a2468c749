"""A step of the embedded engine that fails: everybody who waited for it learns it, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from slime.rollout.engines.embedded.dense.kv_cache import KvCache
from slime.rollout.engines.embedded.dense.model import DenseModel, Pass
from slime.rollout.engines.embedded.endpoints.generate import make_response
from slime.rollout.engines.embedded.model import response as response_module
from slime.rollout.engines.embedded.model.continuous import ContinuousBatch
from slime.rollout.engines.embedded.model.decode import Batch
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler
from slime.types.errors import EngineError, InvalidField

VOCABULARY = 60


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return Loaded(Qwen2ForCausalLM(config).eval().requires_grad_(False), None, VOCABULARY, 256, frozenset([1]))


@pytest.fixture
def scheduler(loaded: Loaded) -> Iterator[Scheduler]:
    running = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0))
    yield running
    running.stop()


def submit(
    scheduler: Scheduler, loaded: Loaded, count: int = 3, rid: str = "", prompt: list[int] | None = None
) -> Future[Any]:
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    response = make_response(loaded, prompt or [2, 3], params, rid, "input_ids")
    return scheduler.submit([response]).done


def test_those_who_join_a_step_that_fails_are_told(
    scheduler: Scheduler, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: KvCache, *sizes: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(KvCache, "reserve", refuse)
        with pytest.raises(MemoryError, match="no room"):
            submit(scheduler, loaded).result(timeout=60)
    assert submit(scheduler, loaded).result(timeout=60) is None
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_one_sequence_that_fails_leaves_the_others_running(
    scheduler: Scheduler, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def append(batch: Batch, response: Response, token: int, log_prob: float) -> None:
        if response.rid == "bad" and response.output_ids:
            raise RuntimeError("this one")
        check_and_append(batch, response, token, log_prob)

    check_and_append = Batch._check_and_append
    monkeypatch.setattr(Batch, "_check_and_append", append)
    good = [submit(scheduler, loaded, 20) for _ in range(2)]
    bad = submit(scheduler, loaded, 20, "bad")
    with pytest.raises(RuntimeError, match="this one"):
        bad.result(timeout=60)
    assert [future.result(timeout=60) for future in good] == [None, None]


def test_a_sequence_that_no_step_can_take_is_found_among_the_others(
    scheduler: Scheduler, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forward(dense: DenseModel, run: Pass, cache: KvCache) -> torch.Tensor:
        if 7 in run.ids[run.decoding :]:
            raise RuntimeError("a prompt with 7")
        return whole(dense, run, cache)

    whole = DenseModel.forward
    monkeypatch.setattr(DenseModel, "forward", forward)
    pending = scheduler.pause("in_place")
    pending.result(timeout=60)
    prompts = [[2], [3, 4], [5, 7], [6], [8]]
    futures = [submit(scheduler, loaded, 5, prompt=prompt) for prompt in prompts]
    scheduler.resume()
    for prompt, future in zip(prompts, futures, strict=True):
        if 7 in prompt:
            with pytest.raises(RuntimeError, match="a prompt with 7"):
                future.result(timeout=60)
        else:
            assert future.result(timeout=60) is None
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_numbers_that_are_none_stay_in_their_row(
    scheduler: Scheduler, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = loaded.model.get_input_embeddings().weight
    with torch.no_grad():
        kept, table[9] = table[9].clone(), float("nan")
    try:
        with pytest.raises(EngineError, match="not numbers"):
            submit(scheduler, loaded, 5, prompt=[9, 9, 9, 9]).result(timeout=60)
        again = [submit(scheduler, loaded, 30, prompt=[2]), submit(scheduler, loaded, 30, prompt=[9, 2])]
        assert again[0].result(timeout=60) is None
        with pytest.raises(EngineError, match="not numbers"):
            again[1].result(timeout=60)
    finally:
        with torch.no_grad():
            table[9] = kept


def test_work_in_pieces_and_steps_take_turns(scheduler: Scheduler, loaded: Loaded) -> None:
    running: list[int] = []

    def pieces() -> Iterator[int]:
        while not future.done():
            running.append(scheduler.num_running)
            yield len(running)

    scheduler.pause("in_place").result(timeout=60)
    future = submit(scheduler, loaded, 100)
    work, dropped, last = scheduler.in_pieces(pieces), scheduler.in_pieces(pieces), scheduler.in_pieces(pieces)
    dropped.is_wanted = False
    scheduler.resume()
    assert future.result(timeout=60) is None
    assert work.done.result(timeout=60) == len(running) and last.done.result(timeout=60) is None
    assert not dropped.done.done()
    assert 90 <= sum(count > 0 for count in running) <= 100


def test_memory_bounds_how_many_run_together(loaded: Loaded) -> None:
    scheduler = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0, max_total_tokens=60))
    most = 0

    def pieces() -> Iterator[None]:
        nonlocal most
        while not all(future.done() for future in futures):
            most = max(most, scheduler.num_running)
            yield None

    try:
        scheduler.pause("in_place").result(timeout=60)
        futures = [submit(scheduler, loaded, 20, prompt=[2, 3, number + 4]) for number in range(6)]
        work = scheduler.in_pieces(pieces)
        scheduler.resume()
        assert [future.result(timeout=60) for future in futures] == [None] * 6
        work.done.result(timeout=60)
        assert most == 2  # 23 tokens each, of 60
    finally:
        scheduler.stop()


def test_a_sequence_that_leaves_a_step_that_fails_runs_once(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy() -> list[Response]:
        params = SamplingParams(temperature=0, max_new_tokens=15, ignore_eos=True)
        return [make_response(loaded, [2, token], params, "", "input_ids") for token in (3, 4, 5)]

    leaving = ContinuousBatch._keep_to_memory

    def fail_once(batch: ContinuousBatch) -> None:
        leaving(batch)
        if batch._left and not failed:
            failed.append(True)
            raise MemoryError("no room")

    failed: list[bool] = []
    alone, together = greedy(), greedy()
    monkeypatch.setattr(response_module, "TOKENS_AHEAD", 2)
    monkeypatch.setattr(ContinuousBatch, "_keep_to_memory", fail_once)
    scheduler = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0, max_total_tokens=30))
    try:
        for responses in (*([each] for each in alone), together):
            scheduler.submit(responses).done.result(timeout=60)
    finally:
        scheduler.stop()
    assert failed and [r.output_ids for r in together] == [r.output_ids for r in alone]


def test_what_ends_while_a_failed_batch_is_divided_leaves_nothing_behind(
    scheduler: Scheduler, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step of several sequences fails, and they are aborted at once."""
    step = ContinuousBatch.step

    def fail(batch: ContinuousBatch) -> None:
        if len(batch.running) > 1:
            scheduler.abort(None)
            raise MemoryError("no room")
        step(batch)

    monkeypatch.setattr(ContinuousBatch, "step", fail)
    scheduler.pause("in_place").result(timeout=60)
    futures = [submit(scheduler, loaded, prompt=[2, 3, number]) for number in range(2, 5)]
    scheduler.resume()
    for future in futures:
        future.result(timeout=60)
    submit(scheduler, loaded).result(timeout=60)
    assert [record.getMessage() for record in caplog.records] == ["a step of 3 sequences failed"]


def test_a_response_that_may_have_no_token_is_refused(loaded: Loaded) -> None:
    params = SamplingParams(min_new_tokens=1, stop_token_ids=frozenset(range(VOCABULARY)) - loaded.eos_ids)
    with pytest.raises(InvalidField, match="stop_token_ids"):
        make_response(loaded, [2], params, "", "input_ids")


def test_linear_layers_of_another_kind_are_left_to_transformers(loaded: Loaded) -> None:
    class Quantized(torch.nn.Linear):
        pass

    assert DenseModel.supports(loaded.model)
    mlp = loaded.model.model.layers[0].mlp
    linear, mlp.down_proj = mlp.down_proj, Quantized(32, 16, bias=False)
    try:
        assert not DenseModel.supports(loaded.model)
    finally:
        mlp.down_proj = linear
