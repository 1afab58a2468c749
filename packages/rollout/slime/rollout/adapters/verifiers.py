"""Environments of verifiers, objects of `vf.Environment`, for `--custom-agent-path`.

An environment is an agent: it plays its turns through OpenAI's protocol, runs its tools, and scores what came of it.
`prompts` writes its data set as prompt data, and `episodes` makes the agent.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable, RemoteError

Agent = Callable[..., Awaitable[float]]

# The key of the metadata that holds a row of the environment's data set.
ROW = "verifiers"


def prompts(environment: Any, path: Path, *, count: int = -1, evaluation: bool = False) -> None:
    """Writes the first `count` rows of the environment's data set, or of its evaluation set. -1: all.

    Raises InvalidField for a row that JSON cannot hold.
    """
    rows = (environment.get_eval_dataset if evaluation else environment.get_dataset)(n=count)
    with path.open("w", encoding="utf-8") as file:
        for number, row in enumerate(rows):
            values = {"input": row["prompt"], "label": str(row.get("answer") or ""), "metadata": {ROW: row}}
            try:
                file.write(json.dumps(values) + "\n")
            except (TypeError, ValueError) as error:
                raise InvalidField(f"row {number}", error, "a row that JSON can hold") from error


def episodes(environment: Any) -> Agent:
    """Returns an agent that plays an episode of the environment for each sample, and answers its reward.

    The episodes of an environment share an event loop in a thread, as verifiers runs them. `sample.metadata` gets the
    environment's own metrics.

    Raises NotAvailable for the API of verifiers 0.4, InvalidSetting for rewards of a group as a whole.
    """
    _check(environment)
    loop = _Loop()

    async def agent(base_url: str, sample: Sample, api_key: str, model: str) -> float:
        if ROW not in sample.metadata:
            raise InvalidField("metadata", sorted(sample.metadata), f"the key {ROW!r}, as prompts() writes it")
        output = await loop.run(_play(environment, sample.metadata[ROW], base_url, api_key, model))
        if output.get("error"):
            raise RemoteError(f"the environment fails: {output['error']!s:.500}", field="--custom-agent-path")
        sample.metadata["verifiers_metrics"] = dict(output.get("metrics") or {})
        return float(output["reward"])

    return agent


async def _play(environment: Any, row: dict[str, Any], base_url: str, api_key: str, model: str) -> Any:
    openai = importlib.import_module("openai")
    clients = importlib.import_module("verifiers.clients")
    # The run limits the time of an episode, and begins anew what it has to interrupt.
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None, max_retries=0) as client:
        # The run sets the sampling.
        return await environment.run_rollout(row, clients.OpenAIChatCompletionsClient(client), model, {})


def _check(environment: Any) -> None:
    name = type(environment).__name__
    if not hasattr(environment, "run_rollout"):
        raise NotAvailable.unavailable(
            f"the environment {name}", "it has no run_rollout", "a vf.Environment of verifiers 0.1.10 to 0.3"
        )
    if environment.requires_group_rollouts:
        raise InvalidSetting(
            f"the environment {name} scores the samples of a prompt together, and slime asks for one at a time; give a "
            "rubric whose functions score one completion",
            field="rubric", value=name, expected="functions of one completion",
        )  # fmt: skip


class _Loop:
    """An event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="slime-verifiers", daemon=True).start()

    async def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Returns the result; the work is cancelled with its caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
