"""AdamW and its learning rate."""

from __future__ import annotations

import math

import torch
from torch import nn

from slime.trainer.settings import TrainerSettings


def build_adamw(model: nn.Module, settings: TrainerSettings) -> torch.optim.AdamW:
    """Matrices are decayed, vectors (norms, biases) are not. The learning rate is set before every update."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (settings.adam_beta1, settings.adam_beta2)
    return torch.optim.AdamW(
        [g for g in groups if g["params"]], lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True
    )


def learning_rate(settings: TrainerSettings, update: int) -> float:
    """Of the update with this number, counted from 0: linear warm-up to `lr`, then constant, or down to `min_lr`."""
    if update < settings.lr_warmup_iters:
        return settings.lr * (update + 1) / settings.lr_warmup_iters
    if settings.lr_decay_style == "constant" or settings.lr_decay_iters is None:
        return settings.lr
    span = settings.lr_decay_iters - settings.lr_warmup_iters
    progress = min(1.0, (update - settings.lr_warmup_iters) / span)
    left = 1.0 - progress if settings.lr_decay_style == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * left
