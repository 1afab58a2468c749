"""Copies host tensors to a device without blocking the host."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copies a host tensor. On CUDA the copy is queued on the current stream, and the host does not wait for it."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # A copy from memory that is not pinned would block the host.
    return tensor.pin_memory().to(device, non_blocking=True)
