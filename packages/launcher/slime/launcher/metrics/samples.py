"""Samples that a run keeps for people: samples.jsonl, a few of each step; and a word where nothing can be learned.

One JSON object a sample:

    step, group_index, index         which sample of which step; samples of one group answer one prompt
    prompt, response, label          as the reward function got them; a long text has its middle left out
    reward, status, response_length  its score, how it ended, its number of tokens
    weight_versions                  of the weights that made it
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime.launcher.metrics.files import Metrics
from slime.types import Sample
from slime.types.directories import path_errors
from slime.types.files import write_whole

FILE = "samples.jsonl"
LONGEST_TEXT = 4000
SAMPLES_PER_GROUP = 4
# So many steps in a row without a gradient are no accident.
SILENT_STEPS = 2


class SamplesLog:
    """samples.jsonl of a run; what is of `first_step` or later, from before the run was resumed, is written anew.

    first_step: None where nothing of it is.
    """

    def __init__(self, path: Path, first_step: int | None) -> None:
        self.path = path
        if path.exists() and first_step is not None:
            lines = path.read_text(encoding="utf-8").splitlines()
            kept = [line for line in lines if json.loads(line)["step"] < first_step]
            if len(kept) < len(lines):
                write_whole(path, "".join(line + "\n" for line in kept))

    def append(self, step: int, samples: Sequence[Sample]) -> None:
        if not samples:
            return
        with path_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(_row(step, sample), default=str) + "\n" for sample in samples)


def _row(step: int, sample: Sample) -> dict[str, Any]:
    return {
        "step": step,
        "group_index": sample.group_index,
        "index": sample.index,
        "prompt": _short(sample.prompt),
        "response": _short(sample.response),
        "label": sample.label,
        "reward": sample.reward,
        "status": sample.status.value,
        "response_length": sample.response_length,
        "weight_versions": list(sample.weight_versions),
    }


def _short(text: Any) -> Any:
    text = text if isinstance(text, str) else json.dumps(text, default=str)
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


class SilenceWatch:
    """Says once that nothing is learned: after steps in which no group had two different rewards, or no token counted.

    compares: whether the advantages come from comparing the rewards of a group.
    """

    def __init__(self, *, compares: bool = True) -> None:
        self._compares = compares
        self._silent = {"rewards": 0, "tokens": 0}
        self._said: set[str] = set()

    def look(self, step: int, metrics: Metrics, samples: Sequence[Sample], where: Path) -> str | None:
        """Returns the warning to print after this step, if any. where: the directory of the run."""
        found = {
            "rewards": self._compares and metrics.get("rollout/zero_std_ratio") == 1,
            "tokens": metrics.get("rollout/trained_tokens") == 0,
        }
        for kind, silent in found.items():
            self._silent[kind] = self._silent[kind] + 1 if silent else 0
        for kind in ("tokens", "rewards"):
            if self._silent[kind] >= SILENT_STEPS and kind not in self._said:
                self._said |= {kind, "rewards"}
                return _message(kind, step, metrics, samples, where)
        return None


def _message(kind: str, step: int, metrics: Metrics, samples: Sequence[Sample], where: Path) -> str:
    if kind == "tokens":
        what = "trained 0 tokens: every loss mask is 0, or every sample is removed"
    else:
        mean = metrics.get("rollout/raw_reward", 0.0)
        what = (
            "have no gradient: in every group all samples have the same reward "
            f"(mean {mean:.3f}), so there is nothing to prefer"
        )
    lines = [f"WARNING: steps {step - SILENT_STEPS + 1} to {step} {what}. One sample of step {step}:"]
    if samples:
        first = samples[0]
        lines += [
            f"  prompt    {_short(first.prompt)!r}",
            f"  response  {_short(first.response)!r}",
            f"  label     {first.label!r}",
            f"  reward    {first.reward!r}",
        ]
    lines.append(
        f"  more of them: {where / FILE}; all of them: --dump-details DIR. Does the reward function get what it wants?"
    )
    return "\n".join(lines)
