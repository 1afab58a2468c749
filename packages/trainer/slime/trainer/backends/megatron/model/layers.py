"""Layers that megatron-core lacks or computes wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
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

from slime.trainer.backends.megatron.model.attention import GatherTokens, planned
from slime.trainer.backends.megatron.model.norms import LATENT_EPSILON
from slime.trainer.backends.megatron.model.rotary import rotate
from slime.trainer.backends.sparse_attention import choose, indexer_inputs
from slime.types.errors import NotAvailable

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


class SparseLatentAttention(LatentAttention):
    """Latent attention whose queries attend to the keys that an indexer chooses, over packed rows.

    Each rank has the indexer whole, and chooses for all queries that it attends with, from the keys of all ranks. The
    indexer does not train.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        c = self.config
        heads, width = c.dsa_indexer_n_heads, c.dsa_indexer_head_dim
        made: dict[str, Any] = {
            "dtype": c.params_dtype,
            "device": "cpu" if c.use_cpu_initialization else torch.cuda.current_device(),
        }
        self.wq_b = nn.Linear(c.q_lora_rank, heads * width, bias=False, **made)
        self.wk = nn.Linear(c.hidden_size, width, bias=False, **made)
        self.k_norm = nn.LayerNorm(width, eps=LATENT_EPSILON, **made)
        self.weights_proj = nn.Linear(c.hidden_size, heads, bias=False, **made)
        for module in (self.wq_b, self.wk, self.k_norm, self.weights_proj):
            module.requires_grad_(False)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **others
        )
        self.core_attention.chosen = self._choose(hidden_states.detach(), found[3].detach(), packed_seq_params)
        return found

    @torch.no_grad()
    def _choose(self, hidden: Tensor, latent: Tensor, packing: PackedSeqParams | None) -> Tensor | None:
        """[s, 1, hidden], [s, q_lora_rank] -> [T, k] int32; with sequence parallelism s is a part of T."""
        if packing is None:
            raise NotAvailable("sparse attention takes packed rows", field="packed_seq_params")
        hidden = hidden[:, 0]
        if self.config.sequence_parallel:
            hidden, latent = (gather_from_sequence_parallel_region(each) for each in (hidden, latent))
        # Transformer Engine has the norm inside the linear layer behind it.
        weight = getattr(self.linear_q_up_proj, "layer_norm_weight", None)
        if weight is not None:
            latent = nn.functional.rms_norm(latent, latent.shape[-1:], weight, LATENT_EPSILON)
        limits = packing.cu_seqlens_q
        length = self.rotary_pos_emb.get_rotary_seq_len(None, None, hidden, self.config, packing)
        freqs = self.rotary_pos_emb(length, packed_seq=True)
        query, key, weights = indexer_inputs(
            self, hidden, latent, lambda x: rotate(x, limits, freqs, multi_latent_attention=True)
        )
        group = self.pg_collection.cp
        if group.size() > 1:
            key = GatherTokens.apply(key, group)
        return choose(query, key, weights, planned(packing, group, key.device), self.config.dsa_indexer_topk)

    def _checkpointed_attention_forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **others: Any
    ) -> Tensor:
        core, chosen = self.core_attention, self.core_attention.chosen

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            # Other rows may have come between the pass and its repetition.
            core.chosen = chosen
            output: Tensor = core(query, key, value, attention_mask, **others)
            return output

        output: Tensor = tensor_parallel.checkpoint(attend, False, query, key, value)
        return output


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
