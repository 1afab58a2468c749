"""Compatibility: `slime.rollout.sample_hooks`, the functions of `--rollout-sample-hook-path` for plug-ins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.rollout.calls.call import CALL
from slime.rollout.plugins import maybe_await
from slime.types import Sample
from slime.types.plugin_contracts import accepted
from slime.types.plugins import load_plugin

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

__all__ = ["apply_rollout_sample_hooks", "set_current_rollout_id"]

FLAG = "--rollout-sample-hook-path"
_ROLLOUT_ID: list[int | None] = [None]


def set_current_rollout_id(rollout_id: int | None) -> None:
    """Sets the `rollout_id` that hooks get outside a rollout of the service."""
    _ROLLOUT_ID[0] = rollout_id


async def apply_rollout_sample_hooks(args: RolloutArgs, value: Any, **kwargs: Any) -> Any:
    """Returns a sample, or lists of samples of the same shape, as the hooks left or replaced them.

    kwargs: passed to a hook that takes them; `rollout_id` is that of the running rollout unless it is given.
    Raises TypeError for a value that is not a sample, and for a hook that returns neither a Sample nor None.
    """
    hooks = [load_plugin(path, flag=FLAG) for path in getattr(args, "rollout_sample_hook_path", None) or ()]
    call = CALL.get()
    kwargs.setdefault("rollout_id", _ROLLOUT_ID[0] if call is None else call.rollout_id)
    return await _apply(args, value, hooks, kwargs) if hooks else value


async def _apply(args: RolloutArgs, value: Any, hooks: list[Any], keywords: dict[str, Any]) -> Any:
    if isinstance(value, list):
        return [await _apply(args, item, hooks, keywords) for item in value]
    for hook in hooks:
        if not isinstance(value, Sample):
            raise TypeError(f"{FLAG}: got {type(value).__name__}, expected a Sample or a list")
        answer = await maybe_await(hook, args, value, **accepted(hook, keywords))
        if answer is not None and not isinstance(answer, Sample):
            raise TypeError(f"{FLAG}: the hook answered {type(answer).__name__}, expected Sample or None")
        value = value if answer is None else answer
    return value
