"""Evaluation sets of a buffer."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

from slime.rollout.sources.leased import Render
from slime.rollout.sources.wire_names import WireNames
from slime.types import Sample, SampleGroup
from slime.types.errors import NotFound


class EvaluationCalls(Protocol):
    """The part of a client that an evaluation needs."""

    def stats(self) -> Any: ...
    def read_evaluation_set(self, name: str) -> list[SampleGroup]: ...


class EvaluationSource:
    """Evaluation sets of a buffer. names: the sets to evaluate; empty: all that the buffer has. Raises NotFound for an
    unknown name.

    wire_names: the names that samples of the buffer may hold. render: replaces prompts by the
    text that the model is sent.
    """

    def __init__(
        self,
        buffer: EvaluationCalls,
        names: Sequence[str] = (),
        wire_names: WireNames | None = None,
        render: Render | None = None,
    ) -> None:
        self.buffer = buffer
        self.wire_names = wire_names
        self.render = render
        known = tuple(buffer.stats().evaluation_sets)
        for name in names:
            if name not in known:
                raise NotFound(
                    f"no evaluation set {name!r}; the buffer has {', '.join(known) or 'none'}",
                    field="names",
                    value=name,
                )
        self.names = tuple(names) or known

    def read(self, name: str, n_samples: int, render: Render | None = None) -> list[list[Sample]]:
        """Returns the groups of a set in order, `n_samples` each, their samples numbered from 0 through the whole set.

        render: used in place of the source's own.
        Raises what `WireNames.check` raises.
        """
        groups: list[list[Sample]] = []
        for group in self.buffer.read_evaluation_set(name):
            samples = group.samples
            if self.wire_names is not None:
                self.wire_names.check(samples, name)
            if render is not None:
                render(samples)
            elif self.render is not None:
                self.render(samples)
            if len(samples) != n_samples:
                samples = [copy.deepcopy(samples[0]) for _ in range(n_samples)]
            for i, sample in enumerate(samples):
                sample.index = len(groups) * n_samples + i
            groups.append(samples)
        return groups
