"""The blocks that families share, each as the parameters it has; names are relative to the layer.

`hidden` is the width of the residual stream. Megatron keeps gate over up projection in `linear_fc1`, and the queries,
keys and values of a query group beside each other in `linear_qkv`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from slime.converters.families.base import Config
from slime.converters.families.config_json import query_groups, required, tied
from slime.converters.families.mapping import Parameter, copy, qkv, stack

# Shared by all families except in layers for multi-token prediction.
LAYER, HF_LAYER = "decoder.layers.{}.", "model.layers.{}."
# The prefix of a language model's tensors, alone and in a model that reads images.
_HF_TEXT, _HF_TEXT_OF_IMAGES = "model.", "model.language_model."


def layer(number: int, parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yields the parameters of layer `number`."""
    for parameter in parameters:
        yield parameter.at(LAYER.format(number), HF_LAYER.format(number))


def decoder(config: Config, layer_of: Callable[[int], Iterable[Parameter]]) -> Iterator[Parameter]:
    """Yields the parameters of embedding, decoder and output layer. layer_of(number): those of one layer."""
    yield from embedding(config)
    for number in range(required(config, "num_hidden_layers")):
        yield from layer(number, layer_of(number))
    yield from output(config)


def behind_images(parameter: Parameter) -> Parameter:
    """Returns a language model's parameter with the names of tensors that it has in a model that reads images."""
    renamed = (
        dataclasses.replace(block, name=_HF_TEXT_OF_IMAGES + block.name.removeprefix(_HF_TEXT))
        if block.name.startswith(_HF_TEXT)
        else block
        for block in parameter.blocks
    )
    return dataclasses.replace(parameter, blocks=tuple(renamed))


def embedding(config: Config) -> Iterator[Parameter]:
    shape = (required(config, "vocab_size"), required(config, "hidden_size"))
    yield copy("embedding.word_embeddings.weight", "model.embed_tokens.weight", shape, split=0, padded=True)


def output(config: Config) -> Iterator[Parameter]:
    """Yields the final norm, and the output layer unless it is the embedding."""
    hidden = required(config, "hidden_size")
    yield norm("decoder.final_layernorm", "model.norm", hidden)
    if not tied(config):
        shape = (required(config, "vocab_size"), hidden)
        yield copy("output_layer.weight", "lm_head.weight", shape, split=0, padded=True)


def norm(name: str, hf_name: str, size: int) -> Parameter:
    return copy(f"{name}.weight", f"{hf_name}.weight", (size,))


def layer_norms(hidden: int) -> Iterator[Parameter]:
    """Yields the norms before the attention and before the MLP."""
    yield norm("input_layernorm", "input_layernorm", hidden)
    yield norm("pre_mlp_layernorm", "post_attention_layernorm", hidden)


def attention(config: Config, head_dim: int, *, bias: bool = False, norms: bool = False) -> Iterator[Parameter]:
    """Yields the parameters of attention. bias: of queries, keys and values; norms: of each head's query and key."""
    hidden, heads, groups = (
        required(config, "hidden_size"),
        required(config, "num_attention_heads"),
        query_groups(config),
    )
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    for kind, columns in (("weight", hidden), ("bias", None)):
        if columns or bias:
            q, k, v = (f"{name}.{kind}" for name in names)
            yield qkv(
                f"self_attention.linear_qkv.{kind}",
                (q, k, v),
                heads=heads,
                groups=groups,
                head_dim=head_dim,
                columns=columns,
            )
    if norms:
        yield norm("self_attention.q_layernorm", "self_attn.q_norm", head_dim)
        yield norm("self_attention.k_layernorm", "self_attn.k_norm", head_dim)
    yield copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (hidden, heads * head_dim), split=1)


def latent_attention(config: Config) -> Iterator[Parameter]:
    """Yields the parameters of MLA: queries, and keys with values, of low rank; q_lora_rank null: plain queries."""
    hidden, heads = required(config, "hidden_size"), required(config, "num_attention_heads")
    rank, q_rank = required(config, "kv_lora_rank"), config.get("q_lora_rank")
    content, rotary, value = (required(config, f"{part}_head_dim") for part in ("qk_nope", "qk_rope", "v"))
    queries = heads * (content + rotary)
    if q_rank is None:
        yield _column("linear_q_proj", "q_proj", (queries, hidden))
    else:
        yield _column("linear_q_down_proj", "q_a_proj", (q_rank, hidden))
        yield norm("self_attention.q_layernorm", "self_attn.q_a_layernorm", q_rank)
        yield _column("linear_q_up_proj", "q_b_proj", (queries, q_rank))
    yield _column("linear_kv_down_proj", "kv_a_proj_with_mqa", (rank + rotary, hidden))
    yield norm("self_attention.kv_layernorm", "self_attn.kv_a_layernorm", rank)
    yield _column("linear_kv_up_proj", "kv_b_proj", (heads * (content + value), rank))
    yield copy("self_attention.linear_proj.weight", "self_attn.o_proj.weight", (hidden, heads * value), split=1)


def indexer(config: Config) -> Iterator[Parameter]:
    """Yields the parameters of the indexer of DeepSeek sparse attention, of which every rank has all; k_norm is a layer
    norm."""
    hidden, heads, width = (required(config, key) for key in ("hidden_size", "index_n_heads", "index_head_dim"))
    shapes = {
        "wq_b.weight": (heads * width, required(config, "q_lora_rank")), "wk.weight": (width, hidden),
        "k_norm.weight": (width,), "k_norm.bias": (width,), "weights_proj.weight": (heads, hidden),
    }  # fmt: skip
    for name, shape in shapes.items():
        yield copy(f"self_attention.{name}", f"self_attn.indexer.{name}", shape)


def _column(name: str, hf_name: str, shape: tuple[int, int]) -> Parameter:
    return copy(f"self_attention.{name}.weight", f"self_attn.{hf_name}.weight", shape, split=0)


def gated_mlp(name: str, hf_name: str, hidden: int, ffn: int) -> Iterator[Parameter]:
    """Yields the parameters of down(silu(gate(x)) * up(x)); ffn: its inner size."""
    parts = (f"{hf_name}.gate_proj.weight", f"{hf_name}.up_proj.weight")
    yield stack(f"{name}.linear_fc1.weight", parts, (ffn, hidden))
    yield copy(f"{name}.linear_fc2.weight", f"{hf_name}.down_proj.weight", (hidden, ffn), split=1)


def dense_mlp(config: Config) -> Iterator[Parameter]:
    yield from gated_mlp("mlp", "mlp", required(config, "hidden_size"), required(config, "intermediate_size"))


def moe(config: Config, experts: int, *, bias: bool = False, shared: int = 0) -> Iterator[Parameter]:
    """Yields the parameters of experts and router. bias: what the router adds to the scores of experts to choose among
    them; shared: experts of every token."""
    hidden, ffn = required(config, "hidden_size"), required(config, "moe_intermediate_size")
    yield copy("mlp.router.weight", "mlp.gate.weight", (experts, hidden))
    if bias:
        yield copy("mlp.router.expert_bias", "mlp.gate.e_score_correction_bias", (experts,))
    for number in range(experts):
        yield from gated_mlp(f"mlp.experts.local_experts.{number}", f"mlp.experts.{number}", hidden, ffn)
    if shared:
        yield from gated_mlp("mlp.shared_experts", "mlp.shared_experts", hidden, shared * ffn)
