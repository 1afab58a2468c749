"""The contracts of the user's functions, through the default rollout."""

from __future__ import annotations

import asyncio
import copy

import pytest
from rollout_fakes import EOS, FakeBuffer, prompt_groups

from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import flatten
from slime.rollout.plugins import CustomGenerate
from slime.rollout.sglang_rollout import GenerateState, generate, generate_and_rm, generate_rollout, get_model_url
from slime.rollout.sources import LeasedDataSource
from slime.types import Sample
from slime.types.errors import InvalidField, PluginError
from slime.utils.http_utils import post


def run(state, buffer, function=generate_rollout, rollout_id=7):
    token = CALL.set(RolloutCall(rollout_id, state.args.rollout_batch_size))
    try:
        with LeasedDataSource(buffer, worker_id="test", wait_seconds=0.05) as source:
            output = function(state.args, rollout_id, source, evaluation=False)
            source.complete_rest([flatten(group) for group in output.samples])
            return output
    finally:
        CALL.reset(token)


async def over_http(args, sample, sampling_params):
    """Generates as code written for slime does: posts to the engine by itself."""
    state = GenerateState(args)
    sample.tokens = state.tokenizer.encode(sample.prompt)
    payload = {"input_ids": sample.tokens, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args), payload)
    new = output["meta_info"]["output_token_logprobs"]
    sample.append_response_tokens(
        args,
        tokens=[t[1] for t in new],
        log_probs=[t[0] for t in new],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


async def calls_the_default(args, sample, sampling_params, evaluation=False):
    assert evaluation is False
    return await generate(args, sample, sampling_params)


async def fans_out(args, sample, sampling_params):
    parts = []
    for _ in range(2):
        part = copy.deepcopy(sample)
        parts.append(await generate(args, part, sampling_params))
    return parts


async def disagrees(args, sample, sampling_params):
    parts = await fans_out(args, sample, sampling_params)
    parts[0].rollout_id, parts[1].rollout_id = 1, 2
    return parts


async def of_a_group(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    for sample in samples:
        sample.tokens = [5, EOS]
        sample.response, sample.response_length, sample.reward = "3", 1, 0.25
        sample.status = Sample.Status.COMPLETED
    return samples


async def wrong(args, sample, sampling_params):
    return "text"


@pytest.mark.parametrize("name", ["over_http", "calls_the_default"])
def test_custom_generate(engine, make_state, name):
    state = make_state(engine, rollout_batch_size=2, custom_generate_function_path=f"{__name__}.{name}")
    buffer = FakeBuffer(prompt_groups(2, 2))
    run(state, buffer)
    assert [[s.reward for s in buffer.completed[g]] for g in (0, 1)] == [[1.0, 1.0]] * 2


def test_fan_out_shares_a_rollout_id_and_is_scored_as_a_batch(engine, make_state):
    state = make_state(engine, rollout_batch_size=1, custom_generate_function_path=f"{__name__}.fans_out")
    buffer = FakeBuffer(prompt_groups(1, 2))
    run(state, buffer)
    assert [(s.index, s.rollout_id, s.reward) for s in buffer.completed[0]] == [
        (0, 0, 1.0),
        (0, 0, 1.0),
        (1, 1, 1.0),
        (1, 1, 1.0),
    ]
    state.plugins.generate = CustomGenerate(disagrees, "disagrees")
    with pytest.raises(InvalidField, match="rollout_id"):
        run(state, FakeBuffer(prompt_groups(1, 1)))


def test_the_shape_that_takes_a_whole_group(engine, make_state):
    state = make_state(
        engine, rollout_batch_size=1, custom_generate_function_path=f"{__name__}.of_a_group", rm_type=None
    )
    buffer = FakeBuffer(prompt_groups(1, 3))
    run(state, buffer)
    assert [sample.reward for sample in buffer.completed[0]] == [0.25] * 3


def test_a_function_of_a_file_wins_where_the_sample_names_it(engine, make_state, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length, sample.response = [5, 6], 1, '4'\n"
        "    sample.status = sample.Status.COMPLETED\n"
        "    return sample\n"
    )
    groups = prompt_groups(1, 1)
    groups[0].samples[0].generate_function_path = f"{file}:generate"
    buffer = FakeBuffer(groups)
    run(make_state(engine, rollout_batch_size=1), buffer)
    assert buffer.completed[0][0].response == "4" and not engine.requests


def test_what_does_not_fit_is_said_when_the_program_starts(engine, make_state):
    with pytest.raises(PluginError, match="--custom-generate-function-path.*no_such"):
        make_state(engine, custom_generate_function_path=f"{__name__}.no_such")
    with pytest.raises(PluginError, match="--dynamic-sampling-filter-path"):
        make_state(engine, dynamic_sampling_filter_path=f"{__name__}.takes_nothing")
    state = make_state(engine, rollout_batch_size=1, custom_generate_function_path=f"{__name__}.wrong")
    with pytest.raises(PluginError, match="answered str"):
        run(state, FakeBuffer(prompt_groups(1, 1)))


def takes_nothing():
    return True


def hook(args, sample, rollout_id=None):
    sample.metadata["hooked"] = rollout_id


def marks_second(args, groups):
    groups[1][0].remove_sample = True


SEEN: list[int] = []


def sees_all(args, groups, get_samples):
    assert callable(get_samples)
    SEEN.append(len(groups))


def test_hooks_and_filters_of_samples(engine, make_state):
    state = make_state(
        engine,
        rollout_batch_size=2,
        rollout_sample_hook_path=[f"{__name__}.hook"],
        rollout_sample_filter_path=f"{__name__}.marks_second",
        rollout_all_samples_process_path=f"{__name__}.sees_all",
    )
    buffer = FakeBuffer(prompt_groups(2, 1))
    run(state, buffer)
    assert [buffer.completed[g][0].remove_sample for g in (0, 1)] == [False, True]
    assert buffer.completed[0][0].metadata["hooked"] == 7 and SEEN == [2]


def own_loop(args, rollout_id, data_source, evaluation=False):
    """A rollout function with an event loop of its own, that makes new samples and numbers groups by position."""

    async def work():
        groups = data_source.get_samples(args.rollout_batch_size)
        params = GenerateState(args).sampling_params
        done = [[await generate_and_rm(args, s, dict(params)) for s in group] for group in groups]
        out = []
        for position, group in enumerate(done):
            fresh = [Sample.from_dict({**s.to_dict(), "group_index": 1000 + position, "index": None}) for s in group]
            out.append(fresh)
        padding = [Sample(group_index=-1, tokens=[0, 0], response_length=1, status=Sample.Status.FAILED)]
        return RolloutFnTrainOutput(samples=[*out, padding], metrics={"mine": 1})

    return asyncio.run(work())


def test_a_rollout_function_of_the_user(engine, make_state):
    state = make_state(engine, rollout_batch_size=2)
    buffer = FakeBuffer(prompt_groups(4, 2, first=5))
    output = run(state, buffer, own_loop)
    assert output.metrics == {"mine": 1}
    assert sorted(buffer.completed) == [5, 6]
    assert [(s.group_index, s.index) for s in buffer.completed[6]] == [(6, 12), (6, 13)]
    assert not buffer.leased
