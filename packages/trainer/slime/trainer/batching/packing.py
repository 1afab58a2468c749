"""Packs samples into one row [1, T] without padding.

    T  input tokens of the row               K  response tokens of its samples, end to end
    P  a prompt's tokens                     J  response tokens with loss mask 1
    U  those of J that are scored: a turn that several samples have in common is scored once for all of them

Position ids restart with every sample, and no token sees another sample. Where samples have equal prompts (a group
does) or first turns (trunks.py), these are laid out once and the rest of every sample sees them and itself: the same
numbers for a fraction of the work. Each sample's loss takes its own advantage, mask and weight at every token that it
has, so the gradients of shared tokens add up.
The last token of a response predicts nothing that is trained, so it is not fed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slime.trainer.algorithms.nucleus import Nuclei
from slime.trainer.batching.layout import RowLayout
from slime.trainer.batching.nuclei import lay_nuclei
from slime.trainer.batching.runs import Runs
from slime.trainer.batching.trunks import Trunk
from slime.trainer.process.moving import to_device
from slime.types.errors import InvalidField, NotAvailable, counted
from slime.types.models.vision import Vision
from slime.types.sample import Sample


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """A micro-batch. Index tensors are int64, the others float32 or bool, all on one device."""

    tokens: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    runs: Runs  # which tokens see which
    rows: Tensor  # [U] the token of the row whose logits predict
    targets: Tensor  # [U] the token predicted
    trained: Tensor  # [J] into K
    mask: Tensor  # [K] 1.0 or 0.0
    segments: Tensor  # [K] sample of a response token
    weights: Tensor  # [K] weight in the loss; 0 where the mask is
    rewards: Tensor  # [S]
    rollout_log_probs: Tensor | None  # [K]; NaN in samples without; None where no sample has them
    lengths: list[int]  # S response lengths; their sum is K
    total_lengths: list[int]  # S prompt + response lengths
    positions: list[int]  # S positions in the step
    images: dict[str, Tensor] | None = None  # the model's arguments for the images of the row, in order; on the CPU
    image_places: Tensor | None = None  # [1, T] bool: of prompts that have images
    experts: Tensor | None = None  # [T, layers, k] int16: experts that the engine chose; -1 where it chose none
    nuclei: Nuclei | None = None  # of J tokens, where they were sampled from a part of the vocabulary
    grid_positions: Tensor | None = None  # [3, 1, T] position ids of a model that numbers image tokens by their grid
    scored: Tensor | None = None  # [J] into U; None where both are the same

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def spread(self, values: Tensor) -> Tensor:
        """[U, ...] -> [J, ...]"""
        # By brackets, whose gradients are added up in one order on a GPU too.
        return values if self.scored is None else values[self.scored]

    def scatter(self, values: Tensor) -> Tensor:
        """[U] -> [K], 0 where the mask is."""
        return values.new_zeros(len(self.mask)).index_put((self.trained,), self.spread(values))


def loss_mask(sample: Sample) -> np.ndarray:
    """[R] float32: ones where the sample has none, zeros where it is removed. Raises InvalidField on a wrong length."""
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.float32)
    explicit_mask = sample.array("loss_mask")
    if explicit_mask is None:
        return np.ones(sample.response_length, dtype=np.float32)
    mask = np.asarray(explicit_mask, dtype=np.float32)
    if len(mask) != sample.response_length:
        raise InvalidField(
            "loss_mask", len(mask), f"response_length = {sample.response_length} (sample {sample.index})"
        )
    return mask


def check_ids(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raises InvalidField, naming the first token id, and its sample, that is not in [0, vocab_size)."""
    every = np.concatenate([sample.array("tokens") for sample in samples]) if samples else np.empty(0, np.int32)
    # A negative id is a large one without its sign: one pass over the tokens finds both.
    if not len(every) or int(every.view(np.uint32).max()) < vocab_size:
        return
    for sample in samples:
        tokens = sample.array("tokens")
        for first in np.flatnonzero((tokens < 0) | (tokens >= vocab_size))[:1]:
            expected = f"ids in [0, {vocab_size}) (sample {sample.index})"
            raise InvalidField(f"tokens[{first}]", int(tokens[first]), expected)


def check_sample(sample: Sample, *, needs_log_probs: bool = False, vision: Vision | None = None) -> None:
    """Raises InvalidField, or NotAvailable for images without `vision`, if the model cannot train on the sample, of
    which `check_ids` has checked the tokens."""
    response, total = sample.response_length, len(sample.array("tokens"))
    if not 0 <= response < max(total, 1):
        raise InvalidField("response_length", response, f"less than len(tokens) = {total} (sample {sample.index})")
    log_probs = sample.array("rollout_log_probs")
    # A sample that trains nothing may lack them: it may have failed before an engine saw it.
    if log_probs is None and needs_log_probs and loss_mask(sample).any():
        raise InvalidField(
            "rollout_log_probs",
            None,
            f"log-probs of the engine, for --use-tis and --use-rollout-logprobs (sample {sample.index})",
        )
    if log_probs is not None and len(log_probs) != response:
        raise InvalidField("rollout_log_probs", len(log_probs), f"response_length = {response} (sample {sample.index})")
    if vision is None and (sample.multimodal_inputs or sample.multimodal_train_inputs):
        raise NotAvailable(
            f"the model reads text alone, and sample {sample.index} has images",
            field="multimodal_inputs",
        )
    if sample.multimodal_inputs and not sample.multimodal_train_inputs:
        raise InvalidField(
            "multimodal_train_inputs", None, f"what the processor made of the images (sample {sample.index})"
        )


def check_experts(sample: Sample, layers: int, top_k: int, experts: int) -> None:
    """Raises InvalidField where the sample does not say which of `experts` its tokens were sent to.

    A sample that trains nothing may leave that out.
    """
    chosen, rows = sample.rollout_routed_experts, len(sample.array("tokens")) - 1
    if chosen is None and not loss_mask(sample).any():
        return
    if chosen is None or chosen.shape != (rows, layers, top_k):
        raise InvalidField(
            "rollout_routed_experts", None if chosen is None else list(chosen.shape),
            f"[{rows}, {layers}, {top_k}] (tokens but the last, layers, experts of a token), for "
            f"--use-rollout-routing-replay: the engine returns them (sample {sample.index})",
        )  # fmt: skip
    # -1 is a token or a layer that the engine did not route.
    outside = (chosen < -1) | (chosen >= experts)
    if outside.any():
        raise InvalidField(
            "rollout_routed_experts",
            int(chosen[outside][0]),
            f"experts from 0 to {experts - 1} (sample {sample.index})",
        )


def check_teacher(sample: Sample) -> None:
    """Raises InvalidField where the sample has no log-probs of a teacher for its response tokens.

    A sample that trains nothing needs none: it may have failed before a teacher saw it.
    """
    found = sample.array("teacher_log_probs")
    if found is None and not loss_mask(sample).any():
        return
    if found is None or len(found) != sample.response_length:
        raise InvalidField(
            "teacher_log_probs", None if found is None else len(found),
            f"{counted(sample.response_length, 'log-prob')} of the teacher, for --opd-type sglang, as --custom-rm-path "
            f"slime.rollout.on_policy_distillation.reward_func sets them (sample {sample.index})",
        )  # fmt: skip


def pack(
    samples: Sequence[Sample],
    positions: Sequence[int],
    rewards: Sequence[float],
    weights: Sequence[float],
    *,
    share_prompts: bool = True,
    trunks: Sequence[Trunk | None] | None = None,
    gather: bool = False,
    multiple: int = 1,
    vision: Vision | None = None,
    experts: tuple[int, int] | None = None,
    nuclei: bool = False,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Packs `samples` into a row (which passed `check_ids` and `check_sample`). rewards, weights: one number a sample.

    share_prompts: whether equal prompts are laid out once; they come first in the row, and their responses behind them.
    trunks: for each sample what it shares in place of its prompt, if that leaves fewer tokens, see `Prefixes.trunks`.
    gather: the keys of a shared part are copied for each sample, which attention with a window needs.
    multiple: T is padded to a multiple of it, by a sequence of padding.
    experts: (layers, k) to lay out the experts of the samples' tokens too. nuclei: whether their nuclei are laid out,
    which passed `check_nuclei`.
    """
    chosen = trunks if trunks is not None else [None] * len(samples)
    layout = RowLayout(samples, chosen, share=share_prompts, multiple=multiple, vision=vision, experts=experts)
    written = [t[len(t) - s.response_length :] for s, t in zip(samples, layout.tokens_of, strict=True)]
    lengths = [s.response_length for s in samples]
    rows, in_trunk = layout.predictors()
    masks = [loss_mask(s) for s in samples]
    mask = np.concatenate(masks)
    trained = np.flatnonzero(mask)
    rows, targets = rows[trained], np.concatenate(written)[trained]
    of_nuclei = lay_nuclei(samples, masks, targets, device) if nuclei else None
    # Every sample's token has a nucleus of its own.
    scored, own = (None, None) if nuclei else _scored_once(rows, in_trunk[trained])
    if scored is not None:
        rows, targets = rows[scored], targets[scored]
    engine_log_probs = [s.array("rollout_log_probs") for s in samples]
    known = any(p is not None for p in engine_log_probs)
    log_probs = [
        np.full(length, np.nan) if p is None else p for p, length in zip(engine_log_probs, lengths, strict=True)
    ]

    segments = np.repeat(np.arange(len(samples)), lengths)

    def to(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return to_device(torch.as_tensor(array, dtype=dtype), device)

    joined = vision.join(layout.images) if vision is not None and layout.images else {}
    grid_positions = layout.grid_positions()
    return PackedBatch(
        tokens=to(layout.tokens, torch.int64)[None],
        position_ids=to(layout.positions, torch.int64)[None],
        runs=layout.runs(gather, device),
        rows=to(rows, torch.int64),
        targets=to(targets, torch.int64),
        scored=None if own is None else to(own, torch.int64),
        trained=to(trained, torch.int64),
        mask=to(mask, torch.float32),
        segments=to(segments, torch.int64),
        weights=to(np.asarray(weights, dtype=np.float64)[segments] * mask, torch.float32),
        rewards=to(np.asarray(rewards), torch.float32),
        rollout_log_probs=to(np.concatenate(log_probs), torch.float32) if known else None,
        lengths=lengths,
        total_lengths=[len(tokens) for tokens in layout.tokens_of],
        positions=list(positions),
        images={name: torch.from_numpy(array) for name, array in joined.items()} or None,
        image_places=to_device(torch.from_numpy(layout.image_places()), device)[None] if joined else None,
        # All rows of a step are on the device at once.
        experts=to(layout.experts(), torch.int16) if experts is not None else None,
        nuclei=of_nuclei,
        grid_positions=None if grid_positions is None else to(grid_positions, torch.int64)[:, None],
    )


def _scored_once(rows: np.ndarray, in_trunk: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns ([U] into J, [J] into U) where tokens in trunks that several samples train come once; None for none.

    rows: [J] the token before each; in_trunk: [J] bool. Tokens keep their order.
    """
    if not in_trunk.any():
        return None, None
    keys = np.where(in_trunk, rows, -1 - np.arange(len(rows)))
    _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    if len(firsts) == len(rows):
        return None, None
    order = np.argsort(firsts)
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    return firsts[order], place[inverse]
