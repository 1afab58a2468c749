"""Rotary embeddings of packed rows by the position of each token.

Megatron's own function, where Transformer Engine's does not take its place, reads the lengths of the sequences from the
device in every layer, twice, and makes sines and cosines anew each time. Here they are made once for a row: before the
first layer (`of_row`), or in the first for latent attention, whose layers have embeddings of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings import rope_utils
from torch import Tensor

rotate_as_megatron_does = rope_utils._apply_rotary_pos_emb_thd


def install() -> None:
    """Replaces Megatron's function by `rotate`, except for rows that `set_positions` does not know.
    Idempotent."""
    rope_utils._apply_rotary_pos_emb_thd = rotate


def set_positions(limits: Tensor, positions: Tensor, grid: Tensor | None = None) -> None:
    """Has `rotate` find `positions`, [L] int64 of the tokens that this rank holds, with a row's `limits`, which every
    layer hands on. grid: [3, L], where tokens of images have a position for each axis."""
    limits.slime_positions = positions  # type: ignore[attr-defined]
    limits.slime_grid = grid  # type: ignore[attr-defined]
    limits.slime_turns = {}  # type: ignore[attr-defined]


def of_row(freqs: Tensor, limits: Any, axes: Sequence[int] = ()) -> Tensor:
    """Makes cosines and sines [2, L, 1, 1, r] float32 of freqs [longest sequence, 1, 1, r], for `rotate`.

    axes: [r] whose position each channel takes, where tokens have one for each axis. A row that `set_positions` does
    not know keeps its freqs.
    """
    if not hasattr(limits, "slime_positions"):
        return freqs
    if limits.slime_grid is not None:
        by_channel = limits.slime_grid[torch.tensor(axes, device=freqs.device)]
        angles = freqs.flatten(1).gather(0, by_channel.T)[:, None, None]
    else:
        angles = freqs[limits.slime_positions]
    return torch.stack([angles.cos(), angles.sin()])


def rotate(
    t: Tensor,
    cu_seqlens: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    cp_group: Any = None,
) -> Tensor:
    """t [L, h, d] -> [L, h, d], the first r of d turned by freqs at each token's position.

    freqs: [longest sequence, 1, 1, r], or what `of_row` made of it.

    multi_latent_attention: pairs lie side by side, and come out as halves.
    """
    if freqs.dim() == 5:
        cos, sin = ((part[:, 0] * mscale).to(t.dtype) for part in freqs.unbind())
    elif hasattr(cu_seqlens, "slime_positions"):
        cos, sin = _turns(cu_seqlens, freqs, mscale, t.dtype)
    else:
        kinds = rotary_interleaved, multi_latent_attention
        return rotate_as_megatron_does(t, cu_seqlens, freqs, *kinds, mscale, cp_group)
    turned, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], dim=-1)
    if multi_latent_attention:
        turned = torch.cat([turned[..., 0::2], turned[..., 1::2]], dim=-1)
    turned = turned * cos + _half_turned(turned, rotary_interleaved) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _half_turned(t: Tensor, interleaved: bool) -> Tensor:
    if interleaved:
        return torch.stack([-t[..., 1::2], t[..., 0::2]], dim=-1).flatten(-2)
    first, second = t.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def _turns(limits: Any, freqs: Tensor, mscale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns cosines and sines, [L, 1, r], kept with the row."""
    kept = limits.slime_turns.get((mscale, dtype))
    # Layers of two kinds may have frequencies of their own.
    if kept is None or kept[0] is not freqs:
        angles = freqs[limits.slime_positions, 0]
        kept = freqs, (angles.cos() * mscale).to(dtype), (angles.sin() * mscale).to(dtype)
        limits.slime_turns[mscale, dtype] = kept
    return kept[1], kept[2]
