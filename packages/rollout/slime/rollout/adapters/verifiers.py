"""Environments of verifiers for `--custom-agent-path`: `vf.Environment` up to 0.3, `vf.Env` of `verifiers.v1` from 0.4.

An environment is an agent: it plays its turns through OpenAI's protocol, runs its tools, and scores the episode.
`prompts` writes its data set as prompt data, and `episodes` makes the agent.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable, RemoteError, counted
from slime.types.files import write_whole

Agent = Callable[..., Awaitable[float]]

# The key of the metadata that holds a row of the environment's data set, or the index and key of its task.
ROW = "verifiers"
# Errors of an episode that the model caused: the score that the rubric gives them is trained on.
MODEL_ERRORS = ("EmptyModelResponseError", "InvalidModelResponseError")


def prompts(make: Callable[[], Any], path: Path, *, count: int | None = None, evaluation: bool = False) -> None:
    """Writes the first `count` rows of the environment's data set, all by default, or those of its evaluation set.

    Raises InvalidField for a row that JSON cannot hold, InvalidSetting for a `vf.Env` with an endless task set and
    no `count`, or with `evaluation`: there, an evaluation set is a task set of its own.
    """
    player = _player(_made(make))
    lines = []
    for number, row in enumerate(player.rows(count, evaluation)):
        try:
            lines.append(json.dumps(row, allow_nan=False) + "\n")
        except (TypeError, ValueError) as error:
            raise InvalidField(f"row {number}", error, "a row that JSON can hold") from error
    write_whole(path, "".join(lines))


def episodes(make: Callable[[], Any]) -> Agent:
    """Returns an agent that plays an episode of the environment `make()` for each sample and returns its reward.

    The episodes of an environment share an event loop in a thread, as verifiers runs them. `sample.metadata` gets the
    environment's own metrics.

    Raises NotAvailable for another object and for several agents, InvalidSetting for rewards that need the whole group.
    """
    player, loop = _player(_made(make)), _Loop()

    async def agent(base_url: str, sample: Sample, api_key: str, model: str) -> float:
        if ROW not in sample.metadata:
            raise InvalidField("metadata", sorted(sample.metadata), f"the key {ROW!r}, as prompts() writes it")
        reward, metrics = await loop.run(player.play(sample.metadata[ROW], base_url, api_key, model))
        sample.metadata["verifiers_metrics"] = dict(metrics)
        return float(reward)

    return agent


class _Environment:
    """A `vf.Environment`: a data set, and a rubric that scores."""

    def __init__(self, environment: Any) -> None:
        if environment.requires_group_rollouts:
            name = type(environment).__name__
            raise InvalidSetting(
                f"the environment {name} scores the samples of a prompt together, and slime asks for one at a time; "
                "give a rubric whose functions score one completion",
                field="rubric", value=name, expected="functions of one completion",
            )  # fmt: skip
        self._environment = environment

    def rows(self, count: int | None, evaluation: bool) -> Iterator[dict[str, Any]]:
        read = self._environment.get_eval_dataset if evaluation else self._environment.get_dataset
        for row in read(n=-1 if count is None else count):
            yield {"input": row["prompt"], "label": _label(row), "metadata": {ROW: row}}

    async def play(self, row: dict[str, Any], base_url: str, api_key: str, model: str) -> tuple[float, dict[str, Any]]:
        openai = importlib.import_module("openai")
        clients = importlib.import_module("verifiers.clients")
        # The run limits the time of an episode and restarts interrupted ones.
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0) as client:
            # The run sets the sampling.
            adapted = clients.OpenAIChatCompletionsClient(client)
            output = await self._environment.run_rollout(row, adapted, model, {})
        error = output.get("error")
        # If empty answers were left out of training, they would be a way out of a lost game.
        if error and error.get("error") not in MODEL_ERRORS:
            raise _failure(error)
        return output["reward"], output.get("metrics") or {}


class _Env:
    """A `vf.Env` of `verifiers.v1`: a task set, and one agent, a program that also scores the episode."""

    # The package reads API keys only from environment variables.
    KEY = "SLIME_AGENT_API_KEY"

    def __init__(self, env: Any) -> None:
        fields = importlib.import_module("verifiers.v1.configs.agent").agent_config_fields(env.config)
        if len(fields) != 1:
            raise NotAvailable.unavailable(
                f"the environment {type(env).__name__}", f"it has several agents: {', '.join(fields)}"
            )
        self._env = env
        self._source = iter(env.taskset)
        self._tasks: list[Any] = []

    def rows(self, count: int | None, evaluation: bool) -> Iterator[dict[str, Any]]:
        taskset = self._env.taskset
        if evaluation:
            raise InvalidSetting.conflict("evaluation=True", "a vf.Env", "make one with the task set to evaluate on")
        if count is None and not taskset.bounded:
            raise InvalidSetting.required("count", f"the task set {type(taskset).__name__} has no end")
        for task in itertools.islice(taskset, count):
            data = task.data.model_dump(mode="json")
            prompt = data["prompt"] or data["system_prompt"] or task.key
            identity = {"idx": data["idx"], "key": task.key}
            yield {"input": prompt, "label": _label(data), "metadata": {ROW: identity}}

    async def play(self, row: dict[str, Any], base_url: str, api_key: str, model: str) -> tuple[float, dict[str, Any]]:
        v1 = importlib.import_module("verifiers.v1")
        os.environ[self.KEY] = api_key
        context = v1.ModelContext(model=model, client=v1.EvalClientConfig(base_url=base_url, api_key_var=self.KEY))
        # Each episode has an address of its own, and an environment keeps its clients as long as it serves.
        env = type(self._env)(self._env.config)
        async with env.serving():
            episode = await env.run_episode(self._task(row), context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or len(episode.traces) != 1:
            several = f"an episode has {counted(len(episode.traces), 'conversation')}, expected one"
            raise _failure(errors[0] if errors else several)
        trace = episode.traces[0]
        return trace.reward, trace.metrics

    def _task(self, row: dict[str, Any]) -> Any:
        self._tasks += itertools.islice(self._source, max(0, row["idx"] + 1 - len(self._tasks)))
        task = self._tasks[row["idx"]] if row["idx"] < len(self._tasks) else None
        if task is None or task.key != row["key"]:
            raise InvalidField(f"metadata.{ROW}", row, "a task of this environment: write its prompts again")
        return task


def _label(row: dict[str, Any]) -> str:
    answer = row.get("answer")
    return "" if answer is None else str(answer)


def _made(make: Callable[[], Any]) -> Any:
    """Makes the environment without the SIGINT handler that a `vf.Environment` installs: it would take Ctrl-C from the
    run, and can be installed only in the main thread, where plug-ins are not loaded."""
    before = signal.signal
    signal.signal = lambda number, handler: signal.getsignal(number)  # type: ignore[assignment]
    try:
        return make()
    finally:
        signal.signal = before


def _player(environment: Any) -> _Environment | _Env:
    if hasattr(environment, "run_rollout"):
        return _Environment(environment)
    if hasattr(environment, "run_episode"):
        return _Env(environment)
    name = type(environment).__name__
    raise NotAvailable.unavailable(f"the environment {name}", "it is neither a vf.Environment nor a vf.Env")


def _failure(error: Any) -> RemoteError:
    return RemoteError(f"the environment fails: {error!s:.500}", field="--custom-agent-path")


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="slime-verifiers", daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result of `work`, which is cancelled with its caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
