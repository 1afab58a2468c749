"""INT4 in groups: eight values of a row in an int32, and a scale for each group, as Kimi-K2-Thinking and models in the
`pack-quantized` format of compressed-tensors have it.

    weight = value * scale, with values from -8 to 7

Shapes: a matrix is [R, C], its values plus 8 are [R, C / 8] in int32 (column 8 i + j in bits 4 j to 4 j + 3 of word i),
its scales [R, C / G] with groups of G columns, 32 or 128 in published models.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BITS, PER_WORD = 4, 8
LOWEST, HIGHEST = -8, 7
# A weight NAME is in these tensors.
PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX = "_packed", "_scale", "_shape"
SUFFIXES = (PACKED_SUFFIX, SCALE_SUFFIX, SHAPE_SUFFIX)
# Integers with the bits of a scale.
_SAME_SIZE = {2: torch.int16, 4: torch.int32}
# Elements that are converted at a time, in float32.
CHUNK = 16 << 20


def pack(values: Tensor) -> Tensor:
    """Returns the int32 [R, C / 8] of values [R, C] from -8 to 7; C is a multiple of 8."""
    unsigned = values.to(torch.int32).sub_(LOWEST).view(values.shape[0], -1, PER_WORD)
    packed = unsigned[..., 0].clone()
    for place in range(1, PER_WORD):
        packed |= unsigned[..., place] << (BITS * place)
    return packed


def unpack(packed: Tensor) -> Tensor:
    """Returns the values [R, C] in int8 of an int32 [R, C / 8]."""
    shifts = torch.arange(0, BITS * PER_WORD, BITS, dtype=torch.int32, device=packed.device)
    values = (packed[..., None] >> shifts).bitwise_and_((1 << BITS) - 1).add_(LOWEST)
    return values.to(torch.int8).view(packed.shape[0], -1)


def quantize(
    weight: Tensor, group: int, *, scale_dtype: torch.dtype = torch.bfloat16, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Returns (int32 [R, C / 8], scales [R, C / group]) of a matrix [R, C], on its device.

    Of several scales each group gets the one with the smallest squared error in the weight's dtype (`_candidates`). So
    weights that were INT4 already, with a value of 7 or -8 or -7 in each group, keep their values bit for bit. A group
    of zeros has the scale 1, one with a number that is not finite such a scale. Computes in float32, at most `chunk`
    elements (and at least one row) at a time.
    """
    rows, columns = weight.shape
    packed = torch.empty(rows, columns // PER_WORD, dtype=torch.int32, device=weight.device)
    scales = torch.empty(rows, columns // group, dtype=scale_dtype, device=weight.device)
    step = max(1, chunk // max(1, columns))
    for first in range(0, rows, step):
        part = weight[first : first + step]
        values, scales[first : first + step] = _quantize_groups(part.reshape(part.shape[0], -1, group), scale_dtype)
        packed[first : first + step] = pack(values.view(part.shape))
    return packed, scales


def _quantize_groups(groups: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns (values in int8, scales) of groups in the last dimension."""
    exact = groups.to(torch.float32)
    values, scales, errors = None, None, None
    for scale in _candidates(exact, scale_dtype):
        steps = scale.to(torch.float32)[..., None]
        found = (exact / steps).round_().clamp_(LOWEST, HIGHEST)
        error = (found * steps).to(groups.dtype).to(torch.float32).sub_(exact).square_().sum(-1)
        if values is None or scales is None or errors is None:
            values, scales, errors = found, scale, error
            continue
        better = error < errors
        values = torch.where(better[..., None], found, values)
        scales, errors = torch.where(better, scale, scales), torch.where(better, error, errors)
    assert values is not None and scales is not None
    return values.to(torch.int8), scales


def _candidates(groups: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yields scales of groups, none of which cuts off more than the rounding of the scale itself.

    Values reach to 7 on both sides; or to 7 on one side and -8 on the other, whichever needs more. Their neighbours are
    there for weights that were rounded to 8 bits after they had been multiplied by a scale.
    """
    high, low = groups.amax(-1), groups.amin(-1)
    tiny = torch.finfo(dtype).tiny
    for largest in (torch.maximum(high, -low) / HIGHEST, torch.maximum(high / HIGHEST, low / LOWEST)):
        scale = torch.where(largest == 0, 1.0, largest.clamp(min=tiny)).to(dtype)
        bits = scale.view(_SAME_SIZE[dtype.itemsize])
        yield scale
        yield (bits - 1).view(dtype)
        yield (bits + 1).view(dtype)


def dequantize(packed: Tensor, scales: Tensor) -> Tensor:
    """Returns the float32 [R, C] of int32 [R, C / 8] and scales [R, C / group]."""
    values = unpack(packed).to(torch.float32)
    groups = values.view(*scales.shape, -1).mul_(scales.to(torch.float32)[..., None])
    return groups.view(values.shape)
