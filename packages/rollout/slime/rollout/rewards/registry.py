"""The built-in rewards by name; each lives in a module of its own and is imported when it is first used."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.rollout.rewards.base import RewardFunction
from slime.rollout.rewards.boxed import score_boxed
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

BUILT_IN = {
    "math": "slime.rollout.rewards.built_in.math.pool:reward",
    "reasoning_gym": "slime.rollout.rewards.built_in.reasoning_gym:reward",
    "integer": "slime.rollout.rewards.built_in.integer:reward",
    "exact_partial": "slime.rollout.rewards.built_in.exact_partial:reward",
    "random": "slime.rollout.rewards.built_in.random:reward",
    "deepscaler": "slime.rollout.rewards.built_in.deepscaler:reward",
    "dapo": "slime.rollout.rewards.built_in.dapo:reward",
    "f1": "slime.rollout.rewards.built_in.f1:reward",
    "gpqa": "slime.rollout.rewards.built_in.gpqa:reward",
    "ifbench": "slime.rollout.rewards.built_in.ifbench:reward",
    "remote_rm": "slime.rollout.rewards.built_in.remote:remote_rm",
}
# Rewards that return, or may return, a dict of numbers.
DICTS = ("dapo", "remote_rm")
# Rewards that need packages of their own: `require` in their modules raises NotAvailable without them.
OPTIONAL = ("ifbench", "reasoning_gym")
# Rewards that compare the response with the label.
LABELLED = ("math", "deepscaler", "dapo", "f1", "gpqa", "integer", "exact_partial")
BOXED = "boxed_"


@functools.cache
def reward_function(rm_type: str) -> RewardFunction:
    """Returns the function of a name; `boxed_NAME` scores the content of the last \\boxed{}.

    Raises what `check_name` raises.
    """
    name = check_name(rm_type)
    if rm_type.replace("-", "_").startswith(BOXED):
        return score_boxed(reward_function(name))
    module_name, attribute = BUILT_IN[name].split(":")
    module = importlib.import_module(module_name)
    if name in OPTIONAL:
        module.require()
    function = getattr(module, attribute)
    function = function if inspect.iscoroutinefunction(function) else _as_async(function)
    return _labelled(function, name) if name in LABELLED else function


def check_name(rm_type: str) -> str:
    """Returns the name of a built-in reward, without `boxed_`; imports nothing.

    Raises InvalidSetting naming the nearest name.
    """
    name = rm_type.replace("-", "_").removeprefix(BOXED)
    if name not in BUILT_IN:
        prefix = BOXED if rm_type.replace("-", "_").startswith(BOXED) else ""
        known = [prefix + each for each in BUILT_IN] + ([] if prefix else [f"{BOXED}NAME"])
        raise InvalidSetting.unknown("reward function", rm_type[:100], known, field="--rm-type")
    return name


def may_return_dict(rm_type: str) -> bool:
    """Returns whether a built-in reward may be a dict, of which --reward-key names one entry; imports nothing."""
    return check_name(rm_type) in DICTS


def needs_label(rm_type: str) -> bool:
    """Returns whether a name is that of a built-in reward that compares with the label; imports nothing."""
    return rm_type.strip().replace("-", "_").removeprefix(BOXED) in LABELLED


def _as_async(function: Callable[[Any, Sample], Any]) -> RewardFunction:
    @functools.wraps(function)
    async def score(args: RolloutArgs, sample: Sample) -> Any:
        return function(args, sample)

    return score


def _labelled(function: RewardFunction, name: str) -> RewardFunction:
    @functools.wraps(function)
    async def score(args: RolloutArgs, sample: Sample) -> Any:
        if sample.label is None:
            raise InvalidField(
                "label",
                None,
                "a label",
                f"sample {sample.index} (group {sample.group_index}) has no label, and --rm-type {name} compares with "
                "it: name its column with --label-key, or set it in the data source",
            )
        return await function(args, sample)

    return score
