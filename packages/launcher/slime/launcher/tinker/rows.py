"""Lays data out in rows of the trainer as trees of tokens: what data begin with in common is computed once.

    N  tokens of a datum        T  tokens of a row, those that several data have in common once
    K  tokens of the row's data, end to end        U  pairs of a token of the row and its target, each once

A group has its prompt in common, all groups of a task their system prompt and examples, and equal answers everything.
A datum's first new token sees all that the datum has before it. Every datum has inputs of the loss of its own for all
of its tokens, so the gradients of common tokens add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from slime.launcher.tinker.requests import Datum
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs

# Tokens of a row, unless a single sequence is longer.
ROW_TOKENS = 2048
# Tokens that the data of a row have, for each token of the row: attention reads their keys for every datum.
MOST_KEYS = 8


@dataclasses.dataclass(frozen=True)
class Row:
    """A packed row and the data in it, by their positions in the request."""

    data: list[int]
    batch: PackedBatch

    def joined(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Joins the values of the data: [N] of every datum of the request -> [K]."""
        return np.concatenate([values[number] for number in self.data])

    def divided(self, values: np.ndarray) -> list[np.ndarray]:
        """Divides values by datum: [K] -> [N] of each datum of the row."""
        return np.split(values, np.cumsum(self.batch.lengths)[:-1])


def make_rows(
    data: Sequence[Datum], *, share: bool, device: torch.device, of: Sequence[int] | None = None
) -> Iterator[Row]:
    """Packs data into rows. share: whether common tokens are computed once. of: positions of the data to pack; None:
    all."""
    tree = _Tree(share)
    for number in range(len(data)) if of is None else of:
        if not tree.add(number, data[number].tokens):
            yield tree.row(data, device)
            tree = _Tree(share)
            tree.add(number, data[number].tokens)
    if tree.data:
        yield tree.row(data, device)


class _Tree:
    """The tokens of a row. A token is known by the one before it; the first of a datum has -1 before it."""

    def __init__(self, share: bool) -> None:
        self.data: list[int] = []
        self._share = share
        self._following: dict[tuple[int, int], int] = {}
        self._tokens: list[np.ndarray] = []
        self._paths: list[np.ndarray] = []  # of each datum, the places of its tokens in the row
        self._filled = self._held = 0

    def add(self, number: int, tokens: np.ndarray) -> bool:
        """Adds a datum, unless it is one too many for the row; returns whether it did."""
        known = self._known(tokens)
        new = tokens[len(known) :]
        full = self._filled + len(new) > ROW_TOKENS or self._held + len(tokens) > MOST_KEYS * ROW_TOKENS
        if full and self.data:
            return False
        places = range(self._filled, self._filled + len(new))
        if self._share:
            before = known[-1] if known else -1
            for place, token in zip(places, new.tolist(), strict=True):
                self._following[before, token] = before = place
        self.data.append(number)
        self._tokens.append(new)
        self._paths.append(np.array([*known, *places], dtype=np.int64))
        self._filled += len(new)
        self._held += len(tokens)
        return True

    def _known(self, tokens: np.ndarray) -> list[int]:
        """Returns the places of the first tokens, as far as they are in the row."""
        found: list[int] = []
        place: int | None = -1
        for token in tokens.tolist():
            assert place is not None
            place = self._following.get((place, token))
            if place is None:
                break
            found.append(place)
        return found

    def row(self, data: Sequence[Datum], device: torch.device) -> Row:
        lengths = [len(path) for path in self._paths]
        predictors, targets = np.concatenate(self._paths), np.concatenate([data[i].targets for i in self.data])
        pairs, scored = np.unique(np.stack([predictors, targets]), axis=1, return_inverse=True)
        new = [len(tokens) for tokens in self._tokens]
        starts = [length - count for length, count in zip(lengths, new, strict=True)]
        positions = np.concatenate([np.arange(*limits) for limits in zip(starts, lengths, strict=True)])

        def to(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        total = sum(lengths)
        ones = torch.ones(total, device=device)
        batch = PackedBatch(
            tokens=to(np.concatenate(self._tokens))[None],
            position_ids=to(positions)[None],
            runs=self._runs_of(new, device),
            rows=to(pairs[0]),
            targets=to(pairs[1]),
            scored=to(scored.reshape(-1)),
            trained=torch.arange(total, device=device),
            mask=ones,
            segments=torch.zeros(total, dtype=torch.int64, device=device),
            weights=ones,
            rewards=torch.zeros(len(self.data), device=device),
            rollout_log_probs=None,
            lengths=lengths,
            total_lengths=lengths,
            positions=self.data,
        )
        return Row(self.data, batch)

    def _runs_of(self, new: Sequence[int], device: torch.device) -> Runs:
        if new == [len(path) for path in self._paths]:
            return Runs.apart(new, device)
        laid = [(count, path) for count, path in zip(new, self._paths, strict=True) if count]
        return Runs.gathered([count for count, _ in laid], [path for _, path in laid], device)
