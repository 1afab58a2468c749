"""AdamW."""

from __future__ import annotations

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
