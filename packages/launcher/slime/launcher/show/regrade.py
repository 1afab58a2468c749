"""Grades kept samples again with the run's own reward function, to find rewards that went to another sample.

A custom reward function is code of the run's author, so this happens only if the user asks for it.
"""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace
from typing import Any

from slime.launcher.show.checks import Row, SampleFinding
from slime.rollout.rewards.score import async_rm
from slime.types import Sample
from slime.types.sample.status import SampleStatus

SECONDS = 30.0
TOLERANCE = 1e-6


class RewardArgs(SimpleNamespace):
    """The settings of a run as the `args` of its reward function; settings that run.yaml leaves out are None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def regrade(rows: list[Row], settings: dict[str, Any]) -> list[SampleFinding]:
    """Returns a finding for each sample that gets another reward when it is graded again."""
    graded = [row for row in rows if row["reward"] is not None]
    args = RewardArgs(**settings)
    again = asyncio.run(_grade(args, [_sample(row) for row in graded]))
    new_rewards = {id(row): value for row, value in zip(graded, again, strict=True)}
    findings = []
    for number, row in enumerate(rows):
        value = new_rewards.get(id(row))
        if isinstance(value, Exception):
            text = f"cannot be graded again: {type(value).__name__}: {value}"
            findings.append(SampleFinding("regraded", number, text))
            continue
        if value is None or math.isclose(value, row["reward"], abs_tol=TOLERANCE):
            continue
        text = f"reward {row['reward']:g}, graded again {value:g}"
        same_group = [r for r in graded if r["group_index"] == row["group_index"] and r is not row]
        others = [r["index"] for r in same_group if _equal(new_rewards[id(r)], row["reward"])]
        if others:
            text += f"; {row['reward']:g} is what the response of sample {others[0]} of the group gets"
        findings.append(SampleFinding("regraded", number, text))
    return findings


async def _grade(args: Any, samples: list[Sample]) -> list[float | Exception | None]:
    values = await asyncio.gather(
        *(asyncio.wait_for(async_rm(args, sample), SECONDS) for sample in samples), return_exceptions=True
    )
    for value in values:
        if isinstance(value, BaseException) and not isinstance(value, Exception):
            raise value
    return [_number(value, args.reward_key) for value in values]


def _number(value: Any, key: str | None) -> float | Exception | None:
    if isinstance(value, Exception):
        return value
    if isinstance(value, dict):
        value = value.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def _equal(a: float | Exception | None, b: float) -> bool:
    return isinstance(a, float) and math.isclose(a, b, abs_tol=TOLERANCE)


def _sample(row: Row) -> Sample:
    sample = Sample(
        group_index=row["group_index"], index=row["index"], prompt=row["prompt"], response=row["response"],
        label=row["label"], tokens=[] if row["tokens"] is None else row["tokens"],
        response_length=row["response_length"] or 0,
        status=SampleStatus(row["status"]), metadata=json.loads(row["metadata"] or "{}"),
    )  # fmt: skip
    return sample
