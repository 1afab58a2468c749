"""Estimates the memory of a trainer rank, and of a token in an engine's cache, from flags and a config.json.

    P  parameters on the rank      R  ranks that share optimizer states      h  hidden size      V  vocabulary

Memory that is held for the whole run (weights, gradients, optimizer, reference model) is exact up to padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.converters.families.qwen_gated import delta_nets
from slime.converters.megatron.rank_layout import Sizes
from slime.launcher.plan.activations import Item, Shape, activations, compiles, logits, quantized_weights
from slime.launcher.plan.parameter_counts import Held
from slime.trainer.settings.sharding import compared_models, keeps_weights_whole
from slime.trainer.settings.trainer import TrainerSettings

GIB = 1 << 30
# CUDA context, kernels of its libraries and NCCL buffers of one process.
CONTEXT_BYTES = 1 << 30
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}


def byte_size(num_bytes: float) -> str:
    """Spells a size: `12.34 GiB`, `310.6 MiB`, `4.0 KiB`."""
    if num_bytes >= GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 1024:.1f} KiB"


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
        items = _fsdp(settings, held, sizes, adapters, whole=whole)
        # For each model that is sharded, whether all of its weights train.
        cut = [] if whole else [adapters is None]
        if settings.use_critic:
            # Decided apart from the policy: a critic is compared with nothing, and all of it trains.
            whole = keeps_weights_whole(settings.of_critic(), held.total, sizes.data, size)
            items.append(_critic(settings, held, sizes, whole=whole))
            cut += [] if whole else [True]
        if cut and sizes.data > 1:
            items.append(_gathered(settings, shape, held, trains=any(cut)))
    items += activations(settings, shape, sizes, tokens, args, stage, layers)
    if args is not None and args.get("fp8"):
        items.append(quantized_weights(settings, sizes, held.total, args, stage, layers))
    if args is None or stage == sizes.pipeline - 1:
        items.append(logits(settings, shape, sizes, tokens, in_place=args is None and compiles(settings)))
    if settings.keep_old_actor:
        width = 2 if args is not None and settings.bf16 else 4
        share = (held.total if adapters is None else adapters) / (sizes.data if args is None else 1)
        items.append(Item("older weights", width * share, f"{width} x {share:,.0f} for each version kept", host=True))
    if on_gpu:
        items.append(Item("CUDA context, NCCL", CONTEXT_BYTES, "1 GiB a process"))
    return RankMemory(tuple(items))


def _fsdp(settings: TrainerSettings, held: Held, sizes: Sizes, adapters: int | None, *, whole: bool) -> list[Item]:
    """Estimates a rank of the fsdp backend without its critic. whole: each rank has all weights and gradients, in
    bfloat16 and float32."""
    ranks, total = sizes.data, held.total
    share, text = total / ranks, f"{total:,} / {ranks}" if ranks > 1 else f"{total:,}"
    everywhere = ", whole on each rank" if ranks > 1 else ""
    if adapters is not None:
        items = _lora(settings, held, sizes, adapters, whole=whole)
    elif whole:
        items = [
            Item("weights", 2 * total, f"bfloat16: 2 x {total:,}{everywhere}"),
            Item("gradients", 4 * total, f"float32: 4 x {total:,}{everywhere}"),
            Item("optimizer", 12 * share, f"float32 weights and two moments: 12 x {text}"),
        ]
    else:
        items = [
            Item("weights", 4 * share, f"float32: 4 x {text}"),
            Item("gradients", 4 * share, f"float32: 4 x {text}"),
            Item("optimizer", 8 * share, f"two moments in float32: 8 x {text}"),
        ]
    kind, size, words = (
        ("bfloat16", 2 * total, f"2 x {total:,}{everywhere}") if whole else ("float32", 4 * share, f"4 x {text}")
    )
    if settings.needs_reference and not settings.reference_is_base:
        items.append(Item("reference model", size, f"{kind}: {words}"))
    if settings.loads_teacher:
        items.append(Item("teacher", size, f"{kind}, if it is as large as the policy: {words}"))
    return items


def _critic(settings: TrainerSettings, held: Held, sizes: Sizes, *, whole: bool) -> Item:
    """Estimates the critic of a rank of the fsdp backend. whole: as in `_fsdp`."""
    ranks, total = sizes.data, held.total
    share, text = total / ranks, f"{total:,} / {ranks}" if ranks > 1 else f"{total:,}"
    if whole:
        words = f"weights, gradients and moments of its own: 6 x {total:,} + 12 x {text}"
        return Item("critic", 6 * total + 12 * share, words)
    each = 16 + 2 * bool(settings.bf16)
    return Item("critic", each * share, f"weights, gradients and moments of its own: {each} x {text}")


def _gathered(settings: TrainerSettings, shape: Shape, held: Held, *, trains: bool) -> Item:
    """Estimates what FSDP2 gathers of a sharded model. trains: whether all of its weights have gradients."""
    width = 2 if settings.bf16 else 4
    outer = 2 * shape.vocab * shape.hidden
    layer = max(0, held.total - outer) / max(1, shape.layers)
    gathered = width * (outer + 2 * layer)
    words = f"{width} x (2Vh + 2 layers)"
    if trains:
        return Item(
            "gathered weights", gathered + (width + 4) * layer, f"{words}, gradients of one layer", lasting=False
        )
    return Item("gathered weights", gathered, words, lasting=False)


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


def kv_bytes(config: Mapping[str, Any], tensor: int = 1, *, width: int = 2) -> float:
    """Returns the bytes of a token in the cache of one GPU of an engine; latent attention is not split over GPUs."""
    shape = Shape.of(config)
    if config.get("kv_lora_rank"):
        compressed = (int(config["kv_lora_rank"]) + int(config.get("qk_rope_head_dim") or 0)) * width
        # Keys of an indexer are in FP8, with a factor for 128 numbers.
        indexer = int(config.get("index_head_dim") or 0)
        return shape.layers * (compressed + indexer + 4 * (indexer // 128))
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
