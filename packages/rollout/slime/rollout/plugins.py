"""The user's functions, loaded and checked when the program starts, and called in the shape that they have."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from slime.types import Sample
from slime.types.errors import PluginError
from slime.types.plugins import load_plugin

HOOK_KEYWORDS = ("rollout_id", "evaluation")


class RolloutPlugins:
    """One attribute a flag; None where it was not given. args: settings, or a namespace with their names.

    Raises PluginError naming the flag.
    """

    def __init__(self, args: Any) -> None:
        def load(name: str, *parameters: str) -> Callable[..., Any] | None:
            path = getattr(args, name, None)
            return load_plugin(path, flag="--" + name.replace("_", "-"), parameters=parameters) if path else None

        self.generate = _load_generate(getattr(args, "custom_generate_function_path", None))
        self.reward = load("custom_rm_path", "args", "sample")
        self.dynamic_filter = load("dynamic_sampling_filter_path", "args", "group")
        self.sample_filter = load("rollout_sample_filter_path", "args", "groups")
        self.all_samples_process = load("rollout_all_samples_process_path", "args", "groups", "get_samples")
        self.rollout_log = load(
            "custom_rollout_log_function_path", "rollout_id", "args", "samples", "metrics", "seconds"
        )
        self.eval_log = load("custom_eval_rollout_log_function_path", "rollout_id", "args", "data", "metrics")
        self.sample_hooks = [_load_hook(path) for path in getattr(args, "rollout_sample_hook_path", [])]


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
        if not variadic and not 2 <= len(positional):
            raise PluginError(
                f"--custom-generate-function-path {path}: takes ({', '.join(names)}), "
                "expected (args, sample, sampling_params) or (args, samples, evaluation=False)",
                field="--custom-generate-function-path",
                value=path,
            )

    async def one(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool
    ) -> Sample | list[Sample]:
        keywords = {"evaluation": evaluation} if self.takes_evaluation else {}
        if self.whole_group:
            return await self._answer([sample], keywords, args)
        answer = await maybe_await(self.function, args, sample, sampling_params, **keywords)
        self._check(answer)
        return answer

    async def group(self, args: Any, samples: list[Sample], evaluation: bool) -> list[Sample]:
        return await self._answer(samples, {"evaluation": evaluation} if self.takes_evaluation else {}, args)

    async def _answer(self, samples: list[Sample], keywords: dict[str, Any], args: Any) -> list[Sample]:
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


def _load_hook(path: str) -> Callable[..., Any]:
    """Contract: `fn(args, sample[, rollout_id=][, evaluation=])`."""
    flag = "--rollout-sample-hook-path"
    keywords = accepted(load_plugin(path, flag=flag), dict.fromkeys(HOOK_KEYWORDS))
    return load_plugin(path, flag=flag, parameters=("args", "sample"), keywords=tuple(keywords))


def _load_generate(path: str | None) -> CustomGenerate | None:
    return load_generate(path) if path else None


def load_generate(path: str) -> CustomGenerate:
    return CustomGenerate(load_plugin(path, flag="--custom-generate-function-path", parameters=()), path)


async def maybe_await(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Awaits an async function; runs any other in a thread, so that it may take its time."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    answer = await asyncio.to_thread(function, *args, **kwargs)
    return await answer if inspect.isawaitable(answer) else answer


def accepted(function: Callable[..., Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Those of `keywords` that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return keywords
    return {name: value for name, value in keywords.items() if name in parameters}
