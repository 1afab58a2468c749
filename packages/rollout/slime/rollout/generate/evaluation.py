"""Evaluation: generates and scores n samples for every prompt of a set, and stores nothing."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.calls.outputs import RolloutFnEvalOutput, flatten
from slime.rollout.generate.group import finish_group, generate_batch, generate_group, needs_single_calls
from slime.rollout.generate.sample import TOO_LONG, UNUSABLE, refusal
from slime.rollout.generate.state import RolloutState, eval_sampling_params, state_of
from slime.rollout.rewards.score import check, reward_key, scores_by_group
from slime.rollout.settings.eval_overrides import set_args
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.sources import EvaluationSource
from slime.types import Sample
from slime.types.errors import DeadlineExceeded, InvalidField, InvalidSetting, SlimeError

log = logging.getLogger(__name__)

# Samples per request. The number is fixed, so that two runs make the same batches.
REQUEST_SAMPLES = 128


async def eval_rollout(args: RolloutArgs, rollout_id: int, data_source: EvaluationSource) -> RolloutFnEvalOutput:
    """Evaluates all sets of `data_source`. Two evaluations of the same weights draw the same samples: seeds depend on
    the position in the set alone."""
    return await evaluate(state_of(args), data_source)


async def evaluate(state: RolloutState, source: EvaluationSource) -> RolloutFnEvalOutput:
    """Does the work of `eval_rollout` with the settings and plug-ins of `state`."""
    return await state.fleet.guard(_evaluate(state, source, CALL.get()))


async def _evaluate(state: RolloutState, source: EvaluationSource, call: RolloutCall | None) -> RolloutFnEvalOutput:
    states = {name: state.with_args(set_args(state.args, name)) for name in source.names}
    sets = {name: await asyncio.to_thread(_read, states[name], source, name) for name in source.names}
    output = RolloutFnEvalOutput(metrics={})
    for name, groups in sets.items():
        set_state = states[name]
        kept, refused = await _usable(set_state, name, groups)
        if set_state.args.eval_max_prompt_len is not None:
            refused.setdefault(TOO_LONG, 0)
        output.metrics |= {f"eval/{name}-{reason}": count for reason, count in refused.items()}  # type: ignore[operator]
        sets[name] = kept
        _check_number(name, sum(map(len, kept)), getattr(set_state.args, "eval_min_samples", None))
    if call is not None:
        call.total = sum(len(group) for groups in sets.values() for group in groups)
        call.advance(0)
    for name, groups in sets.items():
        set_state = states[name]
        samples = await evaluate_groups(set_state, groups, eval_sampling_params(set_state.args), call)
        key = reward_key(set_state.args, True)
        output.data[name] = {
            "rewards": [_reward(name, sample, key) for sample in samples],
            "truncated": [sample.status is Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    return output


def _read(state: RolloutState, source: EvaluationSource, name: str) -> list[list[Sample]]:
    """Reads a set, with the metadata that --eval-config gives it, rendered by its own settings."""
    overrides = getattr(state.args, "eval_metadata_overrides", None) or {}

    def render(samples: Iterable[Sample]) -> None:
        samples = list(samples)
        for sample in samples:
            sample.metadata = sample.metadata | overrides
        try:
            state.prompts.render(samples)
        except (InvalidField, DeadlineExceeded):
            # `_usable` meets it again and leaves the prompt out; a custom function would get it as it is.
            if state.plugins.generate is not None:
                raise

    return source.read(name, state.args.n_samples_per_eval_prompt, render)


def _check_number(name: str, number: int, least: int | None) -> None:
    if least is not None and number < least:
        raise InvalidSetting.must_be(
            f"--eval-config {name}.min_eval_samples", f"at most {number}, the samples of the set", got=least
        )


def _reward(name: str, sample: Sample, key: str | None) -> float:
    """Returns the reward of a sample. Raises InvalidField if it is missing or not a finite number."""
    reward = check(sample.reward, sample, f"evaluation set {name}", key)
    return float(reward[key] if isinstance(reward, dict) else reward)


async def _usable(
    state: RolloutState, name: str, groups: list[list[Sample]]
) -> tuple[list[list[Sample]], dict[str, int]]:
    """Returns the groups whose prompts can be used, and the number of the others by reason.

    Raises the error of the last prompt if none of them can be used for a reason other than --eval-max-prompt-len.
    """
    limit, context = state.args.eval_max_prompt_len, state.args.eval_max_context_len or state.context_len
    kept, refused = list[list[Sample]](), Counter[str]()
    error: SlimeError | None = None
    for group in groups:
        found = await refusal(state, group[0], limit, context)
        if found is None:
            kept.append(group)
            continue
        reason, error = found
        refused[reason] += 1
        if reason == UNUSABLE or limit is None:
            log.error("prompt %s of evaluation set %s is left out: %s", group[0].group_index, name, error)
    if error is not None and not kept and (limit is None or refused[UNUSABLE]):
        message = f"evaluation set {name}: no prompt can be used; the last: {error}"
        raise type(error).restore(message, field=error.field, value=error.value, expected=error.expected)
    return kept, dict(refused)


async def evaluate_groups(
    state: RolloutState, groups: list[list[Sample]], params: dict[str, Any], call: RolloutCall | None = None
) -> list[Sample]:
    """Returns the samples of a set, generated with the sampling parameters `params` and scored, sorted by index."""
    if needs_single_calls(state, flatten(groups)):
        done = await asyncio.gather(*(_evaluate_group(state, group, params, call) for group in groups))
        samples = flatten(done)
    else:
        samples = flatten(groups)
        await asyncio.gather(
            *(
                _evaluate_chunk(state, samples[i : i + REQUEST_SAMPLES], params, call)
                for i in range(0, len(samples), REQUEST_SAMPLES)
            )
        )
        if scores_by_group(state.args, True):
            await asyncio.gather(*(finish_group(state, group, evaluation=True) for group in groups))
    return sorted(samples, key=lambda sample: sample.index or 0)


async def _evaluate_group(
    state: RolloutState, group: list[Sample], params: dict[str, Any], call: RolloutCall | None
) -> list[Any]:
    generated = await generate_group(state, state.args, group, params, evaluation=True)
    _advance(call, len(group))
    return generated


async def _evaluate_chunk(
    state: RolloutState, samples: list[Sample], params: dict[str, Any], call: RolloutCall | None
) -> None:
    await generate_batch(state, samples, params, evaluation=True)
    if not scores_by_group(state.args, True):
        await finish_group(state, samples, evaluation=True)
    _advance(call, len(samples))


def _advance(call: RolloutCall | None, samples: int) -> None:
    if call is not None:
        call.advance(samples)
