"""Estimates the GPU memory of an engine, and the number of tokens that its KV cache then holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.converters.convert.quantization_config import block_size, group_size, quantization_of
from slime.launcher.plan.trainer_memory import BYTES, byte_size, kv_bytes
from slime.rollout.engines.kind import EngineKind
from slime.rollout.settings.rollout import RolloutSettings

PACKED_BYTES = 4


@dataclass(frozen=True)
class EngineMemory:
    """Memory on one GPU, in bytes.

    taken: weights and KV cache together; None if unknown. tokens: number of tokens that the cache holds. lines: the
    calculation in words.
    """

    weights: float
    taken: float | None
    tokens: int | None
    lines: tuple[str, ...]


def engine_memory(
    kind: EngineKind,
    settings: RolloutSettings,
    config: Mapping[str, Any],
    parameters: int,
    gpu_bytes: float | None,
    *,
    on_cpu: bool = False,
) -> EngineMemory:
    """Estimates the memory of an engine on one GPU, or on the CPU.

    config: of the language model. parameters: number of parameters of the whole model.
    """
    use = kind.memory(settings)
    dtype = use.dtype or str(config.get("dtype") or config.get("torch_dtype") or use.usual_dtype)
    width = BYTES.get(dtype, 2)
    weight_width, weight_dtype = _weight_width(kind, config) or (width, dtype)
    weights = weight_width * parameters / use.gpus
    share = f" / {use.gpus}" if use.gpus > 1 else ""
    names = config.get("architectures")
    packed = on_cpu and any(name in names for name in use.packed_models) if isinstance(names, list) else False
    token = kv_bytes(config, use.gpus, width=1 if use.small_cache else width)
    lines = [
        f"weights {byte_size(weights)} = {weight_width:g} x {parameters:,}{share} ({weight_dtype})",
        *([f"packed for the CPU besides: {byte_size(PACKED_BYTES * parameters)} = 4 x {parameters:,}"] * packed),
        f"each token in the cache takes {byte_size(token)}",
    ]
    if packed:
        weights += PACKED_BYTES * parameters
    if use.fraction is None:
        return EngineMemory(weights, None, None, (*lines, use.because))
    if gpu_bytes is None:
        line = f"{use.because} {use.fraction:g} of the GPU: weights and cache"
        return EngineMemory(weights, None, None, (*lines, line))
    taken = use.fraction * gpu_bytes
    tokens = max(0, int((taken - weights) / token)) if token else 0
    lines.append(
        f"{use.because} {use.fraction:g} x {byte_size(gpu_bytes)} = {byte_size(taken)}; "
        f"without the weights, room for {tokens:,} tokens"
    )
    return EngineMemory(weights, taken, tokens, tuple(lines))


def _weight_width(kind: EngineKind, config: Mapping[str, Any]) -> tuple[float, str] | None:
    """Returns the bytes of a weight with its share of the factors, and the name of its type; None for a plain model."""
    quantization = (quantization_of(config) if kind.holds_quantized else None) or {}
    if block_size(quantization) is not None:
        return 1, "fp8"
    group = group_size(quantization)
    return None if group is None else (0.5 + BYTES["bf16"] / group, "int4")
