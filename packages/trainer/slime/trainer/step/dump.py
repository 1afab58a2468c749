"""Writes a rank's training data of an iteration as a safetensors file.

    S  samples        L  tokens of all of them        K  response tokens of all of them

    positions, updates, total_lengths, response_lengths [S] int64; rewards [S] float32
    tokens [L] int32
    loss_masks, weights, advantages, returns, log_probs, ref_log_probs, rollout_log_probs, entropy,
    values, teacher_log_probs [K] float32

Samples lie end to end, in the order of `positions`, their places in the iteration; `updates` is the optimizer update
of each. Entries that were not computed are absent. The file's metadata has format, rollout_id and rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from slime.trainer.settings.debug import TRAIN_DATA_FORMAT
from slime.types.directories import path_errors
from slime.types.files import whole_file

if TYPE_CHECKING:
    from slime.trainer.step.targets import Work


def write_train_data(template: str, rollout: int, rank: int, updates: list[Work]) -> None:
    """Writes this rank's part to `template` with {rollout_id} and {rank} replaced; raises as `whole_file`."""
    from safetensors.torch import save

    parts: dict[str, list[Tensor]] = {}
    for number, work in enumerate(updates):
        for i, batch in enumerate(work.batches):
            if batch is None:
                continue
            targets = work.target(i)
            tensors: dict[str, Tensor | None] = {
                "positions": torch.tensor(batch.positions),
                "updates": torch.full((batch.num_samples,), number),
                "total_lengths": torch.tensor(batch.total_lengths),
                "response_lengths": torch.tensor(batch.lengths),
                "rewards": batch.rewards,
                "tokens": torch.as_tensor(np.concatenate([work.samples[p].array("tokens") for p in batch.positions])),
                "loss_masks": batch.mask,
                "weights": batch.weights,
                "rollout_log_probs": batch.rollout_log_probs,
            }
            if targets is not None:
                tensors |= {
                    "advantages": targets.advantages,
                    "returns": targets.returns,
                    "log_probs": targets.old_log_probs,
                    "ref_log_probs": targets.ref_log_probs,
                    "entropy": targets.entropy,
                    "values": targets.values,
                    "teacher_log_probs": targets.teacher_log_probs,
                }
            for name, values in tensors.items():
                if values is not None:
                    parts.setdefault(name, []).append(values.detach().cpu())
    path = Path(template.format(rollout_id=rollout, rank=rank))
    metadata = {"format": TRAIN_DATA_FORMAT, "rollout_id": str(rollout), "rank": str(rank)}
    with path_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, "wb") as file:
        file.write(save({name: torch.cat(values) for name, values in parts.items()}, metadata=metadata))
