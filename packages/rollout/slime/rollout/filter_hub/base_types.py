"""What a dynamic sampling filter answers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class DynamicFilterOutput:
    """keep: whether the group is trained on; reason: the word under which a drop is counted;
    keep_when_insufficient: keep it after all where dropping would leave the rollout short."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    @classmethod
    def of(cls, answer: DynamicFilterOutput | bool) -> DynamicFilterOutput:
        return answer if isinstance(answer, cls) else cls(keep=bool(answer))
