"""Layers that megatron-core lacks or computes wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from slime.trainer.backends.megatron.model.norms import LATENT_EPSILON

Output = tuple[Tensor, Tensor | None]
Add = Callable[[Output, Tensor, float], Tensor]


@dataclasses.dataclass
class PostNormSubmodules(TransformerLayerSubmodules):
    """Submodules of PostNormLayer. post_self_attn_layernorm, post_mlp_layernorm: norms of the outputs before they are
    added to the residual."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class PostNormLayer(TransformerLayer):
    """GLM-4's layer: h + norm(attention(norm(h))), then the same with the MLP."""

    def __init__(self, config: TransformerConfig, submodules: PostNormSubmodules, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        shape = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(submodules.post_self_attn_layernorm, **shape)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, **shape)
        self.self_attn_bda: Any = _after(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: Any = _after(self.post_mlp_layernorm, self.mlp_bda)


def _after(norm: nn.Module, bias_dropout_add: Callable[[bool, bool], Add]) -> Callable[[bool, bool], Add]:
    def choose(training: bool, fused: bool) -> Add:
        add = bias_dropout_add(training, fused)

        def normed(output: Output, residual: Tensor, dropout: float) -> Tensor:
            hidden, bias = output
            return add((norm(hidden if bias is None else hidden + bias), None), residual, dropout)

        return normed

    return choose


class LatentAttention(MLASelfAttention):
    """Multi-latent attention whose compressed keys get their full gradient under tensor parallelism.

    All heads share the rotated part of a key. Where the down projection is split over ranks, Megatron gives each rank
    only the gradient of its own heads; here the gradients of all ranks are summed.

    Norms inside Transformer Engine's linear layers have the epsilon of `LatentNorm`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("linear_q_up_proj", "linear_kv_up_proj"):
            if hasattr(getattr(self, name, None), "layer_norm_weight"):
                getattr(self, name).eps = LATENT_EPSILON
        width = self.config.kv_lora_rank + self.config.qk_pos_emb_head_dim
        if self.linear_kv_down_proj.weight.shape[0] != width:
            self.linear_kv_down_proj.register_forward_hook(self._whole)

    def _whole(self, module: nn.Module, inputs: Any, output: Output) -> Output:
        """[s, b, width / ranks] -> [s / ranks, b, width]."""
        both = gather_from_tensor_model_parallel_region(output[0])
        # The next layer gathers the rotated part along the sequence again, and sums its gradients.
        return scatter_to_sequence_parallel_region(both), output[1]


class PredictionLayer(MultiTokenPredictionLayer):
    """A multi-token prediction layer that can be recomputed with packed rows.

    Megatron passes all arguments of the recomputed part to autograd, which cannot handle a description of packed rows.
    """

    def _checkpointed_forward(self, forward_func: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in kwargs.items() if name not in tensors}

        def forward(*values: Tensor) -> Tensor:
            return forward_func(*args, **dict(zip(tensors, values, strict=True)), **others)

        return tensor_parallel.checkpoint(forward, self.config.distribute_saved_activations, *tensors.values())
