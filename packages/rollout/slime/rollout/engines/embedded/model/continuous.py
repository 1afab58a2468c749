"""A batch that sequences can join while it runs, for models that DenseModel supports.

A running sequence has a row of the cache. What a prompt has in common with one in the cache, all of it or a beginning,
is copied, not computed again. When the tokens of all rows exceed the planned memory, the shortest sequences leave,
and continue from their tokens when they are added again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime.rollout.engines.embedded.dense.kv_cache import tokens_in_memory
from slime.rollout.engines.embedded.dense.model import DenseModel, Pass
from slime.rollout.engines.embedded.model.beginnings import Beginnings, fingerprints
from slime.rollout.engines.embedded.model.decode import Batch
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.response import Response


@dataclass(eq=False)
class _Row:
    """A running sequence. cached: the number of its tokens that the cache holds. packing: `DenseModel.packing` of the
    weights that computed them. prompt: its tokens when it joined; prints: their fingerprints."""

    response: Response
    cached: int
    packing: int
    prompt: tuple[int, ...]
    prints: list[int]

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
        """max_tokens: the most tokens of all sequences together; None: as many as `fraction` of the memory holds."""
        super().__init__(loaded, rng)
        self._dense = dense
        self._cache = dense.cache()
        self.max_tokens = max_tokens or tokens_in_memory(self._cache.token_bytes, fraction)
        self._cache.planned = self.max_tokens * self._cache.token_bytes
        self._rows: list[_Row] = []
        self._joining: list[Response] = []

    @property
    def running(self) -> list[Response]:
        every = [*(row.response for row in self._rows), *self._joining]
        return [response for response in every if response.finish_reason is None]

    @property
    def free_tokens(self) -> int:
        return max(0, self.max_tokens - sum(response.planned_tokens for response in self.running))

    @property
    def used_tokens(self) -> int:
        return sum(row.cached for row in list(self._rows))

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
        while len(self._rows) > 1 and sum(row.cached + 1 for row in self._rows) > self.max_tokens:
            # The shortest sequence costs least to compute again, and the others are closer to their end.
            index = min(range(len(self._rows)), key=lambda i: self._rows[i].cached)
            self._left.append(self._rows[index].response)
            self._remove(index)

    def _remove(self, index: int) -> None:
        """Frees a row, and moves the last row into its place."""
        self._cache.release(index, self._rows[index].cached)
        last = self._rows.pop()
        if index < len(self._rows):
            self._cache.copy(len(self._rows), index, last.cached)
            self._cache.release(len(self._rows), last.cached)
            self._rows[index] = last

    def _join_running_prompts(self, joining: Sequence[Response]) -> list[Response]:
        """Adds rows for sequences whose prompt is that of a running one, with its cache: only the last token is left to
        compute. Returns the other sequences."""
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
            self._rows.append(_Row(response, len(tokens) - 1, packing, tokens, self._rows[source].prints))
            response.cached_tokens = len(tokens) - 1
        return fresh

    def _prefill(self, run: Pass, fresh: Sequence[Response]) -> list[int]:
        """Adds each distinct prompt to the pass once, without what another has too. Returns the position in the pass of
        the last token of each sequence's prompt."""
        packing, beginnings = self._dense.packing, Beginnings()
        for index, row in enumerate(self._rows if fresh else ()):
            if row.packing == packing:
                beginnings.add(index, row.prompt, row.prints)
        ends: dict[tuple[int, ...], tuple[int, list[int]]] = {}
        for response in fresh:
            tokens, index = response.key[1], len(self._rows)
            response.cached_tokens = len(tokens)
            if tokens not in ends:
                prints = fingerprints(tokens)
                source, response.cached_tokens = beginnings.longest(tokens, prints)
                run.prefill(index, tokens, source, response.cached_tokens)
                beginnings.add(index, tokens, prints)
                ends[tokens] = len(run.ids) - 1, prints
            self._rows.append(_Row(response, len(tokens), packing, tokens, ends[tokens][1]))
        return [ends[response.key[1]][0] for response in fresh]

    def _share_prompts(self, run: Pass) -> None:
        """Copies the keys and values of a prompt that the pass computed to the other rows with the same prompt."""
        computed = {self._rows[prompt.row].response.key: prompt.row for prompt in run.prompts}
        for index in range(run.decoding, len(self._rows)):
            row = self._rows[index]
            source = computed[row.response.key]
            if source != index:
                self._cache.copy(source, index, row.cached)
