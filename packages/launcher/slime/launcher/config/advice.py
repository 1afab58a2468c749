"""Warns about settings of a run that are valid and probably not what was meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from slime.launcher.config.check_loop import staleness_bound
from slime.launcher.config.derived import other_defaults
from slime.rollout.generate.prompts import context_length
from slime.trainer.settings import checks as trainer
from slime.types.setting_values import flag_name

if TYPE_CHECKING:
    from slime.launcher.config.run_config import RunConfig


def advice(config: RunConfig, *, asynchronous: bool = False) -> Iterator[str]:
    """Yields a sentence for each doubt."""
    if not config.launcher.debug_rollout_only:
        on_time = config.launcher.fully_async and staleness_bound(config.flat) == 0
        yield from trainer.advice(config.trainer, asynchronous=asynchronous and not on_time)
        yield from other_defaults(config.trainer, config.explicit)
    if not config.launcher.debug_train_only:
        yield from _lengths(config)


def _lengths(config: RunConfig) -> Iterator[str]:
    """Yields limits of a response that the context is too short for."""
    rollout = config.rollout
    if rollout.sglang_args.keys() & {"context_length", "json_model_override_args"}:
        return  # the engines have another context than config.json says
    try:
        model = context_length(rollout.hf_checkpoint)
    except (ValueError, AttributeError):
        return  # whoever needs the whole config says what is wrong with it
    for phase in ("rollout", "eval"):
        name = f"{phase}_max_response_len"
        length, limit, allows = config.explicit.get(name), model, f"--hf-checkpoint {rollout.hf_checkpoint}"
        for limit_name in (f"{phase}_max_context_len", "rollout_max_context_len"):
            if getattr(rollout, limit_name):
                limit, allows = getattr(rollout, limit_name), flag_name(limit_name)
                break
        if isinstance(length, int) and limit is not None and length > limit:
            yield (
                f"{flag_name(name)} {length} exceeds the {limit} tokens that {allows} allows for prompt and response "
                "together: responses end there"
            )
