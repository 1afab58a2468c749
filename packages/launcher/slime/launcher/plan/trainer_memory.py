"""Estimates the memory of a trainer rank, and of a token in an engine's cache, from flags and a config.json.

    P  parameters on the rank      R  ranks that share optimizer states      T  tokens of a forward pass on the rank
    h  hidden size     f  inner size of the MLP     V  vocabulary     q, k  width of all queries, of all keys

Memory that is held for the whole run (weights, gradients, optimizer, reference model) is exact up to padding.
Activations are an estimate: KEPT was measured as what autograd keeps of a decoder layer whose attention does not
materialize the matrix of scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.converters.families.qwen_gated import delta_nets
from slime.converters.megatron.rank_layout import Sizes
from slime.launcher.plan.parameter_counts import Held
from slime.trainer.settings.sharding import compared_models, keeps_weights_whole
from slime.trainer.settings.trainer import TrainerSettings

GIB = 1 << 30
# CUDA context, kernels of its libraries and NCCL buffers of one process.
CONTEXT_BYTES = 1 << 30
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
# Logits, log-softmax and its gradient in float32; or 16-bit logits and gradient beside the other two.
BYTES_A_LOGIT = 12
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


def byte_size(num_bytes: float) -> str:
    """Spells a size: `12.34 GiB`, `310.6 MiB`, `4.0 KiB`."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 1024:.1f} KiB"


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
class RankMemory:
    items: tuple[Item, ...]

    @property
    def lasting(self) -> float:
        """Bytes that the device holds at all times."""
        return sum(item.num_bytes for item in self.items if item.lasting and not item.host)

    @property
    def training(self) -> float:
        """Bytes on the device in a forward and backward pass."""
        return sum(item.num_bytes for item in self.items if not item.host)

    @property
    def host(self) -> float:
        return sum(item.num_bytes for item in self.items if item.host)


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
        chosen = number("num_experts_per_tok") if number("moe_intermediate_size") else 0
        inner = number("intermediate_size")
        if chosen:
            inner = number("moe_intermediate_size") * (chosen + number("n_shared_experts"))
        return Shape(number("num_hidden_layers"), hidden, inner, queries, keys, number("vocab_size"), chosen)


def trainer_memory(
    settings: TrainerSettings,
    shape: Shape,
    held: Held,
    sizes: Sizes,
    tokens: int,
    *,
    args: Mapping[str, Any] | None = None,
    stage: int = 0,
    layers: int | None = None,
    on_gpu: bool = True,
    gpu_bytes: float | None = None,
    adapters: int | None = None,
) -> RankMemory:
    """Estimates the memory of one rank.

    tokens: of one forward pass of a replica. args: Megatron's arguments; None for FSDP. layers: number of decoder
    layers of the stage. adapters: parameters that train with LoRA; None where all do.
    """
    layers = shape.layers if layers is None else layers
    if args is not None:
        items = _megatron(settings, held, sizes, args)
    else:
        # On a GPU of unknown size, assume that the ranks shard everything.
        size = gpu_bytes or 0.0 if on_gpu else None
        compared = compared_models(settings)
        whole = keeps_weights_whole(settings, held.total, sizes.data, size, compared=compared, trained=adapters)
        items = _fsdp(settings, shape, held, sizes, whole=whole)
        if adapters is not None:
            items = [*_lora(settings, held, sizes, adapters, whole=whole), *items[3:]]
    items += _activations(settings, shape, sizes, tokens, args, stage, layers)
    if args is None or stage == sizes.pipeline - 1:
        items.append(_logits(settings, shape, sizes, tokens, in_place=args is None and _compiles(settings)))
    if settings.keep_old_actor:
        width = 2 if args is not None and settings.bf16 else 4
        share = (held.total if adapters is None else adapters) / (sizes.data if args is None else 1)
        items.append(Item("older weights", width * share, f"{width} x {share:,.0f} for each version kept", host=True))
    if on_gpu:
        items.append(Item("CUDA context, NCCL", CONTEXT_BYTES, "1 GiB a process"))
    return RankMemory(tuple(items))


def _fsdp(settings: TrainerSettings, shape: Shape, held: Held, sizes: Sizes, *, whole: bool) -> list[Item]:
    """Estimates a rank of the fsdp backend. whole: each rank has all weights and gradients, in bfloat16 and float32."""
    ranks, total = sizes.data, held.total
    references = settings.needs_reference and not settings.reference_is_base
    share, text = total / ranks, f"{total:,} / {ranks}" if ranks > 1 else f"{total:,}"
    if whole:
        everywhere = ", whole on each rank" if ranks > 1 else ""
        items = [
            Item("weights", 2 * total, f"bfloat16: 2 x {total:,}{everywhere}"),
            Item("gradients", 4 * total, f"float32: 4 x {total:,}{everywhere}"),
            Item("optimizer", 12 * share, f"float32 weights and two moments: 12 x {text}"),
        ]
        if references:
            items.append(Item("reference model", 2 * total, f"bfloat16: 2 x {total:,}{everywhere}"))
        if settings.use_critic:
            words = f"weights, gradients and moments of its own: 6 x {total:,} + 12 x {text}"
            items.append(Item("critic", 6 * total + 12 * share, words))
        if settings.loads_teacher:
            items.append(
                Item("teacher", 2 * total, f"bfloat16, if it is as large as the policy: 2 x {total:,}{everywhere}")
            )
        return items
    items = [
        Item("weights", 4 * share, f"float32: 4 x {text}"),
        Item("gradients", 4 * share, f"float32: 4 x {text}"),
        Item("optimizer", 8 * share, f"two moments in float32: 8 x {text}"),
    ]
    if references:
        items.append(Item("reference model", 4 * share, f"float32: 4 x {text}"))
    if settings.use_critic:
        each = 16 + 2 * bool(settings.bf16)
        items.append(Item("critic", each * share, f"weights, gradients and moments of its own: {each} x {text}"))
    if settings.loads_teacher:
        items.append(Item("teacher", 4 * share, f"float32, if it is as large as the policy: 4 x {text}"))
    if ranks > 1:
        width = 2 if settings.bf16 else 4
        outer = 2 * shape.vocab * shape.hidden
        layer = max(0, total - outer) / max(1, shape.layers)
        gathered = width * (outer + 2 * layer) + (width + 4) * layer
        items.append(
            Item("gathered weights", gathered, f"{width} x (2Vh + 2 layers), gradients of one layer", lasting=False)
        )
    return items


def _lora(settings: TrainerSettings, held: Held, sizes: Sizes, adapters: int, *, whole: bool) -> list[Item]:
    """Estimates what takes the place of weights, gradients and optimizer with LoRA."""
    ranks, width, total = sizes.data, 2 if settings.bf16 else 4, held.total
    kind, part = "bfloat16" if settings.bf16 else "float32", f" / {ranks}" if ranks > 1 and not whole else ""
    frozen = Item("weights", width * total / (1 if whole else ranks), f"frozen, {kind}: {width} x {total:,}{part}")
    if whole:
        words = f"in bfloat16, and gradients: 6 x {adapters:,}"
        each = f"float32 weights and two moments: 12 x {adapters:,}" + (f" / {ranks}" if ranks > 1 else "")
        return [
            frozen, Item("adapters", 6 * adapters, words), Item("optimizer", 12 * adapters / ranks, each)
        ]  # fmt: skip
    return [
        frozen,
        Item("adapters", 8 * adapters / ranks, f"in float32, and gradients: 8 x {adapters:,}{part}"),
        Item("optimizer", 8 * adapters / ranks, f"two moments in float32: 8 x {adapters:,}{part}"),
    ]


def _megatron(settings: TrainerSettings, held: Held, sizes: Sizes, args: Mapping[str, Any]) -> list[Item]:
    weight = 2 if settings.bf16 else 4
    gradient = 2 if args.get("grad_reduce_in_bf16") else 4
    items = [
        Item("weights", weight * held.total, f"{'bfloat16' if weight == 2 else 'float32'}: {weight} x {held.total:,}"),
        Item("gradients", gradient * held.total, f"{gradient} x {held.total:,}, whole on each rank"),
    ]
    states, words = _optimizer_bytes(settings, args)
    if args.get("use_distributed_optimizer"):
        dense, expert = sizes.data * sizes.context, sizes.expert_data
        total = states * (held.dense / dense + held.experts / expert)
        formula = f"{states} x {held.dense:,} / {dense}" + (
            f" + {states} x {held.experts:,} / {expert}" if held.experts else ""
        )
    else:
        total, formula = states * held.total, f"{states} x {held.total:,}; --use-distributed-optimizer shares it"
    on_host = 0.0
    if args.get("optimizer_cpu_offload"):
        fraction = args.get("optimizer_offload_fraction")
        on_host = 1.0 if fraction is None else float(fraction)
    if on_host < 1:
        items.append(Item("optimizer", (1 - on_host) * total, f"{words}: {formula}"))
    if on_host:
        items.append(Item("optimizer", on_host * total, f"{on_host:.0%} of {words}: {formula}", host=True))
    if settings.needs_reference:
        items.append(
            Item("reference model", 2 * weight * held.total, f"and a place to swap: 2 x {weight} x P", host=True)
        )
    if settings.loads_teacher:
        items.append(Item("teacher", weight * held.total, f"{weight} x {held.total:,}", host=True))
    if settings.use_critic:
        items += [
            replace(item, name=f"critic's {item.name}")
            for item in items
            if item.name in ("weights", "gradients", "optimizer")
        ]
    return items


def _optimizer_bytes(settings: TrainerSettings, args: Mapping[str, Any]) -> tuple[int, str]:
    """Returns (the optimizer's bytes per parameter, their parts in words)."""
    if not args.get("use_precision_aware_optimizer"):
        return (12, "float32 weights and two moments") if settings.bf16 else (8, "two moments in float32")
    kinds = {name: str(args.get(f"{name}_dtype") or "fp32") for name in ("main_params", "exp_avg", "exp_avg_sq")}
    return sum(BYTES.get(kind, 4) for kind in kinds.values()), " + ".join(kinds.values())


def _activations(
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
    if _recomputes(settings, args):
        kept = width * rows * shape.hidden / stream
        return [
            Item(
                "activations",
                kept * layers * flying + layer,
                f"recomputed: {width} x T x h x {layers} layers{times} + one layer; T = {rows:,}",
                lasting=False,
            )
        ]
    sums = f"{of_hidden}h + {of_queries}q + {of_keys}k + {of_inner}f"
    formula = f"T x ({sums}){f' / {tensor}' if tensor > 1 else ''} x {layers} layers{times}"
    return [Item("activations", layer * layers * flying, f"{formula}; T = {rows:,}", lasting=False)]


def _precision(settings: TrainerSettings, sizes: Sizes, args: Mapping[str, Any] | None) -> str:
    """Returns the key of KEPT."""
    if args is not None:
        return f"megatron {'bfloat16' if settings.bf16 else 'float32'}"
    return "fsdp float32" if not settings.bf16 else "fsdp compiled" if _compiles(settings) else "fsdp bfloat16"


def _compiles(settings: TrainerSettings) -> bool:
    """Returns whether FSDP compiles its layers: by default with bfloat16, which is the default on GPUs."""
    return bool(settings.bf16 if settings.compile is None else settings.compile)


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


def _logits(settings: TrainerSettings, shape: Shape, sizes: Sizes, tokens: int, *, in_place: bool) -> Item:
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


def kv_bytes(config: Mapping[str, Any], tensor: int = 1, *, width: int = 2) -> float:
    """Returns the bytes of a token in the cache of one GPU of an engine; latent attention is not split over GPUs."""
    shape = Shape.of(config)
    if config.get("kv_lora_rank"):
        return shape.layers * (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)) * width
    heads = config.get("num_key_value_heads") or config.get("num_attention_heads") or 1
    # Gated delta nets have a state for each sequence and nothing for a token.
    layers = shape.layers - sum(delta_nets(config) if config.get("linear_num_value_heads") else [])
    return 2 * layers * shape.keys * width / min(tensor, int(heads))


def checkpoint_bytes(settings: TrainerSettings, parameters: int, adapters: int | None = None) -> tuple[int, str]:
    """Returns (bytes of one checkpoint on disk, their formula in words). adapters: as in `trainer_memory`."""
    if settings.train_backend == "megatron":
        weights, states = (2, 12) if settings.bf16 else (4, 8)
    else:
        weights, states = 4, 8
    each = weights + (0 if settings.no_save_optim else states)
    words = "weights" if settings.no_save_optim else "weights and optimizer"
    if adapters is not None:
        words = words.replace("weights", "adapters")
        if settings.use_critic:
            of_critic = f"those of a critic: {each} x {parameters:,}"
            return each * (adapters + parameters), f"{words}: {each} x {adapters:,}, and {of_critic}"
        return each * adapters, f"{words}: {each} x {adapters:,}"
    if settings.use_critic:
        return 2 * each * parameters, f"{words} of policy and critic: 2 x {each} x {parameters:,}"
    return each * parameters, f"{words}: {each} x {parameters:,}"


def peak(memories: Sequence[RankMemory]) -> int:
    """Returns the index of the rank that needs the most memory."""
    return max(range(len(memories)), key=lambda number: memories[number].training)
