"""Finds the trunks of samples: the first tokens, of prompt and turns, that samples of a group have in common.

    prompt, turn 1, tool's answer, turn 2a        one trajectory that fans out, or two samples of a group: the trunk is
    prompt, turn 1, tool's answer, turn 2b        all before turn 2, whether a sample has turn 1 in its prompt or not

A trunk ends at a cut: where the prompt of a sample of the group ends, or its loss mask changes, which is where a turn
begins or ends. Responses that begin with the same words by chance share their prompt alone.

A sample has one trunk, and a trunk has none before it: attention reads a token's own run and one more. So of a tree of
turns, those trunks are taken that leave the fewest tokens to lay out; a nested tree would need a call of attention for
every level.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slime.trainer.batching.schedule import Lengths
from slime.types.sample import Sample

# Cuts of a group at which samples are compared; of more, as of a loss mask that changes at every token, some are taken.
MOST_CUTS = 128


class Trunk(NamedTuple):
    """The first tokens of several samples. which: equal for the samples that have it; tokens: its length."""

    which: Hashable
    tokens: int


def cuts_of(sample: Sample) -> list[int]:
    """Returns the numbers of tokens after which the loss mask changes; none for a sample without a loss mask."""
    mask = sample.array("loss_mask")
    if mask is None or np.count_nonzero(mask) in (0, len(mask)):
        return []
    trained = np.asarray(mask) != 0
    changes = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    cuts = len(sample.array("tokens")) - sample.response_length + changes
    return thinned(cuts[(cuts > 0) & (cuts <= tokens_fed(sample))].tolist())


def thinned(cuts: Iterable[int]) -> list[int]:
    """Returns `cuts` in order, each once; if they are too many, some, evenly spread."""
    found = sorted(set(cuts))
    if len(found) <= MOST_CUTS:
        return found
    return [found[i] for i in np.linspace(0, len(found) - 1, MOST_CUTS).astype(int)]


def tokens_fed(sample: Sample) -> int:
    """Returns the number of tokens that a model is fed: the last of a response predicts nothing that is trained."""
    return len(sample.array("tokens")) - (sample.response_length > 0)


def first_tokens(sample: Sample, length: int) -> tuple[bytes, str | None] | None:
    """Returns a key that is equal for equal first tokens; None where the images of the prompt are not known."""
    if sample.multimodal_train_inputs and sample.multimodal_train_input_id is None:
        return None
    return np.asarray(sample.array("tokens")[:length], dtype=np.int32).tobytes(), sample.multimodal_train_input_id


def prompt_digest(sample: Sample, position: int) -> str:
    """Returns a text that differs where prompts differ. position: of the sample in the step, the same on every rank."""
    prompt = first_tokens(sample, len(sample.array("tokens")) - sample.response_length)
    if prompt is None:
        return f"alone {position}"
    return hashlib.blake2b(prompt[0], key=(prompt[1] or "").encode()[:64], digest_size=12).hexdigest()


def digests_at(cuts: Sequence[int], sample: Sample, experts_from: int | None = None) -> list[str]:
    """Returns, for each of the sorted `cuts` within the sample, a text that differs where the tokens before it do.

    It also differs where images do. experts_from: the place of the first token whose experts count, where they are
    replayed; None where they are not. The time is linear in tokens.
    """
    tokens, fed = np.ascontiguousarray(sample.array("tokens"), dtype=np.int32), tokens_fed(sample)
    seed = b""
    if sample.multimodal_train_inputs:
        # Images stand in the prompt: where it ends has to be the same, too.
        seed = f"{len(tokens) - sample.response_length} {sample.multimodal_train_input_id}".encode()
    experts = sample.rollout_routed_experts if experts_from is not None else None
    digest, start, found = hashlib.blake2b(seed, digest_size=12), 0, []
    for cut in cuts:
        if cut > fed:
            break
        digest.update(tokens[start:cut].tobytes())
        if experts is not None and experts_from is not None and cut > experts_from:
            digest.update(np.ascontiguousarray(experts[max(start, experts_from) : cut]).tobytes())
        found.append(digest.hexdigest())
        start = cut
    return found


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Digests of the first tokens of samples, by position.

    sets: positions of samples that are compared with each other, and the cuts of each set; digests: by position, at the
    first cuts of its set.
    """

    sets: Sequence[Sequence[int]]
    cuts: Sequence[Sequence[int]]
    digests: Mapping[int, Sequence[str]]

    @functools.cached_property
    def _set_of(self) -> dict[int, int]:
        return {p: number for number, members in enumerate(self.sets) for p in members}

    def trunks(self, positions: Iterable[int]) -> dict[int, Trunk]:
        """Returns the trunks that leave the fewest tokens of these samples; a sample that shares none has none."""
        by_set: dict[int, list[int]] = {}
        for p in positions:
            if p in self._set_of and p in self.digests:
                by_set.setdefault(self._set_of[p], []).append(p)
        found: dict[int, Trunk] = {}
        for number, present in by_set.items():
            if len(present) > 1:
                _, trunks, _ = _Search().best(self._tree(present, number, 0), 0)
                found |= {p: trunk for trunk, sharing in trunks for p in sharing}
        return found

    def cost(self, positions: Sequence[int], lengths: Lengths) -> float:
        """Returns the tokens of a micro-batch with trunks or with the prompts of `lengths`, whichever are fewer."""
        trunks = self.trunks(positions)
        with_trunks = Lengths(
            lengths.total, {p: lengths.prompts[p] for p in positions if p in lengths.prompts} | trunks
        )
        return min(lengths.cost(positions), with_trunks.cost(positions))

    def lengthen(self, lengths: Lengths) -> Lengths | None:
        """Returns lengths with trunks in place of prompts in the sets where that leaves fewer tokens; None for none."""
        longer = dict(lengths.prompts)
        for members in self.sets:
            if self.cost(members, lengths) < lengths.cost(members):
                longer |= self.trunks(members)
        return None if longer == lengths.prompts else Lengths(lengths.total, longer)

    def _tree(self, members: list[int], number: int, depth: int) -> _Node:
        """Returns the longest prefix that `members` of a set have in common, at least that of the first `depth` cuts,
        and what they have in common behind it."""
        while True:
            after: dict[str, list[int]] = {}
            for p in members:
                digests = self.digests[p]
                after.setdefault(digests[depth] if depth < len(digests) else "", []).append(p)
            if len(after) > 1 or "" in after:
                break
            depth += 1
        ends = after.pop("", [])
        ends += [p for sharing in after.values() for p in sharing if len(sharing) == 1]
        children = [self._tree(sharing, number, depth + 1) for sharing in after.values() if len(sharing) > 1]
        tokens = self.cuts[number][depth - 1] if depth else 0
        return _Node(Trunk((number, self.digests[members[0]][depth - 1] if depth else ""), tokens), ends, children)


@dataclasses.dataclass(frozen=True)
class _Node:
    """A prefix, samples that have no longer one in common with another, and longer prefixes of others."""

    trunk: Trunk
    ends: list[int]
    children: list[_Node]


# (tokens saved, trunks with their samples, samples that have none of these).
_Choice = tuple[int, list[tuple[Trunk, list[int]]], list[int]]


class _Search:
    """Chooses the trunks of a tree. A trunk of n tokens that k samples share saves (k - 1) * n."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Choice] = {}

    def best(self, node: _Node, above: int) -> _Choice:
        """Returns the best choice below `node`, where a sample without a trunk there saves `above` tokens."""
        key = id(node), above
        if key not in self._known:
            without, (saved, trunks, left) = self._below(node, above), self._below(node, node.trunk.tokens)
            saved -= node.trunk.tokens
            own: _Choice = saved, [(node.trunk, left), *trunks], []
            self._known[key] = own if saved > without[0] else without
        return self._known[key]

    def _below(self, node: _Node, above: int) -> _Choice:
        saved, trunks, left = above * len(node.ends), [], list(node.ends)
        for child in node.children:
            of_child = self.best(child, above)
            saved += of_child[0]
            trunks += of_child[1]
            left += of_child[2]
        return saved, trunks, left
