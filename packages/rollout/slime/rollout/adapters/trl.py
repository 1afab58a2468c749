"""Reward functions of TRL, `reward_func(prompts, completions, **columns)`, for `--custom-rm-path` with `--group-rm`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.plugins import maybe_await
from slime.types import Sample
from slime.types.errors import InvalidField, counted

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def trl_reward(
    *functions: Callable[..., Any], weights: Sequence[float] | None = None
) -> Callable[..., Awaitable[list[float]]]:
    """Returns the weighted sum of TRL's reward functions as a function of a group's samples.

    A prompt is a list of messages where the data has messages or `--apply-chat-template` made some of it, and text
    otherwise; the completion has the same form. Columns are the keys of the samples' metadata and the label, as `label`
    and under the name of `--label-key`. None, TRL's word for "not applicable", adds nothing.
    """
    if weights is not None and len(weights) != len(functions):
        raise InvalidField("weights", weights, f"{counted(len(functions), 'number')}, one for each function")
    factors = [1.0] * len(functions) if weights is None else list(weights)

    async def score(args: RolloutArgs, samples: list[Sample], **kwargs: Any) -> list[float]:
        arguments = _arguments(args, samples)
        columns = [await _rewards(function, arguments, len(samples)) for function in functions]
        totals = []
        for sample, row in zip(samples, zip(*columns, strict=True), strict=True):
            parts = [factor * reward for factor, reward in zip(factors, row, strict=True) if reward is not None]
            if not parts:
                raise InvalidField("reward", None, "a number from at least one reward function", _nobody(sample))
            totals.append(float(sum(parts)))
        return totals

    return score


def _arguments(args: RolloutArgs, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    messages = [
        getattr(sample, "prompt_messages", None) or (sample.prompt if isinstance(sample.prompt, list) else None)
        for sample in samples
    ]
    columns: dict[str, list[Any]] = {
        name: [sample.metadata.get(name) for sample in samples]
        for name in dict.fromkeys(key for sample in samples for key in sample.metadata)
    }
    for name in dict.fromkeys(("label", getattr(args, "label_key", None) or "label")):
        columns[name] = [sample.label for sample in samples]
    return columns | {
        "prompts": [chat or sample.prompt for chat, sample in zip(messages, samples, strict=True)],
        "completions": [
            [{"role": "assistant", "content": sample.response}] if chat else sample.response
            for chat, sample in zip(messages, samples, strict=True)
        ],
        "completion_ids": [list(s.tokens[len(s.tokens) - s.response_length :]) for s in samples],
    }


async def _rewards(function: Callable[..., Any], arguments: dict[str, list[Any]], count: int) -> list[Any]:
    parameters = inspect.signature(function).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        arguments = {name: value for name, value in arguments.items() if name in parameters}
    rewards = await maybe_await(function, **arguments)
    is_list = isinstance(rewards, Sequence) and not isinstance(rewards, str)
    if not is_list or len(rewards) != count:
        name = getattr(function, "__name__", repr(function))
        got = counted(len(rewards), "reward") if is_list else repr(rewards)[:80]
        raise InvalidField("reward", got, f"{count} rewards", f"{name} returned {got}, expected a list of {count}")
    return list(rewards)


def _nobody(sample: Sample) -> str:
    return f"every reward function returned None for sample {sample.index}, expected a number of at least one"
