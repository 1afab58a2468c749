"""Packs samples into one row [1, T] without padding.

    T  input tokens of the row               K  response tokens of its samples, end to end
    P  a prompt's tokens                     J  response tokens with loss mask 1

Position ids restart with every sample, and no token sees another sample. Where samples have equal prompts (a group
does), the prompt is laid out once and every response sees it and itself: the same numbers for a fraction of the work.
The last token of a response predicts nothing that is trained, so it is not fed in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime.trainer.algorithms.nucleus import Nuclei
from slime.trainer.batching.nuclei import lay_nuclei
from slime.trainer.batching.runs import Runs
from slime.types.errors import InvalidField, NotAvailable, counted
from slime.types.models.vision import Vision
from slime.types.sample import Sample


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """A micro-batch. Index tensors are int64, the others float32 or bool, all on one device."""

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
    experts: Tensor | None = None  # [T, layers, k] int16: experts that the engine chose; -1 where it chose none
    nuclei: Nuclei | None = None  # of J tokens, where they were sampled from a part of the vocabulary
    grid_positions: Tensor | None = None  # [3, 1, T] position ids of a model that numbers image tokens by their grid

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
    explicit_mask = sample.array("loss_mask")
    if explicit_mask is None:
        return np.ones(sample.response_length, dtype=np.float32)
    mask = np.asarray(explicit_mask, dtype=np.float32)
    if len(mask) != sample.response_length:
        raise InvalidField(
            "loss_mask", len(mask), f"response_length = {sample.response_length} (sample {sample.index})"
        )
    return mask


def check_sample(
    sample: Sample, vocab_size: int, *, needs_log_probs: bool = False, vision: Vision | None = None
) -> None:
    """Raises InvalidField, or NotAvailable for images without `vision`, if the model cannot train on the sample."""
    tokens, response = sample.array("tokens"), sample.response_length
    total = len(tokens)
    if not 0 <= response < max(total, 1):
        raise InvalidField("response_length", response, f"less than len(tokens) = {total} (sample {sample.index})")
    if total and not 0 <= tokens.min() <= tokens.max() < vocab_size:
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
    gather: bool = False,
    multiple: int = 1,
    vision: Vision | None = None,
    experts: tuple[int, int] | None = None,
    nuclei: bool = False,
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Packs `samples` into a row (each passed `check_sample`). rewards, weights: one number a sample.

    share_prompts: whether equal prompts are laid out once; they come first in the row, and their responses behind them.
    gather: the keys of such a prompt are copied for each response, which attention with a window needs.
    multiple: T is padded to a multiple of it, by a sequence of padding.
    experts: (layers, k) to lay out the experts of the samples' tokens too. nuclei: whether their nuclei are laid out,
    which passed `check_nuclei`.
    """
    layout = _Layout(samples, vision, experts)
    families = _families(samples, share_prompts)
    shared = [(owner, members) for owner, members in enumerate(families) if len(members) > 1]
    ends = [layout.lay_prompt(owner, members[0]) for owner, members in shared]
    for (owner, members), end in zip(shared, ends, strict=True):
        for number in members:
            layout.lay_response(owner, number, end)
    sharing = [length for length, *_ in layout.laid]
    alone = []
    for owner, members in enumerate(families):
        if len(members) == 1:
            before = layout.filled
            layout.lay_response(owner, members[0], layout.lay_prompt(owner, members[0]))
            alone.append(layout.filled - before)
    if padding := -layout.filled % multiple:
        alone.append(padding)
        layout.lay(np.zeros(padding, dtype=np.int64), 0, len(families), 0)
    runs = _runs(sharing[: len(shared)], sharing[len(shared) :], [len(m) for _, m in shared], alone, gather, device)
    written = [t[len(t) - s.response_length :] for s, t in zip(samples, layout.tokens_of, strict=True)]
    held, firsts, owners, branches = np.array(layout.laid, dtype=np.int64).T
    places = np.arange(layout.filled) - np.repeat(np.cumsum(held) - held - firsts, held)
    lengths = [s.response_length for s in samples]
    rows = _predictors(layout.responses, lengths)
    masks = [loss_mask(s) for s in samples]
    mask = np.concatenate(masks)
    trained = np.flatnonzero(mask)
    targets = np.concatenate(written)
    engine_log_probs = [s.array("rollout_log_probs") for s in samples]
    known = any(p is not None for p in engine_log_probs)
    log_probs = [
        np.full(length, np.nan) if p is None else p for p, length in zip(engine_log_probs, lengths, strict=True)
    ]

    def to(array: np.ndarray, dtype: torch.dtype) -> Tensor:
        return torch.as_tensor(array, dtype=dtype).to(device)

    joined = vision.join(layout.images) if vision is not None and layout.images else {}
    in_prompt = np.repeat(np.isin(owners, layout.illustrated) & (branches == 0), held) if joined else None
    return PackedBatch(
        tokens=to(np.concatenate(layout.row), torch.int64)[None],
        position_ids=to(places, torch.int64)[None],
        runs=runs,
        rows=to(rows[trained], torch.int64),
        targets=to(targets[trained], torch.int64),
        trained=to(trained, torch.int64),
        mask=to(mask, torch.float32),
        segments=to(np.repeat(np.arange(len(samples)), lengths), torch.int64),
        weights=to(np.repeat(np.asarray(weights, dtype=np.float64), lengths) * mask, torch.float32),
        rewards=to(np.asarray(rewards), torch.float32),
        rollout_log_probs=to(np.concatenate(log_probs), torch.float32) if known else None,
        lengths=lengths,
        total_lengths=[len(tokens) for tokens in layout.tokens_of],
        positions=list(positions),
        images={name: torch.from_numpy(array) for name, array in joined.items()} or None,
        image_places=None if in_prompt is None else torch.from_numpy(in_prompt).to(device)[None],
        # All rows of a step are on the device at once.
        experts=to(np.concatenate(layout.routed), torch.int16) if experts is not None else None,
        nuclei=lay_nuclei(samples, masks, targets[trained], device) if nuclei else None,
        grid_positions=to(
            _grid_positions(places, np.repeat(owners, held), np.repeat(branches, held), layout.counted), torch.int64
        )[:, None]
        if layout.counted
        else None,
    )


class _Layout:
    """A row while sequences are laid into it, one behind the other. experts: (layers, k) where they are laid out."""

    def __init__(self, samples: Sequence[Sample], vision: Vision | None, experts: tuple[int, int] | None) -> None:
        self.tokens_of = [sample.array("tokens") for sample in samples]
        self.row: list[np.ndarray] = []
        self.laid: list[tuple[int, int, int, int]] = []  # length, first position, which prompt, 0 or which response
        self.responses = [(0, 0)] * len(samples)  # the prompt's last token, and where the response starts
        self.images: list[dict[str, Any]] = []
        self.illustrated: list[int] = []  # prompts that have images
        self.counted: dict[int, np.ndarray] = {}  # the grid positions of such a prompt
        self.routed: list[np.ndarray] = []
        self.filled = 0
        self._samples, self._vision, self._experts = samples, vision, experts

    def lay(self, tokens: np.ndarray, first_position: int, owner: int, branch: int, number: int | None = None) -> int:
        """Returns the place of the first token."""
        self.row.append(tokens)
        if self._experts is not None:
            sample = None if number is None else self._samples[number]
            self.routed.append(_experts(sample, first_position, len(tokens), self._experts))
        self.laid.append((len(tokens), first_position, owner, branch))
        self.filled += len(tokens)
        return self.filled - len(tokens)

    def lay_prompt(self, owner: int, number: int) -> int:
        """Returns the place behind the last token."""
        sample = self._samples[number]
        prompt = self.tokens_of[number][: -sample.response_length or None]
        if sample.multimodal_train_inputs:
            self.images.append(sample.multimodal_train_inputs)
            self.illustrated.append(owner)
            if self._vision is not None and self._vision.grids:
                seen = prompt == self._vision.image_token
                self.counted[owner] = self._vision.positions(seen, sample.multimodal_train_inputs)
        return self.lay(prompt, 0, owner, 0, number) + len(prompt)

    def lay_response(self, owner: int, number: int, prompt_end: int) -> None:
        tokens, length = self.tokens_of[number], self._samples[number].response_length
        start = self.lay(tokens[len(tokens) - length : -1], len(tokens) - length, owner, number + 1, number)
        self.responses[number] = prompt_end - 1, start


def _experts(sample: Sample | None, first: int, count: int, shape: tuple[int, int]) -> np.ndarray:
    """[count, layers, k]: of the tokens from `first` on; -1 for those that the engine was not fed with."""
    found = np.full((count, *shape), -1, dtype=np.int16)
    known = sample.rollout_routed_experts if sample is not None else None
    if known is not None:
        part = known[first : first + count]
        found[: len(part)] = part
    return found


def _predictors(responses: Sequence[tuple[int, int]], lengths: Sequence[int]) -> np.ndarray:
    """[K]: the token before each response token, which for the first is the prompt's last."""
    held = np.asarray(lengths, dtype=np.int64)
    last_of_prompt, start = np.array(responses, dtype=np.int64).T
    ends = np.cumsum(held)
    found: np.ndarray = np.arange(held.sum()) - np.repeat(ends - held - start + 1, held)
    found[(ends - held)[held > 0]] = last_of_prompt[held > 0]
    return found


def _grid_positions(
    places: np.ndarray, owner: np.ndarray, branch: np.ndarray, counted: dict[int, np.ndarray]
) -> np.ndarray:
    """[3, T]: grid positions of prompts with images, and of their responses, which continue after the largest."""
    found = np.tile(places, (3, 1))
    for prompt, positions in counted.items():
        found[:, (owner == prompt) & (branch == 0)] = positions
        found[:, (owner == prompt) & (branch > 0)] += positions.max() + 1 - positions.shape[1]
    return found


def _families(samples: Sequence[Sample], share_prompts: bool) -> list[list[int]]:
    """Groups samples with equal prompts, in the order of the first of each."""
    found: dict[Any, list[int]] = {}
    for number, sample in enumerate(samples):
        prompt = _prompt_of(sample) if share_prompts and len(samples) > 1 else None
        found.setdefault(number if prompt is None else prompt, []).append(number)
    return list(found.values())


def _prompt_of(sample: Sample) -> tuple[bytes, str | None] | None:
    """Returns a key that is equal for equal prompts; None where the images of a prompt are not known."""
    if sample.multimodal_train_inputs and sample.multimodal_train_input_id is None:
        return None
    tokens = np.asarray(sample.array("tokens"), dtype=np.int32)
    return tokens[: len(tokens) - sample.response_length].tobytes(), sample.multimodal_train_input_id


def prompt_digest(sample: Sample) -> str:
    """Returns a text that differs where prompts differ."""
    prompt = _prompt_of(sample)
    if prompt is None:
        return f"alone {id(sample)}"
    return hashlib.blake2b(prompt[0], key=(prompt[1] or "").encode()[:64], digest_size=12).hexdigest()


def _runs(
    prompts: Sequence[int],
    responses: Sequence[int],
    sizes: Sequence[int],
    alone: Sequence[int],
    gather: bool,
    device: torch.device | str,
) -> Runs:
    """Returns the runs of shared prompts with their responses, then of samples alone, laid end to end.

    All are given by their lengths; `sizes` says how many responses each prompt has.
    """
    if not any(responses):
        return Runs.apart([*prompts, *alone], device)
    starts = np.cumsum([0, *sizes])
    of_prompts = [responses[a:b] for a, b in itertools.pairwise(starts)]
    if not gather:
        return Runs.sharing(prompts, of_prompts, alone, device)
    limits = np.cumsum([0, *prompts])
    lengths = [*prompts, *responses, *alone]
    before = [np.arange(0)] * len(prompts)
    before += [np.arange(*limits[i : i + 2]) for i, size in enumerate(sizes) for _ in range(size)]
    before += [np.arange(0)] * len(alone)
    ends = np.cumsum(lengths)
    laid = [
        (length, np.concatenate([seen, np.arange(end - length, end)]))
        for length, end, seen in zip(lengths, ends, before, strict=True)
        if length
    ]
    return Runs.gathered([length for length, _ in laid], [keys for _, keys in laid], device)
