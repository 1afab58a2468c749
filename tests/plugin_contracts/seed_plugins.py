"""Plug-ins as they are written for slime: in the shapes of today, and in older ones that are still about."""

from __future__ import annotations

import asyncio
import copy
import inspect
from typing import Any

from slime.data import RolloutDataSource, RolloutDataSourceWithBuffer, Sample
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.rollout.sglang_rollout import GenerateState, generate, generate_and_rm, get_model_url
from slime.utils.http_utils import post

# Arguments of the calls, for tests in the same process.
CALLS: list[tuple[Any, ...]] = []


def _answered(sample: Sample, tokens: list[int], response: list[int]) -> Sample:
    sample.tokens, sample.response_length = tokens + response, len(response)
    sample.response, sample.rollout_log_probs = "digits", [-0.5] * len(response)
    sample.status = Sample.Status.COMPLETED
    return sample


# --rollout-function-path


def rollout_of_groups(args, rollout_id, data_source, evaluation=False):
    """With an event loop of its own, and the default generation."""
    CALLS.append(("rollout", rollout_id, evaluation))

    async def work():
        groups = data_source.get_samples(args.rollout_batch_size)
        params = GenerateState(args).sampling_params
        return [[await generate_and_rm(args, sample, dict(params)) for sample in group] for group in groups]

    return RolloutFnTrainOutput(samples=asyncio.run(work()), metrics={"mine": 3})


def rollout_as_a_plain_list(args, rollout_id, data_source, evaluation=False):
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        _answered(sample, [2, 3], [4, 1]).reward = 0.5
    return groups


def rollout_of_segments(args, rollout_id, data_source, evaluation=False):
    """Three levels deep: prompts, rollouts, segments."""
    groups = data_source.get_samples(args.rollout_batch_size)
    nested = []
    for group in groups:
        rollouts = []
        for number, sample in enumerate(group):
            segments = [_answered(copy.deepcopy(sample), [2], [3 + i, 1]) for i in range(2)]
            for segment in segments:
                segment.reward, segment.rollout_id = float(number), 100 * sample.group_index + number
            rollouts.append(segments)
        nested.append(rollouts)
    return RolloutFnTrainOutput(samples=nested)


def rollout_of_segments_without_ids(args, rollout_id, data_source, evaluation=False):
    output = rollout_of_segments(args, rollout_id, data_source)
    for segment in (segment for group in output.samples for rollout in group for segment in rollout):
        segment.rollout_id = None
    return output


def rollout_that_drops_some(args, rollout_id, data_source, evaluation=False):
    """Leaves half of what it was given undone."""
    groups = rollout_as_a_plain_list(args, rollout_id, data_source)
    return groups[: len(groups) // 2]


def rollout_of_numbers(args, rollout_id, data_source, evaluation=False):
    return [[1, 2] for _ in data_source.get_samples(args.rollout_batch_size)]


def rollout_without_evaluation(args, rollout_id, data_source):
    return []


def evaluation_output(args, rollout_id, data_source, evaluation=False):
    CALLS.append(("evaluation", rollout_id, evaluation))
    samples = [Sample(index=i, reward=float(i)) for i in range(2)]
    data = {"mine": {"rewards": [0.0, 1.0], "truncated": [False, True], "samples": samples}}
    return RolloutFnEvalOutput(data=data, metrics={"eval/extra": 2})


def evaluation_as_a_dict(args, rollout_id, data_source, evaluation=False):
    return evaluation_output(args, rollout_id, data_source, evaluation).data


# --custom-generate-function-path


async def generate_over_http(args, sample, sampling_params):
    """Posts to the engine by itself."""
    tokenizer = GenerateState(args).tokenizer
    ids = tokenizer.encode(sample.prompt, add_special_tokens=False)
    payload = {"input_ids": ids, "sampling_params": sampling_params, "return_logprob": True}
    output = await post(get_model_url(args), payload)
    new = output["meta_info"]["output_token_logprobs"]
    sample.tokens = ids
    sample.append_response_tokens(
        args,
        tokens=[t[1] for t in new],
        log_probs=[t[0] for t in new],
        meta_info=output["meta_info"],
        text=output["text"],
    )
    return sample


async def generate_with_a_tool(args, sample, sampling_params, evaluation=False):
    """Two turns; what the tool says between them is not trained on."""
    CALLS.append(("generate", evaluation))
    sample = await generate(args, sample, sampling_params)
    sample.append_response_tokens(args, tokens=[2, 3], log_probs=None, trainable=False, text="01")
    sample.append_response_tokens(args, tokens=[4, 1], log_probs=[-0.1, -0.2], text="2")
    sample.status = Sample.Status.COMPLETED
    return sample


async def generate_segments(args, sample, sampling_params):
    parts = [await generate(args, copy.deepcopy(sample), sampling_params) for _ in range(3)]
    for part in parts:
        part.rollout_id = 1000 + sample.index
    return parts


async def generate_with_any_keywords(args, sample, sampling_params, **kwargs):
    CALLS.append(("keywords", sorted(kwargs)))
    return await generate(args, sample, sampling_params)


def generate_without_await(args, sample, sampling_params):
    return _answered(sample, [2, 3], [4, 1])


class GenerateObject:
    async def __call__(self, args, sample, sampling_params, evaluation=False):
        return await generate(args, sample, sampling_params)


generate_object = GenerateObject()


async def custom_generate(args, samples: list[Sample], evaluation: bool = False) -> list[Sample]:
    """The older shape: all samples of a prompt, generated and scored."""
    CALLS.append(("batch", len(samples), evaluation))
    for sample in samples:
        for _ in range(args.max_turns):
            _answered(sample, [2, 3], [4, 1])
        sample.reward = 0.25
        sample.loss_mask = [1, 0]
    return samples


async def generate_text(args, sample, sampling_params):
    return "text"


# --custom-rm-path


async def reward_func(args, sample: Sample, **kwargs) -> float:
    ground_truth = sample.label or sample.metadata.get("answer", "")
    return 1.0 if sample.response.strip() == ground_truth.strip() else 0.0


async def batched_custom_rm(args, samples: list[Sample]) -> list[float]:
    CALLS.append(("batched", len(samples)))
    return [0.5 + 0.25 * (sample.index % 2) for sample in samples]


def reward_dict(args, sample, **kwargs):
    return {"score": 2, "acc": True}


async def too_few_rewards(args, samples, **kwargs):
    return [1.0]


# Filters and hooks of samples


def drop_odd(args, group, **kwargs):
    odd = group[0].group_index % 2 == 1
    return DynamicFilterOutput(keep=not odd, reason="odd" if odd else None)


def drop_all_but_fall_back(args, group):
    return DynamicFilterOutput(keep=False, reason="never", keep_when_insufficient=True)


def keep_even(args, group):
    return group[0].group_index % 2 == 0


def hook_in_place(args, sample, rollout_id=None, evaluation=None):
    sample.metadata["hooked"] = [rollout_id, evaluation, sample.reward]


async def hook_that_replaces(args, sample, *, evaluation):
    other = copy.deepcopy(sample)
    other.metadata["replaced"] = evaluation
    return other


def hook_that_answers_text(args, sample):
    return "text"


def remove_first_of_each(args, groups):
    for group in groups:
        group[0].remove_sample = True


def look_at_all(args, groups, get_samples):
    assert inspect.ismethod(get_samples)
    CALLS.append(("all", len(groups)))


# Logs


def log_and_go_on(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    CALLS.append(("log", rollout_id, len(samples), rollout_time > 0))


def log_and_stop(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    return True


def log_evaluation(rollout_id, args, data, extra_metrics):
    CALLS.append(("eval_log", rollout_id, sorted(data)))
    return True


# --buffer-filter-path


def newest_first(args, rollout_id, buffer, num_samples):
    CALLS.append(("filter", rollout_id, num_samples))
    chosen = buffer[-num_samples:]
    del buffer[-num_samples:]
    return chosen


def leaves_what_it_returns(args, rollout_id, buffer, num_samples):
    return buffer[:num_samples]


# --data-source-path


class OwnPrompts:
    """Nothing but the contract."""

    def __init__(self, args):
        self.args = args
        self.next = 0
        self.returned: list[list[Sample]] = []

    def get_samples(self, num_samples):
        groups = []
        for _ in range(num_samples):
            text = f"{self.next:03d}"
            samples = [Sample(prompt=text + ">", label=text[::-1]) for _ in range(self.args.n_samples_per_prompt)]
            groups.append(samples)
            self.next += 1
        return groups

    def add_samples(self, samples):
        self.returned.extend(samples)

    def save(self, rollout_id):
        CALLS.append(("save", rollout_id))

    def load(self, rollout_id=None):
        CALLS.append(("load", rollout_id))

    def __len__(self):
        return 1000


class FlatPrompts(RolloutDataSource):
    """The older shape: single samples, from a data set that is asked for them."""

    def __init__(self, dataset, args):
        self.dataset = dataset
        self.args = args

    def get_samples(self, num_samples: int) -> list[Sample]:
        return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]

    def add_samples(self, samples: list[Sample]) -> None:
        pass


class BestFirst(RolloutDataSourceWithBuffer):
    """The older shape: the filter is a method."""

    def __init__(self, dataset, args):
        super().__init__(dataset, args)
        self.buffer = []

    def add_samples(self, samples: list[Sample]) -> None:
        self.buffer.extend(samples)

    def buffer_filter(self, args, buffer, num_samples) -> list[Sample]:
        return sorted(buffer, key=lambda sample: sample.reward, reverse=True)[:num_samples]


# --custom-reward-post-process-path


def centre(args, samples):
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [reward - mean for reward in raw]


# Hooks of Megatron


def megatron_init(args):
    CALLS.append(("init", args.seed))


def before_log_prob(args, model, store_prefix):
    CALLS.append(("log_prob", model, store_prefix))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    CALLS.append(("train_step", rollout_id, step_id, model, optimizer))


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    return pre_process, post_process


def provider_of_another_form(config):
    return config
