"""Scores with the scorer of a reasoning-gym data set, named by `metadata["source_dataset"]`.

The entry that it wants is {"question", "answer", "metadata"}: `metadata["entry"]` where that is given, else the
sample's prompt, label and metadata. The answer is what stands in the last <answer>...</answer>, else the response.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from slime.rollout.generate.prompts import unrendered
from slime.types import Sample
from slime.types.errors import InvalidField, NotAvailable


async def reward(args: Any, sample: Sample) -> float:
    """Raises InvalidField where the metadata name no data set of reasoning-gym."""
    entry = sample.metadata.get("entry") or {
        "question": unrendered(sample),
        "answer": sample.label,
        "metadata": sample.metadata,
    }
    name = sample.metadata.get("source_dataset") or entry.get("metadata", {}).get("source_dataset")
    # Models that reason first are told to put what counts between these tags.
    _, _, tagged = sample.response.rpartition("<answer>")
    answer = tagged.partition("</answer>")[0] if "</answer>" in tagged else sample.response
    return await asyncio.to_thread(score, str(name), answer.strip(), entry)


def score(name: str, answer: str, entry: dict[str, Any]) -> float:
    return float(_scorer(name)(answer=answer, entry=entry))


def require() -> Any:
    """Returns the module reasoning_gym. Raises NotAvailable where it is not installed."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise NotAvailable.not_installed(
            "--rm-type reasoning_gym", "reasoning-gym", "slime-rollout[reasoning-gym]"
        ) from error
    return reasoning_gym


@functools.cache
def _scorer(name: str) -> Callable[..., float]:
    try:
        return require().get_score_answer_fn(name)
    except ValueError:
        raise InvalidField("metadata.source_dataset", name, "the name of a reasoning-gym data set") from None
