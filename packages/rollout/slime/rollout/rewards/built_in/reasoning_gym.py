"""Scores with the scorer of a reasoning-gym data set, named by `metadata["source_dataset"]`.

The scorer gets the entry {"question", "answer", "metadata"}: `metadata["entry"]` where that is given, else the sample's
prompt, label and metadata. The answer is the text in the last <answer>...</answer>, else the whole response.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from slime.rollout.prompts.encoder import unrendered
from slime.types import Sample
from slime.types.errors import InvalidField, NotAvailable

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

log = logging.getLogger(__name__)


async def reward(args: RolloutArgs, sample: Sample) -> float:
    """Raises InvalidField where the metadata name no data set of reasoning-gym."""
    entry = sample.metadata.get("entry") or {
        "question": unrendered(sample),
        "answer": sample.label,
        "metadata": sample.metadata,
    }
    name = sample.metadata.get("source_dataset") or entry.get("metadata", {}).get("source_dataset")
    # Prompts for models that reason first ask for the answer between these tags.
    _, _, tagged = sample.response.rpartition("<answer>")
    answer = tagged.partition("</answer>")[0] if "</answer>" in tagged else sample.response
    return await asyncio.to_thread(score, str(name), answer.strip(), entry)


def score(name: str, answer: str, entry: dict[str, Any]) -> float:
    """Returns the score; 0 for an answer with which the scorer fails.

    Raises InvalidField if the scorer fails with the right answer too: then the entry is at fault.
    """
    scorer = _scorer(name)
    try:
        return float(scorer(answer=answer, entry=entry))
    except Exception as error:
        try:
            scorer(answer=entry["answer"], entry=entry)
        except Exception:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidField(
                "metadata.entry", reason, f"an entry of {name}",
                f"reasoning-gym cannot score with this entry of the data set {name}: {reason}: {entry!r:.300}",
            ) from error  # fmt: skip
        log.warning("the scorer of reasoning-gym's %s fails with an answer, which scores 0: %s", name, error)
        return 0.0


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
