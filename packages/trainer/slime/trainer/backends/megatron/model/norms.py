"""Norms of a model without Transformer Engine and Apex: torch's, which also work on a part of the sequence."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from slime.types.errors import InvalidSetting

# DeepSeek's own code and transformers leave this one as it is, whatever `rms_norm_eps` is.
LATENT_EPSILON = 1e-6


class RMSNorm(nn.RMSNorm):
    """[..., hidden_size] -> the same."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        _mark(self, config)


class LayerNorm(nn.LayerNorm):
    """[..., hidden_size] -> the same."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        _mark(self, config)


class LatentNorm(RMSNorm):
    """Norm of the compressed queries, keys and values of latent attention; its epsilon is LATENT_EPSILON."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, LATENT_EPSILON, **kwargs)


class ZeroCenteredRMSNorm(RMSNorm):
    """A norm that multiplies by 1 + weight, added up in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **kwargs: Any) -> None:
        super().__init__(config, hidden_size, eps, **kwargs)
        nn.init.zeros_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = nn.functional.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


def norm_of(config: TransformerConfig) -> type[nn.Module]:
    """Returns the class for `config.normalization`. Raises InvalidSetting for one that it has no class for."""
    if config.layernorm_zero_centered_gamma:
        if config.normalization != "RMSNorm":
            raise InvalidSetting.requires("apply_layernorm_1p", "normalization RMSNorm, or Transformer Engine")
        return ZeroCenteredRMSNorm
    classes = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if config.normalization not in classes:
        raise InvalidSetting.one_of("normalization", classes, got=config.normalization)
    return classes[config.normalization]


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()


def _mark(norm: nn.Module, config: TransformerConfig) -> None:
    # On a part of the sequence a rank has a part of the gradient: Megatron adds those of marked parameters up.
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
