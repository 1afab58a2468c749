"""Scores samples, and refuses rewards that are not finite numbers."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
import numbers
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from slime.rollout.plugins import maybe_await
from slime.rollout.rewards.registry import reward_function
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, SlimeError, counted
from slime.types.plugins import load_plugin

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

log = logging.getLogger(__name__)

# Name of the function for several samples in a file that also has a function for one sample.
BATCHED = ("batched_custom_rm",)


async def async_rm(args: RolloutArgs, sample: Sample, **kwargs: Any) -> Any:
    """Returns the reward of one sample: a number, or a dict."""
    function, _ = choose(args, sample)
    return await maybe_await(function, args, sample, **kwargs)


async def batched_async_rm(args: RolloutArgs, samples: list[Sample], **kwargs: Any) -> list[Any]:
    """Returns the rewards of several samples, in order; `--custom-rm-path` gets them all at once."""
    if args.custom_rm_path:
        return await maybe_await(_reward_at(args.custom_rm_path, BATCHED), args, samples, **kwargs)
    return list(await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples)))


async def score_sample(args: RolloutArgs, sample: Sample, *, evaluation: bool = False) -> None:
    """Sets `sample.reward`. Raises InvalidField, naming sample and function, for a reward that is not a finite
    number."""
    function, name = choose(args, sample)
    with _naming(name, f"sample {sample.index}"):
        reward = await maybe_await(function, args, sample)
    _set(args, sample, reward, name, evaluation, _place(function))


async def score_group(args: RolloutArgs, samples: list[Sample], *, evaluation: bool = False) -> None:
    """Sets the rewards of samples that are scored together. Raises InvalidField, also for a wrong number of rewards."""
    if not samples:
        return
    name = args.custom_rm_path or args.rm_type or "reward"
    with _naming(name, f"group {samples[0].group_index}"):
        rewards = await batched_async_rm(args, samples)
    place = _place(_reward_at(args.custom_rm_path, BATCHED)) if args.custom_rm_path else ""
    if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
        got = counted(len(rewards), "reward") if isinstance(rewards, (list, tuple)) else _shown(rewards)[:80]
        expected = f"a list of {counted(len(samples), 'reward')}, one for each sample"
        message = f"{name} returned {got}, expected {expected} of group {samples[0].group_index}{place}"
        raise InvalidField("reward", got, expected, message)
    for sample, reward in zip(samples, rewards, strict=True):
        _set(args, sample, reward, name, evaluation, place)


def apply_overlong_rules(args: RolloutArgs, samples: Iterable[Sample], name: str, evaluation: bool) -> None:
    """Applies DAPO's rules to samples that came with their reward from the function `name`, in training.

    Raises InvalidField, naming sample and function, for a reward that is not a finite number.
    """
    if evaluation or (getattr(args, "overlong_buffer_len", None) is None and not getattr(args, "overlong_mask", False)):
        return
    for sample in samples:
        if sample.reward is not None and sample.status is not Sample.Status.ABORTED:
            _set(args, sample, sample.reward, name, evaluation)


def _set(args: RolloutArgs, sample: Sample, reward: Any, name: str, evaluation: bool, place: str = "") -> None:
    key = reward_key(args, evaluation)
    sample.reward = check(reward, sample, name, key, place)
    if not evaluation:
        _shorten(args, sample, key)


def overlong_penalty(length: int, limit: int, buffer: int, largest: float) -> float:
    """Returns DAPO's penalty for a response of `length` tokens (limit, buffer: tokens too), from -`largest` to 0.

        largest * min(0, (limit - buffer - length) / buffer)    at least -largest

    Source: arXiv 2503.14476, equation 13.
    """
    return largest * max(-1.0, min(0.0, (limit - buffer - length) / buffer))


def _shorten(args: RolloutArgs, sample: Sample, key: str | None) -> None:
    """Applies DAPO's rules for long responses. metadata["raw_reward"] keeps the reward without penalty for metrics.

    key: the entry of a dict reward that is the reward.
    """
    if getattr(args, "overlong_mask", False) and sample.status is Sample.Status.TRUNCATED:
        sample.remove_sample = True
    buffer = getattr(args, "overlong_buffer_len", None)
    if buffer is None:
        return
    penalty = overlong_penalty(sample.response_length, args.rollout_max_response_len, buffer, args.overlong_penalty)
    if not penalty:
        return
    if isinstance(sample.reward, dict):
        assert key is not None
        sample.metadata.setdefault("raw_reward", float(sample.reward[key]))
        sample.reward = sample.reward | {key: sample.reward[key] + penalty}
    elif sample.reward is not None:
        sample.metadata.setdefault("raw_reward", sample.reward)
        sample.reward += penalty


def scores_by_group(args: RolloutArgs, evaluation: bool) -> bool:
    """Returns whether a group's samples are scored in one call: with `--group-rm`, but in evaluation only if the user's
    file has no function for a single sample."""
    if not args.group_rm or not evaluation:
        return bool(args.group_rm)
    if not args.custom_rm_path:
        return False
    return _reward_at(args.custom_rm_path, BATCHED) is _reward_at(args.custom_rm_path)


def reward_key(args: RolloutArgs, evaluation: bool) -> str | None:
    return (getattr(args, "eval_reward_key", None) if evaluation else None) or getattr(args, "reward_key", None)


def choose(args: RolloutArgs, sample: Sample) -> tuple[Callable[..., Any], str]:
    """Returns the function that scores a sample, and its name for messages."""
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        return _reward_at(path), path
    rm_type = sample.metadata.get("rm_type") or args.rm_type
    if not rm_type:
        raise InvalidSetting.required(
            "--rm-type", f"sample {sample.index} names no reward function, and neither does --custom-rm-path"
        )
    return reward_function(str(rm_type).strip()), str(rm_type)


def check(reward: Any, sample: Sample, name: str, key: str | None, place: str = "") -> Any:
    """Returns the reward as a float, or the dict whose entry `key` is the reward. Raises InvalidField for others.

    name, place: of the reward function, for errors.
    """
    value, returned = reward, f"{name} returned {_shown(reward):.200} for sample {sample.index}"
    if isinstance(reward, dict):
        if key is None:
            needed = "--reward-key NAME, the entry that is the reward"
            raise InvalidField("reward", sorted(reward), needed, f"{returned}: a dict requires {needed}{place}")
        if key not in reward:
            raise InvalidField(
                "reward", sorted(reward), f"the key {key!r}", f"{returned}: no {key!r}, the --reward-key{place}"
            )
        value = reward[key]
    elif key is not None:
        message = f"{returned}: --reward-key {key} requires a dict with that key{place}"
        raise InvalidField("reward", _shown(reward), "a dict", message)
    if not _is_finite(value):
        raise InvalidField("reward", _shown(value), "a finite number", f"{returned}, expected a finite number{place}")
    return reward if isinstance(reward, dict) else float(value)


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float holds
        return False


@contextmanager
def _naming(name: str, scored: str) -> Iterator[None]:
    """Turns what a reward function raises into InvalidField that names the function and the line in the user's code.

    Errors of slime's own, such as that of a reward model that cannot be reached, stay as they are. scored: the sample
    or group that was scored.
    """
    try:
        yield
    except SlimeError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError) and _is_cancelled():
            raise
        # Imports gRPC, which the checks of flags do without.
        from slime.types.rpc.status import place_in_plugin

        log.exception("%s failed", name)
        # Python turns a StopIteration of a coroutine into this error, without its place.
        stopped = isinstance(error.__cause__, StopIteration)
        place = place_in_plugin(error.__cause__ if stopped and error.__cause__ is not None else error)
        raised = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise InvalidField("reward", raised, "a reward", f"{name} raised {raised}{place} for {scored}") from error


def _is_cancelled() -> bool:
    # A function of its own: the task, as a local of a frame of its error, would be a cycle, which keeps the samples.
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _place(function: Callable[..., Any]) -> str:
    """Returns ` (FILE, line N)`, where a function is defined; nothing for those of slime."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or getattr(function, "__module__", "").startswith("slime."):
        return ""
    return f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # of the user's class
        return f"a {type(value).__name__}, whose repr raised {type(error).__name__}"


@functools.cache
def _reward_at(path: str, names: tuple[str, ...] = ()) -> Callable[..., Any]:
    """Loads and checks the function at `path`, once. names: see `load_plugin`."""
    return load_plugin(path, flag="--custom-rm-path", names=names)
