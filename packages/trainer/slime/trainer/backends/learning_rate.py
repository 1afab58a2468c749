"""The learning rate of every update."""

from __future__ import annotations

import math

from slime.trainer.settings.trainer import TrainerSettings


def learning_rate(settings: TrainerSettings, update: int) -> float:
    """Returns the learning rate of an update, counted from 0: linear warm-up to `lr`, then constant, or down to
    `min_lr`."""
    warmup, end = settings.warmup_updates, settings.lr_decay_iters
    if update < warmup:
        return settings.lr * (update + 1) / warmup
    if settings.lr_decay_style == "constant" or end is None:
        return settings.lr
    progress = min(1.0, (update - warmup) / max(1, end - warmup))
    left = 1.0 - progress if settings.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * left
