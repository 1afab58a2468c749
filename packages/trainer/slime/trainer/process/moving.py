"""Copies tensors to the device of a row, which may be computing another row meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copies a tensor of the host. A GPU gets it after what it was given before, for which the host does not wait."""
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    # From memory that is not pinned, the host would wait.
    return tensor.pin_memory().to(device, non_blocking=True)
