"""A packed row as one rank of a model takes it in: sequences end to end (thd), cut for context parallelism.

    L  tokens of the row that this rank holds        U  tokens of the row that are scored
    n  ranks of context parallelism

Context parallelism cuts a sequence into 2n chunks; rank r holds chunks r and 2n-1-r, which balances causal attention.
Sequences are padded at their ends, where causal attention hides the padding from all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slime.trainer.backends.megatron.model.attention import runs_of
from slime.trainer.backends.megatron.model.delta_nets import WholeRow
from slime.trainer.backends.megatron.model.rotary import set_positions
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.batching.runs import Runs


@dataclasses.dataclass(frozen=True)
class RowImages:
    """The images of a row, and where this rank holds their tokens; all of it is on the CPU.

    arguments: of the vision tower, for all images of the row, which has `count` tokens of them. places: [j] int64 into
    L, of the image tokens that are held here; numbers: [j] int64, which of `count` each is.
    """

    arguments: Mapping[str, Tensor]
    count: int
    places: Tensor
    numbers: Tensor


@dataclasses.dataclass(frozen=True)
class RankRow:
    """The part of a packed row that one rank holds.

    tokens, positions, labels: [1, L] int64; has_label: [1, L] float32. A label is the next token of the sequence,
    where there is one.

    predicting: [j] int64 into L, at least one; trained: [j] int64 into U, or None where this rank predicts nothing that
    is trained.
    """

    tokens: Tensor
    positions: Tensor
    labels: Tensor
    has_label: Tensor
    packing: PackedSeqParams
    predicting: Tensor
    trained: Tensor | None
    experts: Tensor | None = None  # [L, layers, k] int16; -1 for padding


def cut(
    batch: PackedBatch | None,
    rank: int,
    size: int,
    multiple: int,
    device: torch.device,
    length: int | None = None,
    *,
    image_token: int = -1,
) -> RankRow:
    """Cuts the part of `batch` for context parallel rank `rank` of `size`. A `batch` of None makes a row of one token
    that predicts nothing.

    multiple: L is a multiple of it, for sequence parallelism, or of twice it if `size` is above 1. length: L, where it
    has to be longer than needed. image_token: its id, for a model that reads images. A batch with prompts that several
    responses see requires a `size` of 1.
    """
    if batch is None:
        tokens = firsts = np.zeros(1, dtype=np.int64)
        lengths, rows = np.ones(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
    else:
        assert batch.runs.keys is None and (size == 1 or batch.runs.shared is None)
        tokens = batch.tokens[0].cpu().numpy()
        lengths = np.array(batch.runs.q_lengths)
        firsts = batch.position_ids[0].cpu().numpy()[np.cumsum(lengths) - lengths]
        rows = batch.rows.cpu().numpy()
    starts = np.cumsum(lengths) - lengths
    unit = 2 * size if size > 1 else 1
    padded = -(-lengths // unit) * unit
    # A sequence of nothing but padding completes the multiple; no other sequence sees it.
    extra = -int(padded.sum()) % (multiple * unit if size > 1 else multiple)
    if length is not None:
        extra = length * size - int(padded.sum())
    if extra:
        padded = np.append(padded, extra)
        lengths, starts, firsts = np.append(lengths, 0), np.append(starts, len(tokens)), np.append(firsts, 0)
    ends = np.cumsum(padded)
    total = int(ends[-1])

    # [total] of the padded row: where a token comes from, -1 for padding.
    source = np.full(total, -1, dtype=np.int64)
    positions = np.zeros(total, dtype=np.int64)
    for start, held_length, end, width, first in zip(starts, lengths, ends, padded, firsts, strict=True):
        source[end - width : end - width + held_length] = np.arange(start, start + held_length)
        positions[end - width : end] = first + np.arange(width)
    held = _held(ends, padded, rank, size)
    follower = np.append(source[1:], -1)
    follower[ends - 1] = -1

    place = np.full(len(tokens) + 1, -1, dtype=np.int64)  # of each token of the row among those held here
    place[source[held]] = np.arange(len(held))
    place[-1] = -1
    predicting = place[rows]
    predicted = np.flatnonzero(predicting >= 0)

    def take(values: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.where(where >= 0, values[np.maximum(where, 0)], 0)

    def to(array: np.ndarray) -> Tensor:
        return torch.as_tensor(array).to(device)

    limits = to(np.concatenate([[0], ends]).astype(np.int32))
    held_positions = to(positions[held])
    set_positions(limits, held_positions, _grid(batch, source[held], device))
    longest = int(padded.max())
    packing = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=limits, cu_seqlens_kv=limits,
        # Rotary embeddings need it, too: responses begin where their prompt ends.
        max_seqlen_q=int(positions.max()) + 1, max_seqlen_kv=longest,
    )  # fmt: skip
    # Input of our own attention, computed here without waiting for the device or compiling a layer.
    runs = runs_of([0, *ends.tolist()], rank, size, device)
    if batch is not None:
        runs = dataclasses.replace(runs, shared=batch.runs.shared)
    packing.slime_runs = runs  # type: ignore[attr-defined]
    packing.slime_whole = _whole(padded, ends, rank, size, device)  # type: ignore[attr-defined]
    packing.slime_images = _images(batch, source[held], image_token)  # type: ignore[attr-defined]
    return RankRow(
        tokens=to(take(tokens, source[held]))[None],
        positions=held_positions[None],
        labels=to(take(tokens, follower[held]))[None],
        has_label=to((follower[held] >= 0).astype(np.float32))[None],
        packing=packing,
        predicting=to(predicting[predicted] if len(predicted) else np.zeros(1, dtype=np.int64)),
        trained=to(predicted) if len(predicted) else None,
        experts=_experts(batch, source[held]),
    )


def _whole(padded: np.ndarray, ends: np.ndarray, rank: int, size: int, device: torch.device) -> WholeRow:
    runs = Runs.apart(padded.tolist(), device)
    if size == 1:
        return WholeRow(runs)
    parts = [_held(ends, padded, other, size) for other in range(size)]
    order = np.argsort(np.concatenate(parts))
    return WholeRow(runs, torch.as_tensor(order).to(device), torch.as_tensor(parts[rank]).to(device))


def _images(batch: PackedBatch | None, source: np.ndarray, image_token: int) -> RowImages | None:
    if batch is None or not batch.images or batch.image_places is None:
        return None
    seen = ((batch.tokens[0] == image_token) & batch.image_places[0]).cpu().numpy()
    number = np.where(seen, np.cumsum(seen) - 1, -1)
    # Padding comes from nowhere.
    held = np.where(source >= 0, number[source], -1)
    places = np.flatnonzero(held >= 0)
    return RowImages(batch.images, int(seen.sum()), torch.as_tensor(places), torch.as_tensor(held[places]))


def _grid(batch: PackedBatch | None, source: np.ndarray, device: torch.device) -> Tensor | None:
    """[3, L]; 0 for padding, which no token sees."""
    if batch is None or batch.grid_positions is None:
        return None
    places = torch.as_tensor(source).to(device)
    return torch.where(places < 0, 0, batch.grid_positions[:, 0][:, places.clamp(min=0)])


def _experts(batch: PackedBatch | None, source: np.ndarray) -> Tensor | None:
    if batch is None or batch.experts is None:
        return None
    places = torch.as_tensor(source).to(batch.experts.device)
    taken = batch.experts[places.clamp(min=0)]
    return torch.where((places < 0)[:, None, None], -1, taken)


def _held(ends: np.ndarray, padded: np.ndarray, rank: int, size: int) -> np.ndarray:
    """Places of the padded row that rank `rank` holds, in its order."""
    if size == 1:
        return np.arange(ends[-1])
    parts = []
    for end, width in zip(ends, padded, strict=True):
        chunk = width // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            first = end - width + number * chunk
            parts.append(np.arange(first, first + chunk))
    return np.concatenate(parts)
