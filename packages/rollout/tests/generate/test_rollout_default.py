"""The default rollout against an engine without a model and a buffer in memory."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from rollout_fakes import EOS, FakeBuffer, FakeEngine, prompt_groups, reverse

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.generate import default
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sources import LeasedDataSource
from slime.types import Sample
from slime.types.errors import DeadlineExceeded, EngineError, InvalidField, LeaseLost


def run(state, buffer, **leases):
    leases = {"worker_id": "test", "wait_seconds": 0.05} | leases
    token = CALL.set(RolloutCall(0, state.args.rollout_batch_size))
    try:
        with LeasedDataSource(buffer, **leases) as source:
            return generate_rollout(state.args, 7, source)
    finally:
        CALL.reset(token)


def test_groups_are_generated_scored_and_completed(engine, make_state):
    state = make_state(engine, rollout_batch_size=4, n_samples_per_prompt=3)
    buffer = FakeBuffer(prompt_groups(6, 3))
    output = run(state, buffer)
    assert [group[0].group_index for group in output.samples] == [0, 1, 2, 3]
    assert sorted(buffer.completed) == [0, 1, 2, 3]
    sample = buffer.completed[2][1]
    assert sample.status is Sample.Status.COMPLETED and sample.reward == 1.0
    assert sample.tokens[-4:] == reverse(sample.tokens[:4], {})
    np.testing.assert_array_equal(sample.rollout_log_probs, np.full(4, -0.5, np.float32))
    assert [(span.start, span.end, span.weight_version) for span in sample.spans] == [(0, 4, "0")]
    assert not buffer.leased and len(buffer.waiting) == 2


def test_one_request_a_group_and_one_tokenisation_a_prompt(engine, make_state):
    state = make_state(engine, rollout_batch_size=4, n_samples_per_prompt=8)
    run(state, FakeBuffer(prompt_groups(4, 8)))
    assert [len(request["input_ids"]) for request in engine.requests] == [8] * 4
    assert state.tokenizer.calls == 4


def test_deterministic_is_one_request_in_index_order_with_keyed_seeds(engine, make_state):
    state = make_state(engine, rollout_batch_size=4, n_samples_per_prompt=2, deterministic=True)
    groups = prompt_groups(4, 2)
    run(state, FakeBuffer(groups[::-1]))
    (request,) = engine.requests
    assert request["input_ids"][0] == state.tokenizer.encode(groups[0].samples[0].prompt)
    seeds = [params["sampling_seed"] for params in request["sampling_params"]]
    assert len(set(seeds)) == 8
    run(state, FakeBuffer(groups))
    assert [params["sampling_seed"] for params in engine.requests[1]["sampling_params"]] == seeds


def test_two_engines_share_the_work(make_state):
    engines = [FakeEngine(name=f"fake-{i}") for i in range(2)]
    state = make_state(*engines, rollout_batch_size=8)
    run(state, FakeBuffer(prompt_groups(8, 1)))
    assert all(engine.requests for engine in engines)
    for engine in engines:
        engine.stop()


def test_truncated_by_the_response_limit(engine, make_state):
    state = make_state(engine, rollout_batch_size=1, rollout_max_response_len=2)
    buffer = FakeBuffer(prompt_groups(1, 1))
    run(state, buffer)
    (sample,) = buffer.completed[0]
    assert sample.status is Sample.Status.TRUNCATED and sample.response_length == 2
    assert sample.reward == pytest.approx(0.5 * 2 / 4)


def keep_last(args, samples, **kwargs):
    return samples[0].group_index == 4


def keep_odd(args, group):
    return group[0].group_index % 2 == 1


def test_the_dynamic_filter_rejects_with_a_reason_and_fetches_more(engine, make_state):
    state = make_state(engine, rollout_batch_size=3, dynamic_sampling_filter_path=f"{__name__}.keep_odd")
    buffer = FakeBuffer(prompt_groups(12, 1))
    output = run(state, buffer)
    assert [group[0].group_index for group in output.samples] == [1, 3, 5]
    assert {index for index, _ in buffer.rejected} >= {0, 2, 4}
    assert output.metrics["rollout/dynamic_filter/drop_filtered"] == len(buffer.rejected)
    assert not buffer.leased


def test_groups_that_are_dropped_one_after_the_other_are_warned_of(engine, make_state, monkeypatch, caplog):
    monkeypatch.setattr(default, "DROPPED_IN_A_ROW", 3)
    state = make_state(engine, rollout_batch_size=1, dynamic_sampling_filter_path=f"{__name__}.keep_last")
    run(state, FakeBuffer(prompt_groups(5, 1)))
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "the dynamic filter has dropped the last 3 groups (filtered)" in record.getMessage()


def test_zero_std_groups_are_kept_where_the_rollout_would_come_out_short(engine, make_state):
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback"
    state = make_state(engine, rollout_batch_size=2, n_samples_per_prompt=2, dynamic_sampling_filter_path=path)
    output = run(state, FakeBuffer(prompt_groups(2, 2)))
    assert len(output.samples) == 2


@pytest.mark.parametrize("partial", [False, True])
def test_over_sampling_gives_the_rest_back(engine, make_state, partial):
    groups = prompt_groups(6, 2)
    state = make_state(
        engine, rollout_batch_size=4, over_sampling_batch_size=6, n_samples_per_prompt=2, partial_rollout=partial
    )
    for group in groups[1:3]:
        engine.held_prompts.add(tuple(state.tokenizer.encode(group.samples[0].prompt)))
    buffer = FakeBuffer(groups)
    output = run(state, buffer)
    assert sorted(buffer.completed) == [0, 3, 4, 5] and output.metrics["rollout/aborted_groups"] == 2
    assert "all" not in engine.aborted and len(engine.aborted) == 4
    assert sorted(index for index, _ in buffer.returned) == [1, 2]
    for _, samples in buffer.returned:
        assert [s.status for s in samples] == ([Sample.Status.ABORTED] * 2 if partial else [])
        assert all(s.response_length == 1 and s.metadata["start_rollout_id"] == 7 and s.reward is None for s in samples)


def test_a_partial_group_goes_on_where_it_stopped(engine, make_state):
    state = make_state(engine, rollout_batch_size=1, partial_rollout=True, mask_offpolicy_in_partial_rollout=True)
    (group,) = prompt_groups(1, 2)
    partial, finished = group.samples
    for sample, token, reason in ((partial, 2, "abort"), (finished, EOS, "stop")):
        sample.tokens = state.tokenizer.encode(sample.prompt)
        meta = {"weight_version": "0", "finish_reason": {"type": reason}}
        sample.append_response_tokens(tokens=[token], log_probs=[-1.0], meta_info=meta, text="")
    engine.version = "3"
    buffer = FakeBuffer([group])
    run(state, buffer)
    (request,) = engine.requests
    assert len(request["input_ids"]) == 1, "the finished sample is left alone"
    assert request["input_ids"][0] == [*state.tokenizer.encode(group.samples[0].prompt), 2]
    assert request["sampling_params"][0]["max_new_tokens"] == 3
    resumed, untouched = buffer.completed[0]
    assert resumed.response_length == 4 and resumed.loss_mask == [0, 1, 1, 1]
    assert [(s.start, s.end, s.weight_version) for s in resumed.spans] == [(0, 1, "0"), (1, 4, "3")]
    assert untouched.response_length == 1 and untouched.reward is not None


def test_long_prompts_are_rejected_by_the_flag_and_by_the_context(engine, make_state):
    groups = [*prompt_groups(1, 1, digits=9), *prompt_groups(2, 1, first=1)]
    buffer = FakeBuffer(groups)
    output = run(make_state(engine, rollout_batch_size=2, rollout_max_prompt_len=6), buffer)
    assert buffer.rejected == [(0, "prompt_too_long")] and output.metrics["rollout/prompt_too_long"] == 1

    state = make_state(engine, rollout_batch_size=2)
    state.context_len = 8
    buffer = FakeBuffer(groups)
    output = run(state, buffer)
    assert buffer.rejected == [(0, "prompt_too_long")] and output.metrics["rollout/prompt_too_long"] == 1


@pytest.mark.parametrize("prompt", ["", [{"role": "user", "content": "no template for this"}]])
def test_a_prompt_that_cannot_be_used_costs_its_group_alone(engine, make_state, monkeypatch, prompt):
    def no_template(*args, **kwargs):
        raise ValueError("tokenizer.chat_template is not set")

    groups = prompt_groups(3, 1)
    groups[1].samples[0].prompt = prompt
    buffer = FakeBuffer(groups)
    state = make_state(engine, rollout_batch_size=2)
    monkeypatch.setattr(type(state.tokenizer), "apply_chat_template", no_template, raising=False)
    output = run(state, buffer)
    assert buffer.rejected == [(1, "prompt_unusable")] and output.metrics["rollout/prompt_unusable"] == 1
    assert len(output.samples) == 2


def test_prompts_that_none_can_be_used_of_end_the_rollout(engine, make_state, monkeypatch):
    monkeypatch.setattr(default, "REFUSED_IN_A_ROW", 3)
    groups = prompt_groups(4, 1)
    for group in groups:
        group.samples[0].prompt = ""
    buffer = FakeBuffer(groups)
    with pytest.raises(InvalidField, match="a prompt that has tokens"):
        run(make_state(engine, rollout_batch_size=2), buffer)
    assert not buffer.leased, "a failed rollout gives its leases back"


def test_the_context_caps_the_response(engine, make_state):
    state = make_state(engine, rollout_batch_size=1)
    state.context_len = 6
    buffer = FakeBuffer(prompt_groups(1, 1))
    run(state, buffer)
    assert engine.requests[0]["sampling_params"][0]["max_new_tokens"] == 2


def test_no_prompts_is_a_deadline_that_says_what_to_do(engine, make_state):
    with pytest.raises(DeadlineExceeded, match="--prompt-data"):
        run(make_state(engine, rollout_batch_size=1), FakeBuffer([]))


def test_an_engine_that_breaks_connections_ends_the_rollout_and_returns_the_groups(engine, make_state):
    engine.die_after = 2
    buffer = FakeBuffer(prompt_groups(4, 1))
    with pytest.raises(EngineError, match="fake-0"):
        run(make_state(engine, rollout_batch_size=4), buffer)
    assert not buffer.leased


def test_a_500_names_the_engine(engine, make_state):
    engine.status = 500
    with pytest.raises(EngineError, match="fake-0.*it broke"):
        run(make_state(engine, rollout_batch_size=1), FakeBuffer(prompt_groups(1, 1)))


def test_a_cancelled_rollout_gives_everything_back(engine, make_state):
    state = make_state(engine, rollout_batch_size=2)
    groups = prompt_groups(2, 1)
    engine.held_prompts = {tuple(state.tokenizer.encode(group.samples[0].prompt)) for group in groups}
    buffer = FakeBuffer(groups)
    call = RolloutCall(0, 2)
    failure: list[BaseException] = []

    def work() -> None:
        CALL.set(call)
        try:
            with LeasedDataSource(buffer, worker_id="test") as source:
                generate_rollout(state.args, 0, source)
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    assert engine.busy.wait(120)
    call.cancel()
    thread.join(120)
    assert not thread.is_alive() and failure
    assert not buffer.leased and len(buffer.returned) == 2 and not buffer.completed


def expire(buffer: FakeBuffer) -> None:
    """Ends all leases, as the buffer does with those that are not renewed in time."""
    for group in buffer.leased.values():
        buffer.waiting.append(next(g for g in buffer.groups if g.group_index == group.group_index))
    buffer.leased.clear()


def test_a_group_whose_lease_expired_is_completed_under_a_new_one():
    buffer = FakeBuffer(prompt_groups(4, 1))
    with LeasedDataSource(buffer, worker_id="test") as source:
        groups = source.get_samples(3)
        expire(buffer)
        for group in groups:
            group[0].status = Sample.Status.COMPLETED
            if group is groups[-1]:
                source.reject(group, "dull")
            else:
                source.complete(group)
    assert sorted(buffer.completed) == [0, 1] and buffer.rejected == [(2, "dull")]
    # The one that never was leased here is given back.
    assert [group.group_index for group in buffer.waiting] == [3] and not buffer.leased


@pytest.mark.parametrize("wrong", ["nothing", "a sample", "a lease"])
def test_groups_that_a_function_returns_are_completed_in_one_call_or_one_by_one(wrong: str):
    buffer = FakeBuffer(prompt_groups(4, 1))
    with LeasedDataSource(buffer, worker_id="test") as source:
        groups = source.get_samples(3)
        for number, (sample,) in enumerate(groups):
            sample.tokens, sample.response, sample.response_length = [3, 4, 1], "2", 2
            sample.reward, sample.status = (
                float("nan") if wrong == "a sample" and number else 1.0,
                Sample.Status.COMPLETED,
            )
        if wrong == "a lease":
            expire(buffer)
        if wrong == "a sample":
            with pytest.raises(InvalidField, match="reward"):
                source.complete_rest(groups)
        else:
            source.complete_rest(groups)
    assert buffer.calls_with_several == 1
    assert sorted(buffer.completed) == ([0] if wrong == "a sample" else [0, 1, 2]) and not buffer.leased


def test_a_group_that_is_leased_again_while_it_is_worked_on_is_not_begun_twice():
    buffer = FakeBuffer(prompt_groups(2, 1))
    with LeasedDataSource(buffer, worker_id="test") as source:
        (first,) = source.get_samples(1)
        expire(buffer)
        assert [group[0].group_index for group in source.get_samples(2)] == [1]
        first[0].status = Sample.Status.COMPLETED
        source.complete(first)
        assert list(buffer.completed) == [0] and len(buffer.leased) == 1


def test_a_group_that_another_worker_has_is_lost():
    buffer = FakeBuffer(prompt_groups(1, 1))
    with LeasedDataSource(buffer, worker_id="test") as source:
        (group,) = source.get_samples(1)
        expire(buffer)
        buffer.lease_groups(1, ttl_seconds=9.0, wait_seconds=0.0, worker_id="another")
        with pytest.raises(LeaseLost):
            source.complete(group)


def test_leases_are_renewed_while_work_goes_on(engine):
    buffer = FakeBuffer(prompt_groups(1, 1))
    renewed = threading.Event()
    renew = buffer.renew_leases
    buffer.renew_leases = lambda tokens, ttl: (renew(tokens, ttl), renewed.set())[0]  # type: ignore[method-assign]
    with LeasedDataSource(buffer, worker_id="test", ttl_seconds=0.05) as source:
        source.get_samples(1)
        assert renewed.wait(120)
    assert buffer.renewed and not buffer.leased
