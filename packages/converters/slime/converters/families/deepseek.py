"""DeepSeek V3, V3.1 and R1; Moonlight, Kimi K2 and GLM-4.7-Flash have the same layers, GLM-5 with an indexer in each.

An indexer chooses the keys that a query attends to (DeepSeek sparse attention, DSA).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.converters.families import arguments, blocks
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import moe_layers, num_mtp_layers, refuse, required, rope
from slime.converters.families.mapping import Parameter
from slime.converters.families.mtp import mtp_parameters, shared_copies
from slime.types.errors import NotAvailable

# Defaults of transformers' Glm4MoeLiteConfig and GlmMoeDsaConfig.
FLASH_DEFAULTS: dict[str, Any] = {"first_k_dense_replace": 1, "rms_norm_eps": 1e-5}
# Names of an indexer's sizes, behind `index_` in config.json and `dsa_indexer_` among Megatron's arguments.
INDEXER = ("n_heads", "head_dim", "topk")
SPARSE_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3, "rms_norm_eps": 1e-5, "index_topk": 2048, "index_n_heads": 32, "index_head_dim": 128,
}  # fmt: skip


def _arguments(config: Config) -> dict[str, Any]:
    refuse(config, "attention_bias", False, "linear layers have no biases here")
    refuse(config, "rope_interleave", True, "Megatron rotates pairs of neighbours in latent attention")
    return (
        arguments.decoder(config)
        | arguments.ahead(config)
        | _latent_attention(config)
        | arguments.experts(config, required(config, "n_routed_experts"))
        | arguments.sigmoid_router(config)
    )


def _latent_attention(config: Config) -> dict[str, Any]:
    args: dict[str, Any] = {
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "kv_lora_rank": required(config, "kv_lora_rank"),
        "qk_head_dim": required(config, "qk_nope_head_dim"),
        "qk_pos_emb_head_dim": required(config, "qk_rope_head_dim"),
        "v_head_dim": required(config, "v_head_dim"),
        **_rope(config),
    }
    if config.get("q_lora_rank") is not None:
        args["q_lora_rank"] = config["q_lora_rank"]
    return args


def _rope(config: Config) -> dict[str, Any]:
    values = rope(config)
    kind = values["rope_type"]
    if kind == "default":
        return {"rope_type": "rope"}
    if kind != "yarn":
        reason = "latent attention has default or yarn here"
        raise NotAvailable.unavailable(f"rope_type {kind!r}", reason).at("config.json")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": values["factor"],
        "original_max_position_embeddings": values["original_max_position_embeddings"],
        "beta_fast": values.get("beta_fast", 32),
        "beta_slow": values.get("beta_slow", 1),
        "mscale": values.get("mscale", 1.0),
        "mscale_all_dim": values.get("mscale_all_dim", 0.0),
    }


def _parameters(config: Config) -> Iterator[Parameter]:
    count = required(config, "num_hidden_layers")
    kinds = moe_layers(config, count + num_mtp_layers(config))
    yield from blocks.decoder(config, lambda number: _layer(config, kinds[number]))
    yield from mtp_parameters(config, lambda number: _layer(config, kinds[number]))


def _layer(config: Config, has_experts: int) -> Iterator[Parameter]:
    yield from blocks.layer_norms(required(config, "hidden_size"))
    yield from blocks.latent_attention(config)
    if config.get("index_topk"):
        yield from blocks.indexer(config)
    if has_experts:
        count, shared = required(config, "n_routed_experts"), config.get("n_shared_experts") or 0
        yield from blocks.moe(config, count, bias=True, shared=shared)
    else:
        yield from blocks.dense_mlp(config)


def _flash_arguments(config: Config) -> dict[str, Any]:
    refuse(rope(config), "partial_rotary_factor", 1.0, "latent attention rotates all of its rotary channels")
    return _arguments({**FLASH_DEFAULTS, **config})


def _flash_parameters(config: Config) -> Iterator[Parameter]:
    return _parameters({**FLASH_DEFAULTS, **config})


def _sparse_arguments(config: Config) -> dict[str, Any]:
    config = {**SPARSE_DEFAULTS, **config}
    for name in ("q_lora_rank", *(f"index_{name}" for name in INDEXER)):
        required(config, name)
    refuse(rope(config), "rope_type", "default", "queries and keys of the indexer are rotated without scaling here")
    refuse(config, "indexer_rope_interleave", True, "the indexer rotates pairs of neighbours")
    _refuse_shared_indexers(config)
    return _arguments(config) | {f"dsa_indexer_{name}": config[f"index_{name}"] for name in INDEXER}


def _refuse_shared_indexers(config: Config) -> None:
    """Raises NotAvailable where layers take the keys that an earlier layer chose, as in GLM-5.2."""
    why = "every layer has an indexer of its own here"
    kinds = config.get("indexer_types") or ()
    if any(kind != "full" for kind in kinds):
        raise NotAvailable.unavailable("indexer_types shared", why).at("config.json")
    if not kinds:
        refuse(config, "index_topk_freq", 1, why)
        pattern = config.get("index_topk_pattern") or ()
        refuse(
            config,
            "index_topk_pattern",
            "F" * len(pattern) if isinstance(pattern, str) else ["full"] * len(pattern),
            why,
        )


def _sparse_parameters(config: Config) -> Iterator[Parameter]:
    config = {**SPARSE_DEFAULTS, **config}
    required(config, "index_topk")
    return _parameters(config)


DEEPSEEK_V3 = Family("DeepSeek V3", ("deepseek_v3", "kimi_k2"), _arguments, _parameters, shared_copies)
GLM4_MOE_LITE = Family("GLM-4.7-Flash", ("glm4_moe_lite",), _flash_arguments, _flash_parameters, shared_copies)
GLM_MOE_DSA = Family("GLM-5", ("glm_moe_dsa",), _sparse_arguments, _sparse_parameters, shared_copies)
