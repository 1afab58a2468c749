"""Plug-ins in the ways in which the original's examples are written: their imports and idioms, on the tiny task."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import torch

from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp
from slime.rollout.base_types import RolloutFnTrainOutput
from slime.rollout.filter_hub.base_types import MetricGatherer, call_dynamic_filter, should_drop_dynamic_filter_output
from slime.rollout.rm_hub import batched_async_rm, grade_answer_verl
from slime.rollout.rm_hub.math_dapo_utils import compute_score as math_dapo_compute_score
from slime.rollout.rm_hub.math_utils import extract_answer as extract_boxed_answer
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.http_utils import get_rollout_num_engines, post
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.processing_utils import encode_image_for_rollout_engine
from slime.utils.types import Sample

# A search engine between turns, as search-r1 has it.


class Searcher(metaclass=SingletonMeta):
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.semaphore = asyncio.Semaphore(2)

    async def search(self, question: str) -> str:
        async with self.semaphore:
            self.asked.append(question)
            return "00>"


async def generate_with_search(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    assert not args.partial_rollout, "partial rollouts are not for conversations"
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_tokens_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, response_token_ids, loss_mask, rollout_log_probs = "", [], [], []
    output: dict[str, Any] = {}
    for turn in range(2):
        payload = {
            "input_ids": prompt_tokens_ids + response_token_ids,
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        output = await post(url, payload)
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        new = output["meta_info"]["output_token_logprobs"]
        response += output["text"]
        response_token_ids += [item[1] for item in new]
        rollout_log_probs += [item[0] for item in new]
        loss_mask += [1] * len(new)
        if turn == 1:
            break
        found = await Searcher().search(response)
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        response += found
        response_token_ids += found_ids
        rollout_log_probs += [0.0] * len(found_ids)
        loss_mask += [0] * len(found_ids)
    assert sum(loss_mask) == len(loss_mask) - 3
    sample.tokens = prompt_tokens_ids + response_token_ids
    sample.response_length = len(response_token_ids)
    sample.response = response
    sample.loss_mask = loss_mask
    sample.rollout_log_probs = rollout_log_probs
    match output["meta_info"]["finish_reason"]["type"]:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_of_search(args: Any, sample: Sample, **kwargs: Any) -> float:
    if not isinstance(sample, Sample):
        raise TypeError("Sample must be an instance of Sample class.")
    text = sample.prompt + sample.response
    return 1.0 if text.startswith(sample.label[::-1] + ">" + sample.label) else 0.1


# A boxed answer, as retool scores it.


async def reward_of_tools(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    solution_str = sample.prompt + "\\boxed{" + sample.response + "}"
    ground_truth = sample.label if sample.label is not None else ""
    result = math_dapo_compute_score(solution_str, ground_truth, strict_box_verify=True)
    turns = sample.metadata.get("turns", 0)
    if result["score"] < 0:
        result["score"] = min(-0.6, result["score"] + turns / 2 * 0.1)
    return result


# Several solvers of one prompt, as multi_agent has them.


async def solve(args: Any, sample: Sample, number: int) -> Sample:
    own = copy.deepcopy(args)
    own.rollout_max_response_len = 4
    state = GenerateState(own)
    params = {**own.sampling_params, "max_new_tokens": own.rollout_max_response_len}
    url = f"http://{own.sglang_router_ip}:{own.sglang_router_port}/generate"
    ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    output = await post(url, {"input_ids": ids, "sampling_params": params, "return_logprob": True})
    solved = copy.deepcopy(sample)
    new = output["meta_info"]["output_token_logprobs"]
    solved.tokens = ids + [item[1] for item in new]
    solved.response_length = len(new)
    solved.rollout_log_probs = [item[0] for item in new]
    solved.response = output["text"]
    solved.status = Sample.Status.COMPLETED
    solved.metadata["solver"] = number
    return solved


async def generate_with_multi_agents(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    args.sampling_params = sampling_params
    function = load_function("example_plugins.solve")
    solved = await asyncio.gather(*(function(args, sample, number) for number in range(3)))
    rewards = await batched_async_rm(args, list(solved))
    for each, reward in zip(solved, rewards, strict=True):
        each.reward = reward
    random.shuffle(solved)
    return solved


# Sequence weights for the mismatch of engine and trainer, as train_infer_mismatch_helper has them.


def compute_mis_weights_with_cp(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    total_lengths: list[int],
    response_lengths: list[int],
    **kwargs: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    lengths = list(zip(total_lengths, response_lengths, strict=True))
    whole_train = [all_gather_with_cp(values, *both) for values, both in zip(train_log_probs, lengths, strict=True)]
    whole_rollout = [all_gather_with_cp(values, *both) for values, both in zip(rollout_log_probs, lengths, strict=True)]
    weights = [
        torch.exp(((train - rollout) * mask).sum() / mask.sum().clamp(min=1)).clamp(max=2.0).expand_as(train)
        for train, rollout, mask in zip(whole_train, whole_rollout, loss_masks, strict=True)
    ]
    cut = torch.cat([slice_log_prob_with_cp(values, *both) for values, both in zip(weights, lengths, strict=True)])
    return pg_loss * cut, loss_masks, {"mis_weight": cut}


# Pictures and boxed answers, as geo3k_vlm_multi_turn has them.


async def reward_of_geometry(args: Any, sample: Sample, **kwargs: Any) -> float:
    boxed = f"\\boxed{{{sample.response}}}"
    assert extract_boxed_answer(boxed) == sample.response
    assert callable(encode_image_for_rollout_engine)
    return 1.0 if grade_answer_verl(boxed, sample.label) else 0.0


# A rollout function with the main loop of the default one.


def generate_rollout_with_tasks(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    assert not evaluation
    assert get_rollout_num_engines(args) == 1 and args.sglang_model_routers["default"][1] == args.sglang_router_port
    assert [each.name for each in args.eval_datasets] == [] and not args.ci_test and args.sglang_dp_size == 1
    assert args.use_slime_router is False

    async def collect() -> RolloutFnTrainOutput:
        state, gatherer, data = GenerateState(args), MetricGatherer(), []
        state.reset()
        keep = load_function("example_plugins.drop_odd") if args.rollout_batch_size > 1 else None
        while len(data) < args.rollout_batch_size:
            while state.remaining_batch_size < args.rollout_batch_size:
                state.submit_generate_tasks(data_source.get_samples(args.over_sampling_batch_size))
            done, state.pendings = await asyncio.wait(state.pendings, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                group = task.result()
                with state.dp_rank_context() as rank:
                    assert (rank, state.dp_counts) == (0, [1])
                verdict = call_dynamic_filter(keep, args, group)
                counts = {
                    "remaining_batch_size": state.remaining_batch_size, "target_data_size": args.rollout_batch_size,
                }  # fmt: skip
                if should_drop_dynamic_filter_output(verdict, **counts):
                    gatherer.on_dynamic_filter_drop(verdict.reason)
                    state.remaining_batch_size -= 1
                elif len(data) < args.rollout_batch_size:
                    data.append(group)
        state.aborted = True
        await asyncio.gather(*state.pendings)
        state.reset()
        return RolloutFnTrainOutput(samples=sorted(data, key=lambda group: group[0].index), metrics=gatherer.collect())

    return run(collect())


def drop_odd(args: Any, group: list[Sample], **kwargs: Any) -> Any:
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    odd = group[0].group_index % 2 == 1
    return DynamicFilterOutput(keep=not odd, reason="odd" if odd else None)


# A reward that looks at what an evaluation set says of its samples.

SEEN: list[tuple[str, bool, Any]] = []


async def reward_that_looks(args: Any, sample: Sample, **kwargs: Any) -> float:
    SEEN.append((sample.prompt, hasattr(sample, "prompt_messages"), sample.metadata.get("difficulty")))
    return 1.0
