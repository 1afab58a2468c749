"""The nuclei that response tokens were sampled from, checked, and laid out as the rows of a micro-batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slime.trainer.algorithms.nucleus import Nuclei
from slime.trainer.process.moving import to_device
from slime.types.errors import InvalidField
from slime.types.sample import Sample

# Offsets into the ids are int32.
MOST = 2**31 - 1


def check_nuclei(sample: Sample, mask: np.ndarray, vocab_size: int) -> None:
    """Raises InvalidField where a token with loss mask 1 has no nucleus, or one with ids outside the vocabulary.

    mask: float32 [R].
    """
    if not mask.any():
        return
    ids, offsets = sample.array("rollout_top_p_token_ids"), sample.array("rollout_top_p_token_offsets")
    if ids is None or offsets is None or len(offsets) != sample.response_length + 1:
        raise InvalidField(
            "rollout_top_p_token_offsets", None if offsets is None else len(offsets),
            f"{sample.response_length + 1} offsets of nuclei, for --rollout-top-p and --rollout-top-k: an answer of "
            f"the engine has them in its meta_info, for append_response_tokens (sample {sample.index})",
        )  # fmt: skip
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        wrong = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise InvalidField("rollout_top_p_token_ids", wrong, f"ids in [0, {vocab_size}) (sample {sample.index})")
    empty = np.flatnonzero((np.diff(offsets) == 0) & (mask > 0))
    if len(empty):
        raise InvalidField(
            f"rollout_top_p_token_offsets[{int(empty[0])}]", "an empty nucleus",
            f"the tokens that a trained one was sampled from (sample {sample.index})",
        )  # fmt: skip


def refuse_nuclei(sample: Sample, mask: np.ndarray) -> None:
    """Raises InvalidField where trained tokens were drawn from nuclei, and the trainer scores the whole vocabulary."""
    ids = sample.array("rollout_top_p_token_ids")
    if ids is not None and len(ids) and mask.any():
        raise InvalidField(
            "rollout_top_p_token_ids", len(ids),
            "none without --rollout-top-p or --rollout-top-k, which the trainer needs as the engines do (sample "
            f"{sample.index})",
        )  # fmt: skip


def lay_nuclei(
    samples: Sequence[Sample], masks: Sequence[np.ndarray], targets: np.ndarray, device: torch.device | str
) -> Nuclei:
    """Lays out the nuclei of tokens with loss mask 1, of samples that passed `check_nuclei`.

    masks: float32 [R] each; targets: int [J] ids of these tokens. A target that its nucleus lacks is added to it.
    """
    ids, sizes = [], []
    for sample, mask in zip(samples, masks, strict=True):
        of_sample, offsets = sample.array("rollout_top_p_token_ids"), sample.array("rollout_top_p_token_offsets")
        if mask.any() and of_sample is not None and offsets is not None:
            counts = np.diff(offsets)
            ids.append(of_sample[np.repeat(mask > 0, counts)])
            sizes.append(counts[mask > 0])
    rows = np.arange(len(targets), dtype=np.int64)
    of_each = np.repeat(rows, np.concatenate(sizes)) if sizes else rows
    every = np.concatenate(ids).astype(np.int64) if ids else np.empty(0, np.int64)
    # One number for a row and an id, so that sorting them brings equal ones together.
    drawn = rows << 32 | targets.astype(np.int64)
    keys = np.unique(np.concatenate([of_each << 32 | every, drawn]))
    if len(keys) > MOST:
        raise InvalidField(
            "rollout_top_p_token_ids", len(keys),
            f"at most {MOST} ids in the nuclei of a micro-batch: lower --rollout-top-p, add --rollout-top-k, or make "
            "micro-batches smaller",
        )  # fmt: skip
    found = keys & 0xFFFFFFFF, keys >> 32, np.searchsorted(keys, drawn)
    return Nuclei(*(to_device(torch.from_numpy(each.astype(np.int32)), device) for each in found))
