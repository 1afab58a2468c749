"""Estimates the activations of a forward and backward pass on a trainer rank.

T  tokens of a forward pass on the rank     h  hidden size     f  inner size of the MLP
q, k  width of all queries, of all keys; in delta nets k and v of all keys, of all values
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.converters.families.qwen_gated import delta_nets
from slime.converters.megatron.rank_layout import Sizes
from slime.trainer.settings.trainer import TrainerSettings

# Bytes that a layer keeps for the backward pass, per token and per unit of hidden size, width of the queries,
# width of the keys and inner size of the MLP. Norms are always float32. Measured as the tensors that autograd saved;
# for Megatron in bfloat16 as the peak on a GPU, where its MLP is fused.
KEPT = {
    "fsdp float32": (24, 16, 16, 16),
    "fsdp bfloat16": (16, 10, 10, 8),
    "fsdp compiled": (8, 6, 6, 6),
    "megatron float32": (25, 25, 13, 21),
    "megatron bfloat16": (14, 12, 12, 6),
}
# A layer with a gated delta net keeps this in place of queries and keys: per unit of the width of its keys and of its
# values. Measured without the compiler, which sees what is around the delta rule.
KEPT_BY_DELTA_NETS = {"float32": (48, 48), "bfloat16": (24, 30)}
# Logits, log-softmax and its gradient in float32; or 16-bit logits and gradient beside the other two.
BYTES_A_LOGIT = 12


def plain(number: float) -> str:
    """Spells a number with at most one decimal place: 2, 1.7."""
    return f"{number:.1f}".removesuffix(".0")


@dataclass(frozen=True)
class Item:
    """A number of bytes and its formula in words. host: whether they are in host memory, not on the GPU."""

    name: str
    num_bytes: float
    formula: str
    lasting: bool = True
    host: bool = False


@dataclass(frozen=True)
class DeltaNets:
    """The gated delta nets of a model. layers: how many of its layers are one. keys, values: width of all of them.
    heads: of values, each with the widths `key` and `value`."""

    layers: int
    keys: int
    values: int
    heads: int
    key: int
    value: int

    @staticmethod
    def of(config: Mapping[str, Any]) -> DeltaNets | None:
        """Reads the values of a config.json, as `Shape.of` does; None for a model without delta nets."""
        heads = config.get("linear_num_value_heads")
        if not heads:
            return None
        key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        keys = int(config["linear_num_key_heads"]) * key
        return DeltaNets(sum(delta_nets(config)), keys, int(heads) * value, int(heads), key, value)

    @property
    def rule_bytes(self) -> float:
        """Bytes per token of the delta rule of one layer, while it is computed again in a backward pass: float32
        numbers of its chunks and states. Measured as the tensors that autograd saved."""
        return self.heads * (1314 + 52 * self.key + 20 * self.value + self.key * self.value / 16)


@dataclass(frozen=True)
class Shape:
    """The values of a model's config on which the size of its activations depends."""

    layers: int
    hidden: int
    inner: int
    queries: int
    keys: int
    vocab: int
    experts_per_token: int = 0
    delta_nets: DeltaNets | None = None

    @staticmethod
    def of(config: Mapping[str, Any]) -> Shape:
        """Reads the values of a config.json, or of the part of it for the language model. Missing widths are 0."""

        def number(*names: str) -> int:
            return next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        head = number("head_dim") or (hidden // heads if heads else 0)
        queries, keys = heads * head, (number("num_key_value_heads") or heads) * head
        if number("kv_lora_rank"):
            queries = keys = heads * (number("qk_nope_head_dim") + number("qk_rope_head_dim"))
        delta = DeltaNets.of(config)
        # Beside the queries, these families compute a gate for what attention finds.
        queries *= 2 if delta is not None else 1
        # MiniMax-M2 calls the inner size of an expert intermediate_size.
        of_expert = number("moe_intermediate_size") or (number("num_local_experts") and number("intermediate_size"))
        chosen = number("num_experts_per_tok") if of_expert else 0
        inner = of_expert * (chosen + number("n_shared_experts")) if chosen else number("intermediate_size")
        return Shape(number("num_hidden_layers"), hidden, inner, queries, keys, number("vocab_size"), chosen, delta)


def activations(
    settings: TrainerSettings,
    shape: Shape,
    sizes: Sizes,
    tokens: int,
    args: Mapping[str, Any] | None,
    stage: int,
    layers: int,
) -> list[Item]:
    width, tensor = 2 if settings.bf16 else 4, sizes.tensor
    rows = -(-tokens // sizes.context)
    # Without sequence parallelism every rank of a tensor parallel group keeps the residual stream whole.
    stream = tensor if args is not None and args.get("sequence_parallel") else 1
    kind = _precision(settings, sizes, args)
    of_hidden, of_queries, of_keys, of_inner = KEPT[kind]
    # Tokens go to their experts and come back, one copy each.
    hidden = (of_hidden + 2 * width * shape.experts_per_token) * shape.hidden / stream
    layer = rows * (hidden + (of_queries * shape.queries + of_keys * shape.keys + of_inner * shape.inner) / tensor)
    flying = _in_flight(sizes, stage)
    times = f" x {plain(flying)} micro-batches in flight" if flying != 1 else ""
    delta, with_delta, largest, items = shape.delta_nets, 0.0, layer, list[Item]()
    if delta is not None:
        of_delta_keys, of_delta_values = KEPT_BY_DELTA_NETS["bfloat16" if settings.bf16 else "float32"]
        # A rank computes them whole, also where others have a part of the row, or of the attention's heads.
        mixed = tokens * (of_delta_keys * delta.keys + of_delta_values * delta.values)
        delta_layer = rows * (hidden + of_inner * shape.inner / tensor) + mixed
        with_delta = layers * delta.layers / shape.layers
        largest = max(layer, delta_layer)
        rule = Item(
            "delta rule", tokens * delta.rule_bytes,
            f"computed again, one layer at a time: {delta.rule_bytes:,.0f} x T; T = {tokens:,}", lasting=False,
        )  # fmt: skip
        if not _recomputes(settings, args):
            sums = f"{of_hidden}h + {of_delta_keys}k + {of_delta_values}v + {of_inner}f"
            words = f"T x ({sums}) x {plain(with_delta)} layers{times}; T = {tokens:,}"
            items.append(Item("delta nets", delta_layer * with_delta * flying, words, lasting=False))
        items.append(rule)
    if _recomputes(settings, args):
        kept = width * rows * shape.hidden / stream
        return [
            Item(
                "activations",
                kept * layers * flying + largest,
                f"recomputed: {width} x T x h x {layers} layers{times} + one layer; T = {rows:,}",
                lasting=False,
            ),
            *items,
        ]
    sums = f"{of_hidden}h + {of_queries}q + {of_keys}k + {of_inner}f"
    others = layers - with_delta
    formula = f"T x ({sums}){f' / {tensor}' if tensor > 1 else ''} x {plain(others)} layers{times}"
    return [Item("activations", layer * others * flying, f"{formula}; T = {rows:,}", lasting=False), *items]


def _precision(settings: TrainerSettings, sizes: Sizes, args: Mapping[str, Any] | None) -> str:
    """Returns the key of KEPT."""
    if args is not None:
        return f"megatron {'bfloat16' if settings.bf16 else 'float32'}"
    return "fsdp float32" if not settings.bf16 else "fsdp compiled" if compiles(settings) else "fsdp bfloat16"


def compiles(settings: TrainerSettings) -> bool:
    """Returns whether FSDP compiles its layers: by default with bfloat16, which is the default on GPUs."""
    return bool(settings.bf16 if settings.compile is None else settings.compile)


def quantized_weights(
    settings: TrainerSettings, sizes: Sizes, parameters: int, args: Mapping[str, Any], stage: int, layers: int
) -> Item:
    """Estimates the weights in FP8, which each pass makes anew: once for forward products, once for backward ones.

    parameters: on the rank; layers: of the stage.
    """
    if _recomputes(settings, args):
        return Item("FP8 weights", 2 * parameters / max(1, layers), "2 x P / layers: of one layer", lasting=False)
    flying = _in_flight(sizes, stage)
    times = f" x {plain(flying)} micro-batches in flight" if flying != 1 else ""
    return Item("FP8 weights", 2 * parameters * flying, f"2 x {parameters:,}{times}", lasting=False)


def _recomputes(settings: TrainerSettings, args: Mapping[str, Any] | None) -> bool:
    return settings.gradient_checkpointing or (args is not None and args.get("recompute_granularity") == "full")


def _in_flight(sizes: Sizes, stage: int) -> float:
    """Returns the number of micro-batches whose activations a stage keeps at once with the 1F1B schedule.

    Virtual stages keep parts of a micro-batch.
    """
    stages_left = sizes.pipeline - stage
    if sizes.virtual == 1:
        return stages_left
    chunks = 2 * (stages_left - 1) + (sizes.virtual - 1) * sizes.pipeline + 1
    return chunks / sizes.virtual


def logits(settings: TrainerSettings, shape: Shape, sizes: Sizes, tokens: int, *, in_place: bool) -> Item:
    """Estimates the logits. in_place: whether their gradient reuses their memory, with no other buffer of that size."""
    rows, width = -(-tokens // sizes.context), 2 if settings.bf16 else 4
    if in_place:
        return Item("logits", width * rows * shape.vocab, f"{width} x T x {shape.vocab:,}", lasting=False)
    share = f" / {sizes.tensor}" if sizes.tensor > 1 else ""
    chunk = settings.log_probs_chunk_size
    if 0 < chunk < rows:
        size = (2 * width * rows + 8 * chunk) * shape.vocab / sizes.tensor
        return Item("logits", size, f"({2 * width} x T + 8 x {chunk:,}) x {shape.vocab:,}{share}", lasting=False)
    size = BYTES_A_LOGIT * rows * shape.vocab / sizes.tensor
    hint = "" if chunk > 0 else "; --log-probs-chunk-size reduces it"
    return Item("logits", size, f"{BYTES_A_LOGIT} x T x {shape.vocab:,}{share}{hint}", lasting=False)
