"""Builds this rank's part of a model: one GPTModel for each of its virtual pipeline stages, with compiled layers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.tensor_parallel import layers as parallel_layers
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.converters.megatron.args import padded_vocab_size
from slime.converters.megatron.flags.table import config_fields
from slime.trainer.backends.fsdp.compilation import Compiler
from slime.trainer.backends.megatron.model import delta_nets
from slime.trainer.backends.megatron.model.attention import CoreAttention
from slime.trainer.backends.megatron.model.config import uses_transformer_engine
from slime.trainer.backends.megatron.model.head import PolicyModel
from slime.trainer.backends.megatron.model.layers import (
    LatentAttention,
    PostNormLayer,
    PostNormSubmodules,
    PredictionLayer,
    SparseLatentAttention,
)
from slime.trainer.backends.megatron.model.norms import LatentNorm, norm_of, use_norms_across_heads

Provider = Callable[..., torch.nn.Module]
log = logging.getLogger(__name__)


def build_model(
    args: Mapping[str, Any],
    config: TransformerConfig,
    *,
    provider: Provider | None = None,
    model: Callable[..., PolicyModel] = PolicyModel,
) -> list[torch.nn.Module]:
    """Builds the chunks of this rank, in the order of their virtual stages; `parallel.initialize` was called before.

    provider: `fn(pre_process=, post_process=[, vp_stage=])` -> model, in place of the GPTModel that `args` describe.
    model: makes that of PolicyModel's arguments.
    """
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(virtual or 1):
        place: dict[str, Any] = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            "vp_stage": stage if virtual else None,
        }
        if provider is None:
            chunk: torch.nn.Module = _policy_model(args, config, model, **place)
        else:
            if "vp_stage" not in inspect.signature(provider).parameters:
                del place["vp_stage"]
            chunk = provider(**place)
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        chunks.append(chunk)
    return chunks


def _policy_model(
    args: Mapping[str, Any],
    config: TransformerConfig,
    model: Callable[..., PolicyModel],
    *,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
) -> PolicyModel:
    engine = uses_transformer_engine(args)
    layers = block_spec(args, config, vp_stage)
    mtp_spec = None
    if config.mtp_num_layers:
        mtp_spec = get_gpt_mtp_block_spec(config, layers, use_transformer_engine=engine, vp_stage=vp_stage)
    for layer in mtp_spec.layer_specs if mtp_spec is not None else ():
        layer.module = PredictionLayer
        if not engine:
            norm = norm_of(config)
            layer.submodules.enorm = layer.submodules.hnorm = layer.submodules.layer_norm = norm
    options = config_fields({name: value for name, value in args.items() if value is not None}, "GPTModel")
    options.setdefault("max_sequence_length", args.get("seq_length"))
    options.setdefault("share_embeddings_and_output_weights", True)
    # The one kind that every family here has.
    options["position_embedding_type"] = "rope"
    return model(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=padded_vocab_size(args),
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        mtp_block_spec=mtp_spec,
        vp_stage=vp_stage,
        **options,
    )


def block_spec(args: Mapping[str, Any], config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    """Returns the parts of the layers of this rank's stage: Transformer Engine's if it is installed, else our own."""
    engine = uses_transformer_engine(args)
    block = get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )
    delta_nets.place(block, config, vp_stage, block.layer_norm)
    # Layers of the same kind share one spec object.
    for layer in {id(layer): layer for layer in block.layer_specs}.values():
        if config.multi_latent_attention:
            layer.submodules.self_attention.module = LatentAttention
        if not engine:
            _use_own_parts(layer, config)
        if config.dsa_indexer_topk:
            layer.submodules.self_attention.module = SparseLatentAttention
            layer.submodules.self_attention.submodules.core_attention = CoreAttention
        if args.get("qk_layernorm_across_heads"):
            use_norms_across_heads(layer.submodules.self_attention, config)
        if args.get("post_self_attn_layernorm") or args.get("post_mlp_layernorm"):
            _use_post_norms(layer, args, block.layer_norm if engine else norm_of(config))
    if not engine:
        block.layer_norm = norm_of(config)
    return block


def _use_own_parts(layer: ModuleSpec, config: TransformerConfig) -> None:
    norm = norm_of(config)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = norm
    attention = layer.submodules.self_attention
    if attention.module is delta_nets.DeltaNetAttention:
        return
    attention.submodules.core_attention = CoreAttention
    norms = {"q_layernorm": norm, "k_layernorm": norm}
    if config.multi_latent_attention:
        norms = {"q_layernorm": LatentNorm, "kv_layernorm": LatentNorm}
    for name, cls in norms.items():
        if getattr(attention.submodules, name) is not IdentityOp:
            setattr(attention.submodules, name, cls)


def _use_post_norms(layer: ModuleSpec, args: Mapping[str, Any], norm: Any) -> None:
    layer.module = PostNormLayer
    layer.submodules = PostNormSubmodules(
        **vars(layer.submodules),
        post_self_attn_layernorm=norm if args.get("post_self_attn_layernorm") else IdentityOp,
        post_mlp_layernorm=norm if args.get("post_mlp_layernorm") else IdentityOp,
    )


def compile_layers(
    chunks: Sequence[torch.nn.Module], args: Mapping[str, Any], config: TransformerConfig, activation_budget: float
) -> Compiler | None:
    """Compiles the layers of `chunks` in place; returns the compiler, which compiles the log-probs, too, or None.

    Only dense models that one rank has whole are compiled. Layers of Transformer Engine are kernels already.
    """
    if (
        config.tensor_model_parallel_size > 1 or config.context_parallel_size > 1
        or config.num_moe_experts or config.multi_latent_attention or config.mtp_num_layers
        or config.recompute_granularity or config.linear_attention_freq
    ):  # fmt: skip
        return None
    compiler = Compiler(activation_budget)
    if uses_transformer_engine(args):
        if args.get("transformer_impl") is None:
            log.info(
                "layers are Transformer Engine's, which is installed: --transformer-impl local compiles other ones, "
                "which are faster for small models (docs/benchmarks/h100.md)"
            )
    else:
        # Megatron's function warns if a layer names no group, and a warning breaks the compiled graph in two.
        parallel_layers.get_tensor_model_parallel_group_if_none = _group_or_default
        for chunk in chunks:
            compiler.layers(list(chunk.decoder.layers))
    return compiler


def _group_or_default(tp_group: Any, is_expert: bool = False, check_initialized: bool = True) -> Any:
    if tp_group is not None or not parallel_state.is_initialized():
        return tp_group
    if is_expert:
        return parallel_state.get_expert_tensor_parallel_group(check_initialized=check_initialized)
    return parallel_state.get_tensor_model_parallel_group(check_initialized=check_initialized)
