"""The user's functions: loaded and checked at the start, and called with the parameters that they declare."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.types import Sample
from slime.types.errors import PluginError
from slime.types.plugins import load_plugin, load_setting

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs
    from slime.rollout.settings.rollout import RolloutSettings


class RolloutPlugins:
    """The user's functions, one attribute per flag; None for a flag that is not given.

    Raises PluginError, naming the flag, for a path that leads to no fitting function.
    """

    def __init__(self, args: RolloutSettings) -> None:
        path = getattr(args, "custom_generate_function_path", None)
        self.generate = load_generate(path) if path else None
        self.agent = load_setting(args, "custom_agent_path")
        self.reward = load_setting(args, "custom_rm_path")
        self.dynamic_filter = load_setting(args, "dynamic_sampling_filter_path")
        self.sample_filter = load_setting(args, "rollout_sample_filter_path")
        self.all_samples_process = load_setting(args, "rollout_all_samples_process_path")
        self.rollout_log = load_setting(args, "custom_rollout_log_function_path")
        self.eval_log = load_setting(args, "custom_eval_rollout_log_function_path")
        hooks = getattr(args, "rollout_sample_hook_path", [])
        self.sample_hooks = [load_plugin(path, flag="--rollout-sample-hook-path") for path in hooks]


class CustomGenerate:
    """Contract: `fn(args, sample, sampling_params[, evaluation=])` for one sample, answering a Sample or a list of
    them; or `fn(args, samples, evaluation=False)` for all samples of a group, answering a list."""

    def __init__(self, function: Callable[..., Any], path: str) -> None:
        self.function = function
        self.path = path
        parameters = list(inspect.signature(function).parameters.values())
        names = [parameter.name for parameter in parameters]
        self.takes_evaluation = "evaluation" in names
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "evaluation"
        ]
        variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        self.whole_group = len(positional) == 2 and not variadic

    async def one(
        self, args: RolloutArgs, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
    ) -> Sample | list[Sample]:
        keywords = {"evaluation": evaluation} if self.takes_evaluation else {}
        if self.whole_group:
            return await self._answer([sample], keywords, args)
        answer = await maybe_await(self.function, args, sample, sampling_params, **keywords)
        self._check(answer)
        return answer

    async def group(self, args: RolloutArgs, samples: list[Sample], evaluation: bool) -> list[Sample]:
        return await self._answer(samples, {"evaluation": evaluation} if self.takes_evaluation else {}, args)

    async def _answer(self, samples: list[Sample], keywords: dict[str, Any], args: RolloutArgs) -> list[Sample]:
        answer = await maybe_await(self.function, args, samples, **keywords)
        self._check(answer)
        return answer if isinstance(answer, list) else [answer]

    def _check(self, answer: Any) -> None:
        samples = answer if isinstance(answer, list) else [answer]
        if not samples or not all(isinstance(item, Sample) for item in samples):
            raise PluginError(
                f"--custom-generate-function-path {self.path}: answered {type(answer).__name__}, "
                "expected a Sample or a list of them",
                field="--custom-generate-function-path",
                value=type(answer).__name__,
                expected="a Sample or a list of them",
            )


def load_generate(path: str) -> CustomGenerate:
    return CustomGenerate(load_plugin(path, flag="--custom-generate-function-path"), path)


async def maybe_await(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Awaits an async function; runs any other in a thread, so that it does not block the event loop."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    answer = await asyncio.to_thread(_answer, function, *args, **kwargs)
    if isinstance(answer, _Raised):
        error = answer.error
        if isinstance(error, StopIteration):
            # No coroutine can raise it. It comes of `next(...)` without a default.
            raise RuntimeError("it raised StopIteration").with_traceback(error.__traceback__) from error
        raise error
    return await answer if inspect.isawaitable(answer) else answer


@dataclass(frozen=True)
class _Raised:
    """An error that no future of a thread brings back as it is: of a TimeoutError it makes a copy without its place,
    and for a StopIteration its caller waits for ever."""

    error: TimeoutError | StopIteration


def _answer(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (TimeoutError, StopIteration) as error:
        return _Raised(error)
