"""Log-probs and entropies of chosen tokens from logits, in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def token_log_probs(logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk: int = -1) -> Tensor:
    """log softmax(logits / temperature) at `targets`.

    logits: [K, V] any float dtype; targets: [K] int64. Returns [K] float32. chunk > 0: that many rows at a time, whose
    float32 copies are made again in the backward pass, for K * V that does not fit.
    """
    if chunk <= 0 or len(logits) <= chunk:
        return _log_probs(logits, targets, temperature)
    parts = zip(logits.split(chunk), targets.split(chunk), strict=True)
    return torch.cat([checkpoint(_log_probs, part, ids, temperature, use_reentrant=False) for part, ids in parts])


def _log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    scaled = logits.float() if temperature == 1.0 else logits.float() / temperature
    return -F.cross_entropy(scaled, targets, reduction="none")


def token_entropy(logits: Tensor, temperature: float = 1.0, chunk: int = -1) -> Tensor:
    """Entropy in nats of softmax(logits / temperature): [K, V] -> [K] float32."""
    if chunk <= 0 or len(logits) <= chunk:
        return _entropy(logits, temperature)
    return torch.cat([checkpoint(_entropy, part, temperature, use_reentrant=False) for part in logits.split(chunk)])


def _entropy(logits: Tensor, temperature: float) -> Tensor:
    log_probs = F.log_softmax(logits.float() / temperature, dim=-1)
    return -(log_probs.exp() * log_probs).sum(-1)
