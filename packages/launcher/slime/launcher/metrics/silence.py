"""Warns if nothing can be learned: equal rewards in every group, no trained token, or a gradient of 0."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.launcher.metrics.files import Metrics
from slime.types import Sample

LONGEST_TEXT = 4000
# So many steps in a row without a gradient are not an accident.
SILENT_STEPS = 2


def _short(text: Any) -> Any:
    text = text if isinstance(text, str) else json.dumps(text, default=str)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


class SilenceWatch:
    """Warns once that nothing is learned: after steps in which no group had two different rewards, no token was trained
    on, or the policy had no gradient for another reason.

    compares: whether advantages compare the rewards of a group.
    """

    def __init__(self, *, compares: bool = True) -> None:
        self._compares = compares
        self._silent = {"rewards": 0, "tokens": 0, "gradient": 0}
        self._warned: set[str] = set()

    def look(self, step: int, metrics: Metrics, samples: Sequence[Sample], where: Path) -> str | None:
        """Returns the warning to print after this step, if any. where: the directory of the run."""
        is_silent = {
            "rewards": self._compares and metrics.get("rollout/zero_std_ratio") == 1,
            "tokens": metrics.get("rollout/trained_tokens") == 0,
            # For example, one sample left in each group, or masks on the samples whose rewards differ.
            "gradient": metrics.get("train/grad_norm") == 0,
        }
        for kind, silent in is_silent.items():
            self._silent[kind] = self._silent[kind] + 1 if silent else 0
        for kind in ("tokens", "rewards", "gradient"):
            if self._silent[kind] >= SILENT_STEPS and kind not in self._warned:
                self._warned |= {kind, "rewards", "gradient"}
                return _message(kind, step, metrics, samples, where)
        return None


def _message(kind: str, step: int, metrics: Metrics, samples: Sequence[Sample], where: Path) -> str:
    if kind == "tokens":
        fault = "trained 0 tokens: every loss mask is 0, or every sample is removed"
    elif kind == "gradient":
        fault = (
            "have no gradient: every advantage is 0, or belongs to tokens that are masked or removed "
            f"(of the samples, {metrics.get('rollout/failed_ratio', 0.0):.0%} failed)"
        )
    else:
        mean = metrics.get("rollout/raw_reward", 0.0)
        fault = (
            "have no gradient: in every group all samples have the same reward "
            f"(mean {mean:.3f}), so there is nothing to prefer"
        )
    lines = [f"WARNING: steps {step - SILENT_STEPS + 1} to {step} {fault}. One sample of step {step}:"]
    if samples:
        first = samples[0]
        lines += [
            f"  prompt    {_short(first.prompt)!r}",
            f"  response  {_short(first.response)!r}",
            f"  label     {first.label!r}",
            f"  reward    {first.reward!r}",
        ]
    lines.append(
        f"  more of them: slime show {shlex.quote(str(where))}; all of them: --dump-details DIR. "
        "Check that the reward function understands such responses and labels."
    )
    return "\n".join(lines)
