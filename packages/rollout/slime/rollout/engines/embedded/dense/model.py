"""The forward pass of dense Llama, Qwen2 and Qwen3 models on a CPU.

It computes the same as transformers in a fraction of the operations: query, key and value projections are one matrix,
as are gate and up; matrices are packed into oneDNN's layout, or that of `products`, once for each version of the
weights; keys and values are written in place; the tokens of all sequences form one row, without padding; what lies
between matrices is one compiled loop each (`loop_ops`) where numba is installed and the model is large enough to be
worth compiling for, and several operations of torch elsewhere. With float32 weights everything is float32; with
bfloat16 weights the matrices and the attention are bfloat16, and the rest (residual, norms, rotary embedding) is
float32. Passes are filled up to one of few numbers of tokens (`filled_up`), because oneDNN compiles its kernels for
each number, and keeps them.

The packed matrices are a second copy of the weights, of at most 4 bytes per parameter. Weight updates, the scoring of
prompts and checksums use the first copy. `slime train --dry-run` counts both.

N: tokens of a pass, B: sequences that decode, H: query heads, K: key-value heads, D: size of a head, V: vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from slime.rollout.engines.embedded.dense.kv_cache import KvCache
from slime.rollout.engines.embedded.dense.matrices import Matrix, has_packing
from slime.rollout.engines.embedded.dense.ops import Heads, Ops, Places, TorchOps
from slime.rollout.engines.embedded.options import PACKED_MODELS
from slime.types.models.processor import multiplies_bfloat16

log = logging.getLogger(__name__)

# Rotary embeddings whose frequencies do not depend on the length of the sequence.
ROPES = ("default", "linear", "llama3", "yarn")
WEIGHTS = (torch.float32, torch.bfloat16, torch.float16)
# Rows of the output matrix per product: the system allocates memory anew for each larger product.
HEAD_ROWS = 8192
# Numbers of tokens of a pass from one power of two to the next: a pass has at most a sixteenth more than it needs.
SIZES_PER_OCTAVE = 16
# Parameters of a model that compiled loops are for: they take seconds to compile, once on a machine.
LOOPS_FROM = 1 << 25
# Queries of a call of attention with a mask.
MASKED_QUERIES = 256


class Prefill(NamedTuple):
    """A prompt of `length` tokens for a row of the cache; the first `known` of them are those of the row `source`."""

    row: int
    length: int
    known: int = 0
    source: int = 0


@dataclass
class Pass:
    """The tokens of one forward pass: the newest token of each decoding sequence, then prompts, as far as they are not
    known.

    decoding: the number of decoding sequences, of which sequence i has row i of the cache.
    """

    ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    decoding: int = 0
    prompts: list[Prefill] = field(default_factory=list)

    def decode(self, token: int, position: int) -> None:
        self.ids.append(token)
        self.positions.append(position)
        self.decoding += 1

    def prefill(self, row: int, tokens: Sequence[int], source: int = 0, known: int = 0) -> None:
        """Adds a prompt, whose first `known` tokens are those of the row `source`, maybe of an earlier prompt."""
        self.ids += tokens[known:]
        self.positions += range(known, len(tokens))
        self.prompts.append(Prefill(row, len(tokens), known, source))


class DenseModel:
    """Computes with the weights that `model`, a transformers model, had at the last `pack`."""

    @staticmethod
    def supports(model: Any) -> bool:
        config = model.config
        return (
            type(model).__name__ in PACKED_MODELS
            and model.device.type == "cpu"
            and config.hidden_act == "silu"
            and not getattr(config, "use_sliding_window", False)
            and all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
            and getattr(model.model.rotary_emb, "rope_type", None) in ROPES
            and _is_plain(model)
        )

    def __init__(self, model: Any) -> None:
        self._model = model
        config = model.config
        attention = model.model.layers[0].self_attn
        heads = Heads(config.num_attention_heads, config.num_key_value_heads, attention.head_dim, attention.scaling)
        self._ops = _fitting_ops(model, heads, config.rms_norm_eps, compute_dtype(model.dtype))
        self._logits_BV = torch.zeros(0, model.get_output_embeddings().weight.shape[0])
        self.packing = -1
        """The value of `writes` at the last `pack`."""

    def cache(self) -> KvCache:
        heads = self._ops.heads
        return KvCache(len(self._model.model.layers), heads.kv, heads.size, self._ops.dtype)

    @torch.inference_mode()
    def pack(self, writes: int) -> None:
        """Copies the weights, unless they are unchanged since the last call. writes: the number of changes so far."""
        if writes != self.packing:
            model = self._model
            # The old copy is freed first, because memory may not hold both.
            self._layers, self._head = list[_Layer](), list[Matrix]()
            self._layers = [_Layer(layer, self._ops) for layer in model.model.layers]
            self._norm = model.model.norm.weight.float()
            head = model.get_output_embeddings()
            biases = [None] * len(head.weight) if head.bias is None else head.bias.split(HEAD_ROWS)
            self._head = [
                self._ops.matrix([rows], [bias])
                for rows, bias in zip(head.weight.split(HEAD_ROWS), biases, strict=False)
            ]
            self.packing = writes

    def forward(self, run: Pass, cache: KvCache) -> Tensor:
        """Returns float32 hidden states [N, E], and writes the keys and values of all tokens into the cache."""
        count, ops = len(run.ids), self._ops
        filling = filled_up(count) - count
        hidden_NE = self._model.get_input_embeddings().weight[torch.tensor(run.ids + [0] * filling)].float()
        places, added_NE = self._places(run), None
        for index, layer in enumerate(self._layers):
            qkv_NE = layer.qkv(ops.normed(hidden_NE, added_NE, layer.attention_norm))
            kv_R2KCD = cache.layer(index)
            query_NHD = ops.rotated(qkv_NE[:count], layer.head_norms, kv_R2KCD, places)
            seen_NE = self._seen(run, query_NHD, kv_R2KCD, places)
            if filling:
                seen_NE = F.pad(seen_NE, (0, 0, 0, filling))
            gate_up_NI = layer.gate_up(ops.normed(hidden_NE, layer.output(seen_NE), layer.mlp_norm))
            added_NE = layer.down(ops.gated(gate_up_NI))
        return (hidden_NE if added_NE is None else hidden_NE.add_(added_NE))[:count]

    def logits(self, hidden_B: Tensor) -> Tensor:
        """Returns float32 logits [B, V], which the next call overwrites."""
        if len(hidden_B) > len(self._logits_BV):
            self._logits_BV = torch.zeros(len(hidden_B), self._logits_BV.shape[1])
        logits_BV = self._logits_BV[: len(hidden_B)]
        count = len(hidden_B)
        normed = F.pad(self._ops.normed(hidden_B, None, self._norm), (0, 0, 0, filled_up(count) - count))
        for part, matrix in zip(logits_BV.split(HEAD_ROWS, -1), self._head, strict=True):
            matrix(normed, part)
        return logits_BV

    def _places(self, run: Pass) -> Places:
        rows = [*range(run.decoding)]
        for prompt in run.prompts:
            rows += [prompt.row] * (prompt.length - prompt.known)
        positions_N = torch.tensor(run.positions)
        longest = max(run.positions[: run.decoding], default=0)
        return Places(torch.tensor(rows), positions_N, *self._rotary(positions_N), run.decoding, longest)

    def _seen(self, run: Pass, query_NHD: Tensor, kv_R2KCD: Tensor, places: Places) -> Tensor:
        """Returns the outputs of all heads [N, H x D], of queries whose keys and values are in the cache."""
        parts, start = [], run.decoding
        if start:
            parts.append(self._ops.attended(query_NHD[:start], kv_R2KCD, places))
        for row, length, known, source in run.prompts:
            kv_R2KCD[row, :, :, :known] = kv_R2KCD[source, :, :, :known]
            query_HTD = query_NHD[start : start + length - known].transpose(0, 1)
            key_KLD, value_KLD = kv_R2KCD[row, :, :, :length].unbind()
            seen_HTD = seen_by_prompt(query_HTD, key_KLD, value_KLD, known, self._ops.heads.scale)
            parts.append(seen_HTD.transpose(0, 1).flatten(1))
            start += length - known
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rotary(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        rotary = self._model.model.rotary_emb
        angles = positions_N[:, None].float() * rotary.inv_freq.float()
        cos, sin = angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling
        # (a, b) becomes (a cos - b sin, b cos + a sin): with the halves swapped, the sine of the first is negative.
        return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


def filled_up(count: int) -> int:
    """Returns the number of tokens that a pass of `count` tokens computes."""
    step = 1
    while count > 2 * SIZES_PER_OCTAVE * step:
        step *= 2
    return -(-count // step) * step


class _Layer:
    def __init__(self, layer: Any, ops: Ops) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.qkv = _linear([attention.q_proj, attention.k_proj, attention.v_proj], ops)
        self.output = _linear([attention.o_proj], ops)
        self.gate_up = _linear([mlp.gate_proj, mlp.up_proj], ops)
        self.down = _linear([mlp.down_proj], ops)
        self.attention_norm = layer.input_layernorm.weight.float()
        self.mlp_norm = layer.post_attention_layernorm.weight.float()
        self.head_norms: Tensor | None = None
        if getattr(attention, "q_norm", None) is not None:
            heads, kv_heads = (p.out_features // attention.head_dim for p in (attention.q_proj, attention.k_proj))
            each = attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(kv_heads, -1)
            self.head_norms = torch.cat(each).float()


def seen_by_prompt(query_HTD: Tensor, key_KLD: Tensor, value_KLD: Tensor, known: int, scale: float) -> Tensor:
    """Returns the outputs of the tokens of a prompt from `known` on [H, T, D], in parts where some are known: the mask
    of all of a long prompt may take a gigabyte, and half of it hides what was computed."""
    if not known:
        return F.scaled_dot_product_attention(
            query_HTD[None], key_KLD[None], value_KLD[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
    outputs, end = [], known
    for part_HTD in query_HTD.split(MASKED_QUERIES, 1):
        count = part_HTD.shape[1]
        end += count
        seen_1HTD = F.scaled_dot_product_attention(
            part_HTD[None], key_KLD[None, :, :end], value_KLD[None, :, :end],
            attn_mask=torch.ones(count, end, dtype=torch.bool).tril(end - count), scale=scale, enable_gqa=True,
        )  # fmt: skip
        outputs.append(seen_1HTD[0])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 1)


def _linear(modules: Sequence[Any], ops: Ops) -> Matrix:
    return ops.matrix([m.weight for m in modules], [m.bias for m in modules])


def _is_plain(model: Any) -> bool:
    """Returns whether all layers compute with their `weight` as it is, which quantized layers do not."""
    layers = [module for name, module in model.model.layers.named_modules() if name.endswith("_proj")]
    return all(type(m) is nn.Linear and m.weight.dtype in WEIGHTS for m in (*layers, model.get_output_embeddings()))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to compute in: bfloat16 if the weights have it and the processor multiplies it, or float32."""
    fast = dtype == torch.bfloat16 and has_packing() and multiplies_bfloat16(torch)
    return torch.bfloat16 if fast else torch.float32


def _fitting_ops(model: Any, heads: Heads, eps: float, dtype: torch.dtype) -> Ops:
    """Returns the loops for a model that is large enough, unless they cannot be had, which it says."""
    if sum(p.numel() for p in model.parameters()) >= LOOPS_FROM:
        try:
            return _loop_ops(heads, eps, dtype)
        except Exception as error:  # numba has many
            log.warning(
                "tokens are generated without compiled loops, which takes longer: %s: %s", type(error).__name__, error
            )
    return TorchOps(heads, eps, dtype)


def _loop_ops(heads: Heads, eps: float, dtype: torch.dtype) -> Ops:
    from slime.rollout.engines.embedded.dense import loop_ops, loops

    if not loops.has_threads():
        raise ImportError("torch's threads have no entry point that compiled loops can use on this system")
    return loop_ops.LoopOps(heads, eps, dtype)
