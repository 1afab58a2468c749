"""Megatron's arguments as the configuration object that megatron-core builds a model from."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from slime.converters.megatron.flags.table import by_dest, config_fields
from slime.converters.megatron.rank_layout import virtual_stages
from slime.types.errors import InvalidSetting

_log = logging.getLogger(__name__)

# Kernels that only Transformer Engine has; without them other code computes the same numbers.
_OF_TRANSFORMER_ENGINE = ("moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion", "apply_rope_fusion")
_INDEXER = ("dsa_indexer_n_heads", "dsa_indexer_head_dim", "dsa_indexer_topk")
# Defaults of Megatron-LM's command line that differ from the fields of MLATransformerConfig.
_LATENT_DEFAULTS = {"q_lora_rank": None, "kv_lora_rank": 32, "rotary_scaling_factor": 1.0}


def have_transformer_engine() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine") is not None


def uses_transformer_engine(args: Mapping[str, Any]) -> bool:
    return have_transformer_engine() and args.get("transformer_impl") != "local"


def transformer_config(args: Mapping[str, Any], *, params_dtype: torch.dtype) -> TransformerConfig:
    """Makes the configuration for `args`, Megatron's arguments by attribute; MLATransformerConfig for latent attention.

    An argument that is absent or None has Megatron's default. Fused kernels are used where they are installed. Raises
    InvalidSetting naming an argument that Megatron does not have, or that contradicts another.
    """
    _check(args)
    # Where only one value is accepted, Megatron's default counts as not given.
    explicit = {
        name: value
        for name, value in args.items()
        if value is not None and not (by_dest()[name].status == "same" and value == by_dest()[name].default)
    }
    latent = bool(explicit.get("multi_latent_attention"))
    values: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    values |= config_fields(explicit, "TransformerConfig")
    if latent:
        values |= _LATENT_DEFAULTS | config_fields(explicit, "MLATransformerConfig")
    values |= _shape(explicit, values) | _parallel(explicit, params_dtype) | _fusions(explicit)
    if explicit.get("fp8"):
        # Weights are quantized in every pass: a copy that was kept would take memory that engines use between passes.
        values["disable_parameter_transpose_cache"] = True
    cls = MLATransformerConfig if latent else TransformerConfig
    try:
        return cls(**values)
    except (ValueError, AssertionError, TypeError) as error:
        raise InvalidSetting(f"megatron-core refuses the model's arguments: {error}", field="args") from error


def _check(args: Mapping[str, Any]) -> None:
    for name, value in args.items():
        row = by_dest().get(name)
        if row is None:
            raise InvalidSetting.unknown("argument of Megatron", name, by_dest())
        # Megatron's default is accepted too, because families name it; a switch that is off asks for nothing.
        if row.status == "same" and row.accepts and value not in (None, False, row.default, *row.accepts):
            expected = " or ".join(map(str, row.accepts))
            raise InvalidSetting.must_be(name, expected, got=value, reason=row.note)
    if not args.get("multi_latent_attention"):
        for name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", *_INDEXER):
            if args.get(name) not in (None, by_dest()[name].default):
                raise InvalidSetting.requires(f"{name} {args[name]}", "multi_latent_attention")
    if args.get("qk_layernorm_across_heads") and not args.get("qk_layernorm"):
        # Megatron adds up the gradients of these norms over tensor-parallel ranks only with it.
        raise InvalidSetting.requires("qk_layernorm_across_heads", "qk_layernorm")
    _check_sequence_parallel(args)
    size, groups = args.get("tensor_model_parallel_size") or 1, args.get("num_query_groups") or 1
    if args.get("attention_output_gate") and size > groups:
        raise InvalidSetting.conflict(
            f"tensor_model_parallel_size {size}", f"num_query_groups {groups}",
            "with attention_output_gate a rank has a whole group: megatron-core cuts the queries and not the gates",
        )  # fmt: skip


def _check_sequence_parallel(args: Mapping[str, Any]) -> None:
    size = args.get("tensor_model_parallel_size") or 1
    needs = [name for name in ("num_experts", "multi_latent_attention") if args.get(name)]
    if size > 1 and needs and not args.get("sequence_parallel"):
        # Without it megatron-core does not train experts, and each rank has only a part of the gradient of keys that
        # heads share.
        raise InvalidSetting.requires(f"tensor_model_parallel_size {size} with {needs[0]}", "sequence_parallel")


def _shape(args: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields of the configuration that depend on several arguments."""
    shape: dict[str, Any] = {}
    if not args.get("group_query_attention"):
        shape["num_query_groups"] = None
    if args.get("swiglu"):
        shape |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    for name in ("moe_router_load_balancing_type", "moe_aux_loss_coeff"):
        value = values.get(name)
        if isinstance(value, list | tuple) and len(value) == 1:
            shape[name] = value[0]
    if not args.get("mtp_num_layers"):
        shape["mtp_num_layers"] = None
    if args.get("recompute_activations"):
        shape["recompute_granularity"] = "selective"
    return shape


def _parallel(args: Mapping[str, Any], params_dtype: torch.dtype) -> dict[str, Any]:
    virtual = virtual_stages(args)
    cuda = torch.cuda.is_available()
    overlap = cuda and virtual > 1 and args.get("overlap_p2p_comm", True)
    settings: dict[str, Any] = {
        "params_dtype": params_dtype,
        "pipeline_dtype": params_dtype,
        "bf16": params_dtype == torch.bfloat16,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "sequence_parallel": bool(args.get("sequence_parallel")) and (args.get("tensor_model_parallel_size") or 1) > 1,
        # Rows are packed to different lengths.
        "variable_seq_lengths": True,
        "deallocate_pipeline_outputs": True,
        "overlap_p2p_comm": overlap,
        # gloo has no batched messages that may be waited for in any order.
        "batch_p2p_comm": cuda and not overlap,
        "batch_p2p_sync": cuda,
        "cp_comm_type": args.get("cp_comm_type") if uses_transformer_engine(args) else None,
    }
    if isinstance(settings["cp_comm_type"], list | tuple) and len(settings["cp_comm_type"]) == 1:
        settings["cp_comm_type"] = settings["cp_comm_type"][0]
    if not cuda:
        settings["use_cpu_initialization"] = True
    if args.get("moe_token_dispatcher_type", "allgather") == "allgather":
        # The allgather dispatcher takes rows of one length only.
        settings["moe_token_dispatcher_type"] = "alltoall"
    return settings


def _fusions(args: Mapping[str, Any]) -> dict[str, Any]:
    """Switches off fused kernels that are missing; Megatron-LM has all of them on by default."""
    engine, cuda = uses_transformer_engine(args), torch.cuda.is_available()
    missing = [name for name in _OF_TRANSFORMER_ENGINE if args.get(name) and not engine]
    if missing:
        _log.info("without Transformer Engine the same numbers come without %s", ", ".join(missing))
    # Megatron's output layer needs Apex for this; layers of Transformer Engine do not.
    accumulation = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    # The kernel for packed rows rotates the halves of a head, whatever the flag says; that for latent attention needs
    # YaRN.
    turns_halves = not args.get("rotary_interleaved") and not args.get("multi_latent_attention")
    fusions = {
        "apply_rope_fusion": engine and turns_halves and args.get("apply_rope_fusion", True),
        "masked_softmax_fusion": engine and args.get("masked_softmax_fusion", True),
        "persist_layer_norm": engine and not args.get("no_persist_layer_norm"),
        "gradient_accumulation_fusion": cuda and accumulation and args.get("gradient_accumulation_fusion", True),
        "bias_activation_fusion": cuda and bool(args.get("swiglu")) and args.get("bias_swiglu_fusion", True),
        "bias_dropout_fusion": cuda and args.get("bias_dropout_fusion", True),
    }
    return fusions | {name: engine and bool(args.get(name)) for name in _OF_TRANSFORMER_ENGINE[:3]}
