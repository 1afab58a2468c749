"""Random Hugging Face directories of every family, of 2 or 3 layers, in a tenth of a second each.

    path = write_tiny("qwen3", tmp_path / "hf", dtype=torch.bfloat16, shard_bytes=20_000)

Every parameter is random, norms, biases and the router's bias too, so that one that goes astray shows. The
multi-token-prediction layers of real checkpoints, for which transformers has no module, are written beside the others.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": ROPE,
    "tie_word_embeddings": False,
}
MOE = {"num_hidden_layers": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SIGMOID = {
    **MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
LATENT = {
    **SIGMOID,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# Longer sequences than the keys that the indexer chooses, and enough of its heads that no two keys score the same.
SPARSE = {**LATENT, "index_topk": 5, "index_n_heads": 16, "index_head_dim": 16, "num_nextn_predict_layers": 1}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
}
# Every other layer is a gated delta net.
GATED = {
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
GATED_MOE = {**GATED, **MOE, "num_experts": 4, "shared_expert_intermediate_size": 24}
MINIMAX = {
    "num_hidden_layers": 3,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "head_dim": 32,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
    "bos_token_id": None,
    "eos_token_id": 1,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Tiny:
    """transformers: the class of the config, without "Config"; changes: of BASE; model_type, architecture: of the
    directory, where they are not those of that class; ahead: whether multi-token-prediction layers are written."""

    transformers: str
    changes: dict[str, Any]
    model_type: str | None = None
    architecture: str | None = None
    ahead: bool = False


_TINY = {
    "qwen2": Tiny("Qwen2", {"vocab_size": 157}),
    "qwen2_tied": Tiny("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": Tiny("Qwen3", {"head_dim": 32, "vocab_size": 157}),
    "qwen3_tied": Tiny("Qwen3", {"head_dim": 24, "tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3_moe": Tiny("Qwen3Moe", {**MOE, "num_experts": 4, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3_moe_dense_first": Tiny(
        "Qwen3Moe",
        {**MOE, "num_experts": 4, "head_dim": 16, "norm_topk_prob": False, "mlp_only_layers": [0], "vocab_size": 157},
    ),
    "qwen3_next": Tiny("Qwen3Next", {**GATED_MOE, "vocab_size": 157}),
    "qwen3_5": Tiny("Qwen3_5Text", GATED),
    "qwen3_5_moe": Tiny("Qwen3_5MoeText", {**GATED_MOE, "tie_word_embeddings": True}),
    "llama": Tiny("Llama", {"vocab_size": 157, "rope_parameters": LLAMA3, "max_position_embeddings": 16384}),
    "llama_tied": Tiny("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "glm4": Tiny(
        "Glm4",
        {
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "glm4_moe": Tiny(
        "Glm4Moe",
        {
            **SIGMOID,
            "head_dim": 16,
            "attention_bias": True,
            "use_qk_norm": True,
            "vocab_size": 157,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe_mtp": Tiny(
        "Glm4Moe",
        {
            **SIGMOID,
            "head_dim": 32,
            "attention_bias": True,
            "use_qk_norm": False,
            "num_nextn_predict_layers": 1,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        },
        ahead=True,
    ),
    "deepseek_v3": Tiny(
        "DeepseekV3",
        {
            **LATENT,
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "num_experts_per_tok": 4,
            "rope_parameters": YARN,
            "num_nextn_predict_layers": 1,
        },
        ahead=True,
    ),
    "glm4_moe_lite": Tiny("Glm4MoeLite", {**LATENT, "vocab_size": 157, "num_nextn_predict_layers": 1}, ahead=True),
    "glm_moe_dsa": Tiny("GlmMoeDsa", {**SPARSE, "vocab_size": 157, "rms_norm_eps": 1e-5}, ahead=True),
    "moonlight": Tiny(
        "DeepseekV3", {**LATENT, "q_lora_rank": None, "n_shared_experts": 2, "vocab_size": 157, "rms_norm_eps": 1e-5}
    ),
    "kimi_k2": Tiny("DeepseekV3", {**LATENT, "rope_parameters": YARN}, "kimi_k2"),
    "minimax_m2": Tiny("MiniMaxM2", MINIMAX),
    # Two ranks have the same key.
    "minimax_m2_one_key": Tiny("MiniMaxM2", {**MINIMAX, "num_key_value_heads": 1, "vocab_size": 157}),
    "mimo": Tiny("Qwen2", {"num_nextn_predict_layers": 1, "vocab_size": 157}, "mimo", "MiMoForCausalLM", ahead=True),
}
NAMES = tuple(_TINY)
# Families that transformers has a class for, so that logits can be compared.
WITH_TRANSFORMERS = tuple(name for name, tiny in _TINY.items() if tiny.model_type is None)


def transformers_config(
    name: str, *, tied: bool | None = None, vocab_size: int | None = None, layers: int | None = None
) -> Any:
    """Returns the family of the model inside the tiny directory `name`: Qwen2 for "mimo", DeepSeek V3 for "kimi_k2"."""
    import transformers

    tiny = _TINY[name]
    values = {**BASE, **tiny.changes}
    if tied is not None:
        values["tie_word_embeddings"] = tied
    if vocab_size is not None:
        values["vocab_size"] = vocab_size
    if layers is not None:
        values["num_hidden_layers"] = layers
    return getattr(transformers, f"{tiny.transformers}Config")(**json.loads(json.dumps(values)))


def write_tiny(
    name: str,
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    shard_bytes: int | None = None,
    tied: bool | None = None,
    vocab_size: int | None = None,
    layers: int | None = None,
    ahead: bool = True,
) -> Path:
    """Writes config.json and model*.safetensors; the same arguments write the same bytes. Returns the directory.

    shard_bytes: a file's size, one file without; tied, vocab_size, layers: instead of those of `name`; ahead: False
    leaves out the multi-token-prediction layers, as transformers does.
    """
    from transformers import AutoModelForCausalLM

    tiny, directory = _TINY[name], Path(directory)
    config = transformers_config(name, tied=tied, vocab_size=vocab_size, layers=layers)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to_empty(device="cpu")
    model.tie_weights()
    generator = torch.Generator().manual_seed(seed)
    fill = functools.partial(_fill, generator)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            tensor.copy_(fill(key, tuple(tensor.shape)))
    model.save_pretrained(directory, max_shard_size=shard_bytes or "5GB")
    _describe(directory, tiny)
    if tiny.ahead and ahead:
        tensors = {key: fill(key, shape).to(dtype) for key, shape in _ahead(json_config(directory))}
        state = model.state_dict()
        for key in tensors:
            if key.endswith(".embed_tokens.weight"):
                tensors[key] = state["model.embed_tokens.weight"]
            elif key.endswith(".shared_head.head.weight"):
                tensors[key] = state["lm_head.weight"].clone()
        _add(directory, tensors)
    return directory


def json_config(directory: str | Path) -> dict[str, Any]:
    return dict(json.loads((Path(directory) / "config.json").read_text()))


def _describe(directory: Path, tiny: Tiny) -> None:
    config = json_config(directory)
    if tiny.model_type is not None:
        config["model_type"] = tiny.model_type
    if tiny.architecture is not None:
        config["architectures"] = [tiny.architecture]
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _fill(generator: torch.Generator, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Norms about 1, the rest about 0."""
    noise = torch.randn(shape, generator=generator)
    if re.search(r"norm[^.]*\.weight$", name):
        return 1 + 0.1 * noise
    return noise * (0.1 if len(shape) == 1 else shape[-1] ** -0.5)


def _ahead(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of what a checkpoint of the family has for multi-token-prediction layers, as published."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    kinds: dict[str, Callable[[dict[str, Any]], dict[str, tuple[int, ...]]]] = {
        "mimo": _qwen2_layer,
        "glm4_moe": _glm4_moe_layer,
        "deepseek_v3": _deepseek_layer,
        "glm4_moe_lite": _deepseek_layer,
        "glm_moe_dsa": _sparse_layer,
    }
    layer = kinds[config["model_type"]](config)
    for number in range(config["num_nextn_predict_layers"]):
        if config["model_type"] == "mimo":
            prefix = f"model.mtp_layers.{number}"
            around = {
                "token_layernorm": (hidden,),
                "hidden_layernorm": (hidden,),
                "input_proj": (hidden, 2 * hidden),
                "final_layernorm": (hidden,),
            }
        else:
            prefix = f"model.layers.{config['num_hidden_layers'] + number}"
            around = {
                "enorm": (hidden,),
                "hnorm": (hidden,),
                "eh_proj": (hidden, 2 * hidden),
                "shared_head.norm": (hidden,),
                # Copies of the model's own.
                "shared_head.head": (vocabulary, hidden),
                "embed_tokens": (vocabulary, hidden),
            }
        for key, shape in around.items():
            yield f"{prefix}.{key}.weight", shape
        for key, shape in layer.items():
            yield f"{prefix}.{key}", shape


def _norms(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (config["hidden_size"],) for name in ("input_layernorm", "post_attention_layernorm")}


def _attention(config: dict[str, Any], channels: int) -> dict[str, tuple[int, ...]]:
    hidden, rows = config["hidden_size"], {"q": config["num_attention_heads"] * channels}
    rows["k"] = rows["v"] = config["num_key_value_heads"] * channels
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{key}_proj.weight": (n, hidden) for key, n in rows.items()}
    shapes |= {f"self_attn.{key}_proj.bias": (n,) for key, n in rows.items()}
    return shapes | {"self_attn.o_proj.weight": (hidden, rows["q"])}


def _mlp(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    shapes = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    return {f"{prefix}.{key}.weight": shape for key, shape in shapes.items()}


def _qwen2_layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    channels = config["hidden_size"] // config["num_attention_heads"]
    mlp = _mlp("mlp", config["hidden_size"], config["intermediate_size"])
    return {**_norms(config), **_attention(config, channels), **mlp}


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "mlp.gate.weight": (count, hidden),
        "mlp.gate.e_score_correction_bias": (count,),
    }
    for number in range(count):
        shapes |= _mlp(f"mlp.experts.{number}", hidden, ffn)
    return shapes | _mlp("mlp.shared_experts", hidden, ffn * config["n_shared_experts"])


def _glm4_moe_layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {**_norms(config), **_attention(config, config["head_dim"]), **_experts(config)}


def _deepseek_layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, rotary = config["hidden_size"], config["num_attention_heads"], config["qk_rope_head_dim"]
    queries = heads * (config["qk_nope_head_dim"] + rotary)
    attention = {
        "q_a_proj": (config["q_lora_rank"], hidden),
        "q_a_layernorm": (config["q_lora_rank"],),
        "q_b_proj": (queries, config["q_lora_rank"]),
        "kv_a_proj_with_mqa": (config["kv_lora_rank"] + rotary, hidden),
        "kv_a_layernorm": (config["kv_lora_rank"],),
        "kv_b_proj": (heads * (config["qk_nope_head_dim"] + config["v_head_dim"]), config["kv_lora_rank"]),
        "o_proj": (hidden, heads * config["v_head_dim"]),
    }
    named = {f"self_attn.{key}.weight": shape for key, shape in attention.items()}
    return {**_norms(config), **named, **_experts(config)}


def _sparse_layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, width = config["hidden_size"], config["index_n_heads"], config["index_head_dim"]
    indexer = {
        "wq_b.weight": (heads * width, config["q_lora_rank"]),
        "wk.weight": (width, hidden),
        "k_norm.weight": (width,),
        "k_norm.bias": (width,),
        "weights_proj.weight": (heads, hidden),
    }
    return {**_deepseek_layer(config), **{f"self_attn.indexer.{key}": shape for key, shape in indexer.items()}}


def _add(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Adds the tensors as one more shard, or to the only file."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        only = directory / "model.safetensors"
        with safe_open(only, framework="pt") as file:
            tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        save_file(tensors, only, metadata={"format": "pt"})
        return
    content = json.loads(index.read_text())
    save_file(tensors, directory / "model-ahead.safetensors", metadata={"format": "pt"})
    content["weight_map"] |= dict.fromkeys(tensors, "model-ahead.safetensors")
    content["metadata"]["total_size"] += sum(tensor.nbytes for tensor in tensors.values())
    index.write_text(json.dumps(content, indent=2, sort_keys=True))
