"""Instructions of the processor that decide in which data type torch computes on it."""

from __future__ import annotations

from typing import Any


def multiplies_bfloat16(torch: Any) -> bool:
    """Returns whether the processor multiplies matrices in bfloat16; others do it many times slower than in float32.

    torch: the module. It is an argument because this package does not import it.
    """
    return bool(torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported())
