"""Gated delta nets in a Megatron model: Qwen3-Next's and Qwen3.5's, over packed rows that ranks share.

megatron-core's own layer needs flash-linear-attention and takes no packed rows. This one has the tensors of Qwen3.5's
Hugging Face checkpoint, whole on every rank: tensor-parallel ranks compute the same, from all of the row;
context-parallel ranks gather the row, and each goes on with the tokens that it holds.

    L  tokens of the row that this rank holds       T  tokens of the row, on all context-parallel ranks
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_linear_attention_pattern
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from slime.trainer.backends.delta_rule import causal_convolution, gated_delta_rule
from slime.trainer.backends.megatron.model.attention import GatherTokens
from slime.trainer.batching.runs import Runs
from slime.types.errors import NotAvailable


@dataclasses.dataclass(frozen=True)
class WholeRow:
    """The sequences of a row on all context-parallel ranks.

    order: [T] int64, where each token of the row is among the tokens of all ranks, one rank after the other; held: [L]
    int64, the tokens of the row that this rank holds. Both None where one rank has all.
    """

    runs: Runs
    order: Tensor | None = None
    held: Tensor | None = None


def place(block: TransformerBlockSubmodules, config: TransformerConfig, vp_stage: int | None, norm: Any) -> None:
    """Puts delta nets into the layers of a stage that have them, each behind a norm."""
    if config.linear_attention_freq is None:
        return
    pattern = get_linear_attention_pattern(config)
    offset = get_transformer_layer_offset(config, vp_stage=vp_stage)
    made: dict[int, ModuleSpec] = {}
    for number, layer in enumerate(block.layer_specs):
        if not pattern[offset + number]:
            continue
        if id(layer) not in made:
            linear = copy.copy(layer)
            attention = ModuleSpec(module=DeltaNetAttention)
            linear.submodules = dataclasses.replace(layer.submodules, self_attention=attention, input_layernorm=norm)
            made[id(layer)] = linear
        block.layer_specs[number] = made[id(layer)]


class DeltaNetAttention(MegatronModule):
    """Takes the place of SelfAttention in a layer: [L, 1, hidden] -> [L, 1, hidden], of packed rows."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: Any = None,
        layer_number: int = 1,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.linear_attn = GatedDeltaNet(config)
        self._context = pg_collection.cp if pg_collection is not None else parallel_state.get_context_parallel_group()

    def forward(
        self, hidden_states: Tensor, *_: Any, packed_seq_params: PackedSeqParams | None = None, **others: Any
    ) -> tuple[Tensor, None]:
        whole: WholeRow | None = getattr(packed_seq_params, "slime_whole", None)
        if whole is None:
            raise NotAvailable("delta nets take packed rows that this trainer cut", field="packed_seq_params")
        hidden = hidden_states
        if self.config.sequence_parallel:
            # Every rank has the whole gradient of its output, so it takes its part of that of its input.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        row = hidden[:, 0]
        if whole.order is not None and whole.held is not None:
            row = GatherTokens.apply(row, self._context)[whole.order]
        output = self.linear_attn(row, whole.runs)
        if whole.held is not None:
            output = output[whole.held]
        output = output[:, None]
        return (scatter_to_sequence_parallel_region(output) if self.config.sequence_parallel else output), None


class GatedDeltaNet(nn.Module):
    """[T, hidden] -> [T, hidden], with the names and shapes of Qwen3.5's Hugging Face tensors."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        made: dict[str, Any] = {
            "dtype": config.params_dtype,
            "device": "cpu" if config.use_cpu_initialization else torch.cuda.current_device(),
        }
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys, self.values = key_heads * self.key_width, value_heads * self.value_width
        self.epsilon, hidden = config.layernorm_epsilon, config.hidden_size
        channels, taps = 2 * self.keys + self.values, config.linear_conv_kernel_dim
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False, **made)
        self.in_proj_z = nn.Linear(hidden, self.values, bias=False, **made)
        self.in_proj_b = nn.Linear(hidden, value_heads, bias=False, **made)
        self.in_proj_a = nn.Linear(hidden, value_heads, bias=False, **made)
        self.conv1d = nn.Conv1d(channels, channels, taps, groups=channels, bias=False, **made)
        self.dt_bias = nn.Parameter(torch.ones(value_heads, **made))
        self.A_log = nn.Parameter(torch.empty(value_heads, **made).uniform_(1, 16).log_())
        self.norm = nn.RMSNorm(self.value_width, eps=config.layernorm_epsilon, **made)
        self.out_proj = nn.Linear(self.values, hidden, bias=False, **made)

    def forward(self, hidden: Tensor, runs: Runs) -> Tensor:
        mixed = F.silu(causal_convolution(self.in_proj_qkv(hidden), self.conv1d.weight.squeeze(1), runs))
        query, key, value = mixed.split([self.keys, self.keys, self.values], dim=-1)
        output = gated_delta_rule(
            query.unflatten(-1, (-1, self.key_width)),
            key.unflatten(-1, (-1, self.key_width)),
            value.unflatten(-1, (-1, self.value_width)),
            -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden).float() + self.dt_bias),
            self.in_proj_b(hidden).sigmoid(),
            runs,
        )
        normed = F.rms_norm(output.float(), (self.value_width,), eps=self.epsilon).to(output.dtype) * self.norm.weight
        gated = normed * F.silu(self.in_proj_z(hidden).unflatten(-1, (-1, self.value_width)).float())
        projected: Tensor = self.out_proj(gated.to(hidden.dtype).flatten(1))
        return projected
