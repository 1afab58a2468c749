"""Norms of a model without Transformer Engine and Apex: torch's, which also work on a part of the sequence."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

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

    def forward(self, x: Tensor) -> Tensor:
        normed = nn.functional.rms_norm(x.float(), self.normalized_shape, eps=self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class NormAcrossHeads(nn.Module):
    """RMS norm of all heads together, which tensor-parallel ranks share: [s, b, h, d] -> the same, with h heads of a
    rank.

    The mean of squares is that of all ranks. Each rank has the whole weight and uses the part of its heads; Megatron
    adds up the gradients of norms of queries and keys over tensor-parallel ranks. Where ranks have copies of a key,
    each of them counts as often as every other.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, heads: int) -> None:
        """hidden_size: the width of a head; heads: those of all ranks."""
        super().__init__()
        self.heads, self.eps = heads, eps
        self.weight = nn.Parameter(torch.ones(heads * hidden_size, dtype=config.params_dtype, device=_device(config)))
        _mark(self, config)

    def forward(self, x: Tensor) -> Tensor:
        group = parallel_state.get_tensor_model_parallel_group()
        held, width, size = x.shape[-2], x.shape[-1], group.size()
        squares = x.float().square().sum((-2, -1), keepdim=True)
        if size > 1:
            squares = _SumOverRanks.apply(squares, group)
        normed = (x.float() * torch.rsqrt(squares / (size * held * width) + self.eps)).to(x.dtype)
        first = group.rank() * self.heads // size
        return normed * self.weight.view(self.heads, width)[first : first + held]


class _SumOverRanks(torch.autograd.Function):
    """The sum of a tensor over ranks that each go on with it: the gradients of all are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def use_norms_across_heads(attention: ModuleSpec, config: TransformerConfig) -> None:
    """Gives queries and keys of an attention a norm over all heads in place of one for each head."""
    assert config.num_query_groups is not None
    for name, heads in (("q_layernorm", config.num_attention_heads), ("k_layernorm", config.num_query_groups)):
        setattr(attention.submodules, name, ModuleSpec(module=NormAcrossHeads, params={"heads": heads}))


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
