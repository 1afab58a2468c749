"""Lays out samples in a row: trunks that several share, their branches, then samples alone.

A trunk is what several samples begin with: their prompt, or more of their first tokens (trunks.py). A branch is what a
sample has behind it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from slime.trainer.batching.runs import Runs
from slime.trainer.batching.trunks import Trunk, first_tokens, tokens_fed
from slime.types.models.vision import Vision
from slime.types.sample import Sample

# Kinds of runs in a row: a prompt, turns behind it that are of the trunk too, and n + 1 for the branch of sample n.
_PROMPT, _TURNS = 0, -1


class SamplePlace(NamedTuple):
    """The place of a sample in a row: its first `tokens` from `trunk` on, the others from `branch` on."""

    trunk: int
    branch: int
    tokens: int


class RowLayout:
    """A row of samples. experts: (layers, k) where those of tokens are laid out too; multiple: of the row's length.

    Samples with equal trunks are a family, whose trunk is laid once if it has several members. Trunks of families come
    first, then their branches in the same order, then samples alone and padding.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        trunks: Sequence[Trunk | None],
        *,
        share: bool,
        multiple: int = 1,
        vision: Vision | None = None,
        experts: tuple[int, int] | None = None,
    ) -> None:
        self._samples, self._vision, self._experts = samples, vision, experts
        self.tokens_of = [sample.array("tokens") for sample in samples]
        self._row: list[np.ndarray] = []
        self._laid: list[tuple[int, int, int, int]] = []  # length, first position, which trunk, kind of run
        self.places = [SamplePlace(0, 0, 0)] * len(samples)
        self.images: list[dict[str, Any]] = []
        self._illustrated: list[int] = []  # families whose prompt has images
        self._counted: dict[int, np.ndarray] = {}  # the grid positions of such a prompt
        self._routed: list[np.ndarray] = []
        self._filled = 0
        families = _families(samples, trunks) if share and len(samples) > 1 else _alone(samples)
        shared = [(owner, family) for owner, family in enumerate(families) if len(family.members) > 1]
        starts = [self._lay_trunk(owner, family) for owner, family in shared]
        self._trunks = [family.tokens for _, family in shared]
        self._branches = [
            [self._lay_branch(owner, number, start, family.tokens) for number in family.members]
            for (owner, family), start in zip(shared, starts, strict=True)
        ]
        self._single: list[int] = []
        for owner, family in enumerate(families):
            if len(family.members) == 1:
                start = self._lay_trunk(owner, family)
                length = self._lay_branch(owner, family.members[0], start, family.tokens)
                self._single.append(family.tokens + length)
        if padding := -self._filled % multiple:
            self._single.append(padding)
            self._lay(np.zeros(padding, dtype=np.int64), 0, len(families), _PROMPT)
        held, firsts, owners, self._kinds = np.array(self._laid, dtype=np.int64).T
        self._held, self._owners = held, owners
        self.tokens = np.concatenate(self._row)
        self.positions = np.arange(self._filled) - np.repeat(np.cumsum(held) - held - firsts, held)

    def _lay(self, tokens: np.ndarray, first: int, owner: int, kind: int, number: int | None = None) -> int:
        """Returns the place of the first token."""
        self._row.append(tokens)
        if self._experts is not None:
            sample = None if number is None else self._samples[number]
            self._routed.append(_experts(sample, first, len(tokens), self._experts))
        self._laid.append((len(tokens), first, owner, kind))
        self._filled += len(tokens)
        return self._filled - len(tokens)

    def _lay_trunk(self, owner: int, family: _Family) -> int:
        number = family.members[0]
        sample, tokens = self._samples[number], self.tokens_of[number]
        if not sample.multimodal_train_inputs:
            return self._lay(tokens[: family.tokens], 0, owner, _PROMPT, number)
        prompt = tokens[: _prompt_length(sample)]
        self.images.append(sample.multimodal_train_inputs)
        self._illustrated.append(owner)
        if self._vision is not None and self._vision.grids:
            seen = prompt == self._vision.image_token
            self._counted[owner] = self._vision.positions(seen, sample.multimodal_train_inputs)
        start = self._lay(prompt, 0, owner, _PROMPT, number)
        if family.tokens > len(prompt):
            self._lay(tokens[len(prompt) : family.tokens], len(prompt), owner, _TURNS, number)
        return start

    def _lay_branch(self, owner: int, number: int, trunk: int, tokens: int) -> int:
        """Returns its length."""
        branch = self.tokens_of[number][tokens : tokens_fed(self._samples[number])]
        self.places[number] = SamplePlace(trunk, self._lay(branch, tokens, owner, number + 1, number), tokens)
        return len(branch)

    def runs(self, gather: bool, device: torch.device | str) -> Runs:
        return _runs(self._trunks, self._branches, self._single, gather, device)

    def predictors(self) -> tuple[np.ndarray, np.ndarray]:
        """[K] the token before each response token, and [K] bool, whether that response token is in a trunk too."""
        lengths = np.array([sample.response_length for sample in self._samples], dtype=np.int64)
        prompts = np.array([len(tokens) for tokens in self.tokens_of], dtype=np.int64) - lengths
        trunk, branch, tokens = np.array(self.places, dtype=np.int64).T
        # The first tokens before those of a response lie in the trunk, the others in the branch.
        in_trunk = np.clip(tokens - prompts + 1, 0, lengths)
        parts = _interleaved(in_trunk, lengths - in_trunk)
        firsts = _interleaved(trunk, branch - tokens + in_trunk) + np.repeat(prompts - 1, 2)
        rows = np.arange(parts.sum()) + np.repeat(firsts - np.cumsum(parts) + parts, parts)
        shared = np.clip(tokens - prompts, 0, lengths)
        if not shared.any():
            return rows, np.zeros(len(rows), dtype=bool)
        return rows, np.repeat(np.tile([True, False], len(lengths)), _interleaved(shared, lengths - shared))

    def experts(self) -> np.ndarray:
        """[T, layers, k]."""
        return np.concatenate(self._routed)

    def image_places(self) -> np.ndarray:
        """[T] bool: tokens of prompts that have images."""
        return np.repeat(np.isin(self._owners, self._illustrated) & (self._kinds == _PROMPT), self._held)

    def grid_positions(self) -> np.ndarray | None:
        """[3, T]: those of prompts with images, and of what follows them, from the largest on; None without any."""
        if not self._counted:
            return None
        owner, kind = np.repeat(self._owners, self._held), np.repeat(self._kinds, self._held)
        found = np.tile(self.positions, (3, 1))
        for prompt, positions in self._counted.items():
            found[:, (owner == prompt) & (kind == _PROMPT)] = positions
            found[:, (owner == prompt) & (kind != _PROMPT)] += positions.max() + 1 - positions.shape[1]
        return found


def _interleaved(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """[2 n]: two columns, [n] each, in turns."""
    return np.stack([first, second], axis=1).ravel()


def _experts(sample: Sample | None, first: int, count: int, shape: tuple[int, int]) -> np.ndarray:
    """[count, layers, k]: of the tokens from `first` on; -1 for those that the engine was not fed with."""
    found = np.full((count, *shape), -1, dtype=np.int16)
    known = sample.rollout_routed_experts if sample is not None else None
    if known is not None:
        part = known[first : first + count]
        found[: len(part)] = part
    return found


class _Family(NamedTuple):
    """Samples, by number, and the tokens of the trunk that they share; of its prompt for one alone."""

    members: list[int]
    tokens: int


def _prompt_length(sample: Sample) -> int:
    return len(sample.array("tokens")) - sample.response_length


def _alone(samples: Sequence[Sample]) -> list[_Family]:
    return [_Family([number], _prompt_length(sample)) for number, sample in enumerate(samples)]


def _families(samples: Sequence[Sample], trunks: Sequence[Trunk | None]) -> list[_Family]:
    """Groups samples with equal trunks, or with equal prompts where that leaves no more tokens, in the order of the
    first of each."""
    prompts = _grouped(samples, [None] * len(samples))
    if not any(trunks):
        return prompts
    found = _grouped(samples, trunks)
    return found if _saved(found) > _saved(prompts) else prompts


def _saved(families: Sequence[_Family]) -> int:
    return sum((len(family.members) - 1) * family.tokens for family in families)


def _grouped(samples: Sequence[Sample], trunks: Sequence[Trunk | None]) -> list[_Family]:
    found: dict[Any, _Family] = {}
    for number, (sample, trunk) in enumerate(zip(samples, trunks, strict=True)):
        prompt = _prompt_length(sample)
        if trunk is not None and trunk.tokens < prompt and sample.multimodal_train_inputs:
            trunk = None  # A prompt with images is laid out whole.
        length = prompt if trunk is None else trunk.tokens
        key = first_tokens(sample, length)
        which = None if trunk is None else trunk.which
        family = found.setdefault(number if key is None else (key, which), _Family([], length))
        family.members.append(number)
    # A sample whose trunk only samples of other rows have is laid out with its prompt.
    prompts = (_prompt_length(samples[family.members[0]]) for family in found.values())
    return [
        family if len(family.members) > 1 else _Family(family.members, prompt)
        for family, prompt in zip(found.values(), prompts, strict=True)
    ]


def _runs(
    trunks: Sequence[int],
    branches: Sequence[Sequence[int]],
    alone: Sequence[int],
    gather: bool,
    device: torch.device | str,
) -> Runs:
    """Returns the runs of trunks with their branches, then of samples alone, laid end to end; all are lengths."""
    every = [*itertools.chain.from_iterable(branches)]
    if not any(every):
        return Runs.apart([*trunks, *alone], device)
    if not gather:
        return Runs.sharing(trunks, branches, alone, device)
    limits = np.cumsum([0, *trunks])
    lengths = [*trunks, *every, *alone]
    before = [np.arange(0)] * len(trunks)
    before += [np.arange(*limits[i : i + 2]) for i, of_trunk in enumerate(branches) for _ in of_trunk]
    before += [np.arange(0)] * len(alone)
    ends = np.cumsum(lengths)
    laid = [
        (length, np.concatenate([seen, np.arange(end - length, end)]))
        for length, end, seen in zip(lengths, ends, before, strict=True)
        if length
    ]
    return Runs.gathered([length for length, _ in laid], [keys for _, keys in laid], device)
