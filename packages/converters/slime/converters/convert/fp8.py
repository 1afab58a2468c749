"""FP8 in blocks: a matrix in float8 (e4m3) and a factor for each block of it, as DeepSeek-V3 and Qwen3-*-FP8 have it.

    factor = max |weight| of the block / 448        weight = float8 * factor

Shapes: a matrix is [R, C], its factors are [ceil(R / tall), ceil(C / wide)] with blocks of [tall, wide], 128 x 128 in
all published models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

DTYPE = torch.float8_e4m3fn
# A weight NAME has its factors in NAME_scale_inv.
SCALE_SUFFIX = "_scale_inv"
LARGEST = torch.finfo(DTYPE).max
# The smallest normal number: no other weight, divided by its factor, exceeds the range of float8.
SMALLEST_FACTOR = torch.finfo(torch.float32).tiny
# Elements that are converted at a time, in float32.
CHUNK = 16 << 20


def grid(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the shape of the factors of a matrix of `shape`."""
    rows, columns = shape
    return -(-rows // block[0]), -(-columns // block[1])


def quantize(
    weight: Tensor,
    block: tuple[int, int],
    *,
    factor_dtype: torch.dtype = torch.float32,
    power_of_two: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Returns (float8 [R, C], factors) of a matrix [R, C], on its device.

    Computes in float32, at most `chunk` elements (and at least one row of blocks) at a time. factor_dtype: in which
    factors are rounded before weights are divided by them. power_of_two: rounds factors up to the next power of two
    (`scale_fmt: ue8m0`). A block of zeros has the factor 1.
    """
    rows, columns = weight.shape
    tall, wide = block
    quantized = torch.empty(rows, columns, dtype=DTYPE, device=weight.device)
    factors = torch.empty(grid(weight.shape, block), dtype=factor_dtype, device=weight.device)
    padded = factors.shape[1] * wide
    step = max(1, chunk // max(1, tall * padded)) * tall
    for first in range(0, rows, step):
        part = weight[first : first + step].to(torch.float32)
        height = part.shape[0]
        high = -(-height // tall)
        part = functional.pad(part, (0, padded - columns, 0, high * tall - height))
        blocks = part.view(high, tall, -1, wide)
        factor = _factors(blocks.abs().amax((1, 3)), factor_dtype, power_of_two)
        factors[first // tall : first // tall + high] = factor
        scaled = blocks.div(factor.to(torch.float32)[:, None, :, None]).clamp_(-LARGEST, LARGEST)
        quantized[first : first + height] = scaled.view(high * tall, padded)[:height, :columns].to(DTYPE)
    return quantized, factors


def _factors(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    factor = (largest / LARGEST).clamp(min=SMALLEST_FACTOR)
    if power_of_two:
        # Carries into the exponent unless all bits of the mantissa are 0.
        factor = ((factor.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(largest == 0, 1.0, factor).to(dtype)
