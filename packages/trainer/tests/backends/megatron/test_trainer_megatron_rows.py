"""Rows cut over context-parallel ranks, and micro-batches over replicas: nothing is lost, nothing comes twice."""

import dataclasses
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_tiny import VOCAB

from slime.trainer.backends.megatron.model.rotary import rotate, rotate_as_megatron_does
from slime.trainer.backends.megatron.model.row import RankRow, cut
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.batching.schedule import Lengths, schedule
from slime.types import Sample

CPU = torch.device("cpu")
EMPTY = -1


@st.composite
def batches(draw: st.DrawFn) -> PackedBatch:
    seed = draw(st.integers(0, 2**16))
    sizes = draw(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 7)), min_size=1, max_size=4))
    random = np.random.default_rng(seed)
    samples = []
    for index, (prompt, response) in enumerate(sizes):
        mask = random.integers(0, 2, response).astype(np.uint8)
        tokens = random.integers(2, VOCAB, prompt + response).astype(np.int32)
        samples.append(Sample(index=index, tokens=tokens, response_length=response, loss_mask=mask, reward=1.0))
    count = len(samples)
    return pack(samples, range(count), [1.0] * count, [1.0] * count, share_prompts=False)


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4))


def rows(batch: PackedBatch | None, size: int, multiple: int, **changes: Any) -> list[RankRow]:
    return [cut(batch, rank, size, multiple, CPU, **changes) for rank in range(size)]


def whole(parts: list[RankRow], of: str) -> list[list[float]]:
    """The padded sequences, put together from the chunks of all ranks; chunk r and 2n-1-r of each are on rank r."""
    size = len(parts)
    limits = parts[0].packing.cu_seqlens_q.tolist()
    sequences = []
    for start, end in zip(limits, limits[1:], strict=False):
        if size == 1:
            sequences.append(getattr(parts[0], of)[0, start:end].tolist())
            continue
        chunk, first = (end - start) // (2 * size), start // size
        held = [getattr(part, of)[0, first : first + 2 * chunk].tolist() for part in parts]
        sequences.append(
            [v for values in held for v in values[:chunk]] + [v for values in reversed(held) for v in values[chunk:]]
        )
    return sequences


def sequences_of(batch: PackedBatch) -> list[list[int]]:
    starts = [i for i, position in enumerate(batch.position_ids[0].tolist()) if position == 0]
    tokens = batch.tokens[0].tolist()
    return [tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)], strict=True)]


@settings(max_examples=60, deadline=None)
@given(batches(), SHAPES)
def test_ranks_together_hold_each_token_once_in_its_place(batch: PackedBatch, shape: tuple[int, int]):
    size, multiple = shape
    parts = rows(batch, size, multiple)
    found, positions = whole(parts, "tokens"), whole(parts, "positions")
    expected = sequences_of(batch)
    for tokens, sequence, places in zip(expected, found, positions, strict=False):
        assert sequence[: len(tokens)] == tokens
        assert not any(sequence[len(tokens) :])
        assert places == list(range(len(sequence)))
    # A sequence of padding behind the others fills the row up.
    assert len(found) - len(expected) in (0, 1)
    assert not any(sum(found[len(expected) :], []))


@settings(max_examples=60, deadline=None)
@given(batches(), SHAPES)
def test_labels_are_next_tokens_and_end_with_the_sequence(batch: PackedBatch, shape: tuple[int, int]):
    parts = rows(batch, *shape)
    labels, known = whole(parts, "labels"), whole(parts, "has_label")
    expected = sequences_of(batch)
    for tokens, of_sequence, has_label in zip(expected, labels, known, strict=False):
        assert of_sequence[: len(tokens) - 1] == tokens[1:]
        assert has_label == [1.0] * (len(tokens) - 1) + [0.0] * (len(has_label) - len(tokens) + 1)
    assert sum(map(sum, known)) == sum(len(tokens) - 1 for tokens in expected)


@settings(max_examples=60, deadline=None)
@given(batches(), SHAPES)
def test_each_trained_token_is_predicted_once_from_the_token_before_it(batch: PackedBatch, shape: tuple[int, int]):
    parts = rows(batch, *shape)
    trained = [part.trained.tolist() if part.trained is not None else [] for part in parts]
    assert sorted(sum(trained, [])) == list(range(len(batch.rows)))
    for part, mine in zip(parts, trained, strict=True):
        assert len(part.predicting) == max(1, len(mine))
        at = part.predicting[: len(mine)]
        assert part.tokens[0, at].tolist() == batch.tokens[0, batch.rows[mine]].tolist()
        assert part.positions[0, at].tolist() == batch.position_ids[0, batch.rows[mine]].tolist()


@settings(max_examples=60, deadline=None)
@given(batches(), SHAPES, st.integers(0, 3))
def test_rows_are_as_long_as_ranks_need_them(batch: PackedBatch, shape: tuple[int, int], further: int):
    size, multiple = shape
    parts = rows(batch, size, multiple)
    lengths = {part.tokens.shape[1] for part in parts}
    assert len(lengths) == 1
    length = lengths.pop()
    assert length % multiple == 0 and (size == 1 or length % 2 == 0)
    assert parts[0].packing.cu_seqlens_q[-1] == length * size
    assert length * size < batch.tokens.shape[1] + 2 * size * (len(batch.lengths) + multiple)
    # To the length of the longest row, where stages cannot tell each other the lengths.
    longer = length + further * 2 * multiple
    parts = rows(batch, size, multiple, length=longer)
    assert {part.tokens.shape[1] for part in parts} == {longer}
    assert sorted(sum((p.trained.tolist() for p in parts if p.trained is not None), [])) == list(range(len(batch.rows)))


@dataclasses.dataclass
class ContextGroup:
    at: int
    ranks: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return self.ranks


@settings(max_examples=60, deadline=None)
@given(batches(), SHAPES, st.sampled_from(["halves", "interleaved", "latent"]), st.sampled_from([1.0, 1.3]))
def test_tokens_are_turned_by_their_positions_as_megatron_turns_them(
    batch: PackedBatch, shape: tuple[int, int], kind: str, mscale: float
):
    kinds = {"rotary_interleaved": kind == "interleaved", "multi_latent_attention": kind == "latent"}
    for rank, row in enumerate(rows(batch, *shape)):
        limits = row.packing.cu_seqlens_q
        freqs = torch.rand(row.packing.max_seqlen_q, 1, 1, 6, dtype=torch.float64) * 6
        for width in (6, 10):  # all of a head, and a part
            heads = torch.randn(row.tokens.shape[1], 2, width, dtype=torch.float64, requires_grad=True)
            weights = torch.randn_like(heads)
            outputs = [
                turn(heads, where, freqs, **kinds, mscale=mscale, cp_group=ContextGroup(rank, shape[0]))
                for turn, where in ((rotate, limits), (rotate_as_megatron_does, limits.clone()))
            ]
            torch.testing.assert_close(*outputs)
            torch.testing.assert_close(*(torch.autograd.grad((out * weights).sum(), heads)[0] for out in outputs))


@settings(max_examples=20, deadline=None)
@given(SHAPES)
def test_without_a_batch_a_rank_has_a_row_that_predicts_nothing(shape: tuple[int, int]):
    for part in rows(None, *shape):
        assert part.trained is None and part.predicting.tolist() == [0]
        assert not part.has_label.any() and not part.tokens.any()
        assert part.tokens.shape[1] % shape[1] == 0


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 30), max_size=12), st.integers(1, 4), st.integers(1, 3), st.booleans(),
    st.none() | st.integers(5, 60),
)  # fmt: skip
def test_replicas_have_equally_many_micro_batches_of_every_sample_once(
    lengths: list[int], replicas: int, multiple: int, balance: bool, max_tokens: int | None
):
    positions = [3 * i + 1 for i in range(len(lengths))]
    length_of = dict(zip(positions, lengths, strict=True))
    shares = schedule(
        positions, Lengths(length_of), replicas, multiple=multiple, max_tokens=max_tokens, balance=balance
    )
    assert len(shares) == replicas
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) % multiple == 0
    assert sorted(p for share in shares for micro_batch in share for p in micro_batch) == positions
    for micro_batch in (m for share in shares for m in share):
        tokens = sum(length_of[p] for p in micro_batch)
        assert len(micro_batch) <= 1 or (max_tokens is not None and tokens <= max_tokens)
