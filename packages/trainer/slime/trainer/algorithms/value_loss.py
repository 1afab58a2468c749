"""Loss of a critic per token; nothing is masked or averaged here.

Shapes: every tensor [K], the response tokens of S samples end to end.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """(loss, 1 where the clipped value decides), as PPO's implementation has it (arXiv:2005.12729, section 3).

    loss = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), without a factor of 1/2.
    """
    unclipped = (values - returns).square()
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(unclipped, clipped), (clipped > unclipped).to(values.dtype)
