"""Samples as one packed row [1, T] without padding.

    T  input tokens of the row               K  response tokens of its samples, end to end
    P  a prompt's tokens                     J  those of the K whose loss mask is 1

Position ids restart with every sample, and no token sees another sample. Where samples have equal prompts (a group
does), the prompt is laid out once and every response sees it and itself: the same numbers for a fraction of the work.
A response's last token predicts nothing that is trained, so it is not fed in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.trainer.batching.runs import Runs
from slime.types.errors import InvalidField, NotAvailable
from slime.types.sample import Sample
from slime.types.vision import Vision


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """One micro-batch. Index tensors are int64, the others float32 or bool, all on one device."""

    tokens: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    runs: Runs  # which tokens see which
    rows: Tensor  # [J] the token of the row whose logits predict
    targets: Tensor  # [J] the token predicted
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
    grid_positions: Tensor | None = None  # [3, 1, T] what position_ids are to a model that counts images by their grid

    @property
    def num_samples(self) -> int:
        return len(self.lengths)

    def scatter(self, values: Tensor) -> Tensor:
        """[J] -> [K], 0 where the mask is."""
        return values.new_zeros(len(self.mask)).index_put((self.trained,), values)


def loss_mask(sample: Sample) -> np.ndarray:
    """[R] float32: ones where the sample has none, zeros where it is removed. Raises InvalidField on a wrong length."""
    if sample.remove_sample:
        return np.zeros(sample.response_length, dtype=np.float32)
    own = sample.array("loss_mask")
    if own is None:
        return np.ones(sample.response_length, dtype=np.float32)
    mask = np.asarray(own, dtype=np.float32)
    if len(mask) != sample.response_length:
        raise InvalidField(
            "loss_mask", len(mask), f"response_length = {sample.response_length} (sample {sample.index})"
        )
    return mask


def check_sample(
    sample: Sample, vocab_size: int, *, needs_log_probs: bool = False, vision: Vision | None = None
) -> None:
    """Raises InvalidField, or NotAvailable for images without `vision`, where the model cannot be fed with it."""
    tokens, response = sample.array("tokens"), sample.response_length
    total = len(tokens)
    if not 0 <= response < max(total, 1):
        raise InvalidField("response_length", response, f"less than len(tokens) = {total} (sample {sample.index})")
    if total and not 0 <= int(np.min(tokens)) <= int(np.max(tokens)) < vocab_size:
        first = int(np.argmax((tokens < 0) | (tokens >= vocab_size)))
        raise InvalidField(f"tokens[{first}]", int(tokens[first]), f"ids in [0, {vocab_size}) (sample {sample.index})")
    log_probs = sample.array("rollout_log_probs")
    if log_probs is None and needs_log_probs:
        raise InvalidField(
            "rollout_log_probs",
            None,
            f"log-probs of the engine, for --use-tis and --use-rollout-logprobs (sample {sample.index})",
        )
    if log_probs is not None and len(log_probs) != response:
        raise InvalidField("rollout_log_probs", len(log_probs), f"response_length = {response} (sample {sample.index})")
    if vision is None and (sample.multimodal_inputs or sample.multimodal_train_inputs):
        raise NotAvailable(
            f"the model reads text alone, and sample {sample.index} has images: --train-backend fsdp trains models "
            "that read images",
            field="multimodal_inputs",
        )
    if sample.multimodal_inputs and not sample.multimodal_train_inputs:
        raise InvalidField(
            "multimodal_train_inputs", None, f"what the processor made of the images (sample {sample.index})"
        )


def pack(
    samples: Sequence[Sample],
    positions: Sequence[int],
    rewards: Sequence[float],
    weights: Sequence[float],
    *,
    share_prompts: bool = True,
    multiple: int = 1,
    vision: Vision | None = None,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """One row of `samples` (each passed `check_sample`). rewards, weights: one number a sample.

    multiple: T is one of it, by a sequence of padding.
    """
    row: list[np.ndarray] = []
    places: list[np.ndarray] = []
    owners: list[np.ndarray] = []  # which prompt a token belongs to
    branches: list[np.ndarray] = []  # 0 in a prompt, else which response
    rows: list[np.ndarray] = []
    prompts: dict[tuple[bytes | int, str | None], tuple[int, int]] = {}  # which prompt, and where it starts
    images: list[dict[str, Any]] = []
    illustrated: list[int] = []  # prompts that have images
    counted: dict[int, np.ndarray] = {}  # the grid positions of such a prompt
    runs: list[tuple[range, range]] = []  # tokens end to end, and the prompt that they see besides
    filled = 0

    def lay(tokens: np.ndarray, first_position: int, owner: int, branch: int) -> int:
        nonlocal filled
        row.append(tokens)
        places.append(np.arange(first_position, first_position + len(tokens)))
        owners.append(np.full(len(tokens), owner))
        branches.append(np.full(len(tokens), branch))
        filled += len(tokens)
        return filled - len(tokens)

    for branch, sample in enumerate(samples, start=1):
        tokens = np.asarray(sample.array("tokens"), dtype=np.int64)
        split = len(tokens) - sample.response_length
        unknown = sample.multimodal_train_inputs and sample.multimodal_train_input_id is None
        shareable = share_prompts and not unknown
        key = tokens[:split].tobytes() if shareable else branch, sample.multimodal_train_input_id
        if key not in prompts:
            if sample.multimodal_train_inputs:
                images.append(sample.multimodal_train_inputs)
                illustrated.append(len(prompts))
                if vision is not None and vision.grids:
                    shown = tokens[:split] == vision.image_token
                    counted[len(prompts)] = vision.positions(shown, sample.multimodal_train_inputs)
            prompts[key] = (len(prompts), lay(tokens[:split], 0, len(prompts), 0))
            runs.append((range(filled - split, filled), range(0)))
        owner, start = prompts[key]
        response_start = lay(tokens[split:-1], split, owner, branch)
        if response_start == start + split:
            runs[-1] = range(start, filled), range(0)
        elif filled > response_start:
            runs.append((range(response_start, filled), range(start, start + split)))
        predictors = np.arange(response_start - 1, response_start - 1 + sample.response_length)
        predictors[:1] = start + split - 1
        rows.append(predictors)
    if filled % multiple:
        padding = lay(np.zeros(-filled % multiple, dtype=np.int64), 0, len(prompts), 0)
        runs.append((range(padding, filled), range(0)))
    masks = [loss_mask(s) for s in samples]
    mask = np.concatenate(masks)
    trained = np.flatnonzero(mask)
    targets = np.concatenate(
        [np.asarray(s.array("tokens"), dtype=np.int64)[len(s.array("tokens")) - s.response_length :] for s in samples]
    )
    lengths = [s.response_length for s in samples]
    told = [s.array("rollout_log_probs") for s in samples]
    known = any(p is not None for p in told)
    log_probs = [np.full(length, np.nan) if p is None else p for p, length in zip(told, lengths, strict=True)]

    def to(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device)

    joined = vision.join(images) if vision is not None and images else {}
    in_prompt = np.isin(np.concatenate(owners), illustrated) & (np.concatenate(branches) == 0)
    return PackedBatch(
        tokens=to(np.concatenate(row), torch.int64)[None],
        position_ids=to(np.concatenate(places), torch.int64)[None],
        runs=_runs(runs, device),
        rows=to(np.concatenate(rows)[trained], torch.int64),
        targets=to(targets[trained], torch.int64),
        trained=to(trained, torch.int64),
        mask=to(mask, torch.float32),
        segments=to(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        weights=to(np.repeat(np.asarray(weights, dtype=np.float64), lengths) * mask, torch.float32),
        rewards=to(np.asarray(rewards), torch.float32),
        rollout_log_probs=to(np.concatenate(log_probs), torch.float32) if known else None,
        lengths=lengths,
        total_lengths=[len(s.array("tokens")) for s in samples],
        positions=list(positions),
        images={name: torch.from_numpy(array) for name, array in joined.items()} or None,
        image_places=torch.from_numpy(in_prompt).to(device)[None] if joined else None,
        grid_positions=to(_grid_positions(places, owners, branches, counted), torch.int64)[:, None]
        if counted
        else None,
    )


def _grid_positions(
    places: Sequence[np.ndarray],
    owners: Sequence[np.ndarray],
    branches: Sequence[np.ndarray],
    counted: dict[int, np.ndarray],
) -> np.ndarray:
    """[3, T]: those of prompts with images, and of their responses, which go on behind the largest."""
    found = np.tile(np.concatenate(places), (3, 1))
    owner, branch = np.concatenate(owners), np.concatenate(branches)
    for prompt, positions in counted.items():
        found[:, (owner == prompt) & (branch == 0)] = positions
        found[:, (owner == prompt) & (branch > 0)] += positions.max() + 1 - positions.shape[1]
    return found


def _runs(laid: Sequence[tuple[range, range]], device: torch.device | str) -> Runs:
    """Of tokens end to end, each with the tokens that it sees before them."""
    lengths = [len(own) for own, _ in laid]
    if not any(before for _, before in laid):
        return Runs.apart(lengths, device)
    return Runs.gathered(
        lengths, [np.concatenate([np.asarray(before, np.int64), np.asarray(own)]) for own, before in laid], device
    )
