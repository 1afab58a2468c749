"""Models that --true-on-policy-mode can compute by the engine's kernels, told from a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.converters.families.config_json import head_dim, rope
from slime.converters.families.qwen import QWEN3_HEAD_DIM
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import NotAvailable

# Models whose layers the kernels make up: attention with or without norms of its heads, and a gated SiLU.
MODEL_TYPES = frozenset({"llama", "qwen3"})
# FlashAttention 3 adds up keys by blocks of 128 where it reads a prompt, and where it generates, of other sizes but for
# heads of this width.
HEAD_WIDTH = 128


def uses_engine_kernels(settings: TrainerSettings, device_type: str) -> bool:
    """Tells whether a trainer on such a device, "cuda" or "cpu", computes by the engine's kernels."""
    computes = settings.true_on_policy_mode and settings.train_backend == "fsdp" and device_type == "cuda"
    return computes and bool(settings.on(device_type).bf16)


def check_engine_layers(config: Mapping[str, Any], flag: str = "--hf-checkpoint") -> None:
    """Raises NotAvailable for a model with other layers than the engine's kernels make up.

    config: a config.json, or the `to_dict()` of a config of transformers. flag: names the model.
    """
    kind, rope_type = config.get("model_type"), rope(config)["rope_type"]
    if kind not in MODEL_TYPES:
        reason = f"its model_type is {kind}, and not one of {', '.join(sorted(MODEL_TYPES))}"
    elif _has_windows(config):
        reason = "its layers have windows"
    elif rope_type != "default":
        reason = f"its rope_type is {rope_type}"
    elif config.get("hidden_act", "silu") != "silu":
        reason = f"its hidden_act is {config['hidden_act']}"
    elif config.get("mlp_bias"):
        reason = "its mlp_bias is on"
    elif (width := head_width(config)) != HEAD_WIDTH:
        reason = f"its heads have {width} elements and not {HEAD_WIDTH}: while it generates, SGLang rounds differently"
    else:
        return
    raise NotAvailable.unavailable("--true-on-policy-mode for this model", reason).at(flag)


def head_width(config: Mapping[str, Any]) -> int:
    return head_dim(config, QWEN3_HEAD_DIM.get(str(config.get("model_type"))))


def _has_windows(config: Mapping[str, Any]) -> bool:
    if config.get("layer_types"):
        return set(config["layer_types"]) != {"full_attention"}
    if config.get("model_type") == "qwen3":
        # Its files have a size of windows, which by default is not used, and then only from one layer on.
        first = config.get("max_window_layers", 28)
        used = config.get("use_sliding_window", False) and first < config.get("num_hidden_layers", first + 1)
        return bool(used and config.get("sliding_window"))
    return bool(config.get("sliding_window"))
