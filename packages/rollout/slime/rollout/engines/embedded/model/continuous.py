"""A batch that sequences join while it runs, of models that DenseModel computes.

A sequence has a row of the cache while it runs. A prompt that is in the cache already is copied, not computed again.
Where the tokens of all rows get more than memory is planned for, the shortest sequences leave, and go on from their
tokens when they are added again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime.rollout.engines.embedded.model.decode import Batch
from slime.rollout.engines.embedded.model.dense import DenseModel, Pass
from slime.rollout.engines.embedded.model.kv_cache import tokens_in_memory
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.response import Response


@dataclass(eq=False)
class _Row:
    """A running sequence. cached: how many of the sequence's tokens the cache holds. packing: the weights that computed
    them."""

    response: Response
    cached: int
    packing: int

    @property
    def newest(self) -> int:
        return (self.response.output_ids or self.response.prompt_ids)[-1]


class ContinuousBatch(Batch):
    """The sequence at `_rows[i]` has row i of the cache."""

    joinable = True

    def __init__(
        self,
        loaded: Loaded,
        dense: DenseModel,
        rng: np.random.Generator,
        max_tokens: int | None = None,
        fraction: float = 0.5,
    ) -> None:
        """max_tokens: of all sequences together; None: as many as this fraction of the memory holds."""
        super().__init__(loaded, rng)
        self._dense = dense
        self._cache = dense.cache()
        self._max_tokens = max_tokens or tokens_in_memory(self._cache.token_bytes, fraction)
        self._rows: list[_Row] = []
        self._joining: list[Response] = []

    @property
    def running(self) -> list[Response]:
        every = [*(row.response for row in self._rows), *self._joining]
        return [response for response in every if response.finish_reason is None]

    @property
    def free_tokens(self) -> int:
        return max(0, self._max_tokens - sum(response.planned_tokens for response in self.running))

    def add(self, responses: Sequence[Response]) -> None:
        self._joining += responses

    @torch.inference_mode()
    def step(self) -> None:
        self._free_rows()
        self._keep_to_memory()
        joining, self._joining = [r for r in self._joining if r.finish_reason is None], []
        longest = max([row.cached + 1 for row in self._rows] + [len(r.key[1]) for r in joining], default=0)
        self._cache.reserve(len(self._rows) + len(joining), longest, [row.cached for row in self._rows])
        fresh = self._join_running_prompts(joining)
        run = Pass()
        for row in self._rows:
            run.decode(row.newest, row.cached)
            row.cached += 1
        outputs = [*range(run.decoding), *self._prefill(run, fresh)]
        hidden_ND = self._dense.forward(run, self._cache)
        self._share_prompts(run)
        self._emit([row.response for row in self._rows], self._dense.logits(hidden_ND[outputs]))

    def _free_rows(self) -> None:
        for index in reversed(range(len(self._rows))):
            if self._rows[index].response.finish_reason is not None:
                self._remove(index)

    def _keep_to_memory(self) -> None:
        while len(self._rows) > 1 and sum(row.cached + 1 for row in self._rows) > self._max_tokens:
            # The shortest costs least to compute again, and the others come to their end.
            index = min(range(len(self._rows)), key=lambda i: self._rows[i].cached)
            self._left.append(self._rows[index].response)
            self._remove(index)

    def _remove(self, index: int) -> None:
        """Frees a row, and moves the last one there."""
        self._cache.release(index)
        last = self._rows.pop()
        if index < len(self._rows):
            self._cache.copy(len(self._rows), index, last.cached)
            self._cache.release(len(self._rows))
            self._rows[index] = last

    def _join_running_prompts(self, joining: Sequence[Response]) -> list[Response]:
        """Lets those join whose prompt a running sequence has; only its last token is computed. Returns the others."""
        if not joining:
            return []
        packing = self._dense.packing
        known = {tuple(row.response.prompt_ids): i for i, row in enumerate(self._rows) if row.packing == packing}
        fresh = []
        for response in joining:
            tokens = response.key[1]
            if (source := known.get(tokens)) is None:
                fresh.append(response)
                continue
            self._cache.copy(source, len(self._rows), len(tokens) - 1)
            self._rows.append(_Row(response, len(tokens) - 1, packing))
            response.cached_tokens = len(tokens) - 1
        return fresh

    def _prefill(self, run: Pass, fresh: Sequence[Response]) -> list[int]:
        """Plans each different prompt once. Returns where in the pass the last token of each sequence's prompt is."""
        ends: dict[tuple[int, ...], int] = {}
        for response in fresh:
            tokens = response.key[1]
            response.cached_tokens = len(tokens) if tokens in ends else 0
            if tokens not in ends:
                run.prefill(len(self._rows), tokens)
                ends[tokens] = len(run.ids) - 1
            self._rows.append(_Row(response, len(tokens), self._dense.packing))
        return [ends[response.key[1]] for response in fresh]

    def _share_prompts(self, run: Pass) -> None:
        """Copies what the pass computed for a prompt to the other rows that have it."""
        computed = {self._rows[row].response.key: row for row, _ in run.prompts}
        for index in range(run.decoding, len(self._rows)):
            row = self._rows[index]
            source = computed[row.response.key]
            if source != index:
                self._cache.copy(source, index, row.cached)
