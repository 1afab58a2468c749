"""Loads a transformers language model, which may also read images, and shards it over ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from slime.converters.convert.hf_source import HfSource
from slime.converters.convert.quantization_config import block_size, group_size, quantization_of
from slime.trainer.backends import delta_net, sparse_attention
from slime.trainer.backends.fsdp.attention import use_packed_attention
from slime.trainer.backends.fsdp.vision import accept_images
from slime.trainer.settings.adapters import check_adapter, refuse_adapter
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable
from slime.types.files import no_directory
from slime.types.models.vision import trained_vision, vision_of

_PACKABLE = frozenset({"full_attention", "sliding_attention"})
# Kinds of layers that only some families have in a form that is known here.
_PACKABLE_OF = {"linear_attention": delta_net.FAMILIES, "indexed_attention": sparse_attention.FAMILIES}


def load_model(path: str, *, flag: str, other_head: bool = False, train_vision: bool | None = None) -> nn.Module:
    """Loads a Hugging Face directory in float32, in eval mode (no dropout), with attention over packed rows.

    other_head: the output layer will be replaced, so the one in the files may have any shape. train_vision: the value
    of --train-vision.

    Raises MissingFile, InvalidFile or InvalidSetting naming `flag`, NotAvailable for layers that cannot handle packed
    rows.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    if not Path(path).is_dir():
        raise no_directory(path, flag)
    if not (Path(path) / "config.json").is_file():
        raise InvalidFile(
            f"{flag}: {path} has no config.json", field=flag, value=path, expected="a Hugging Face directory"
        )
    # transformers would look for the model that it belongs to, with the package peft.
    if flag == "--load":
        check_adapter(path, 0)
    refuse_adapter(path, flag)
    config = AutoConfig.from_pretrained(path)
    _turn_off_dropout(config)
    if other_head:
        _untie_head(config)
    model_type = config.get_text_config().model_type
    for kind in layer_types(config):
        if kind not in _PACKABLE and model_type not in _PACKABLE_OF.get(kind, ()):
            raise NotAvailable.unavailable(f"layer_types {kind}", "these layers cannot handle packed rows").at(flag)
    try:
        model_class = AutoModelForImageTextToText
        if trained_vision(config.to_dict(), train_vision) is None:
            model_class = AutoModelForCausalLM
        how: dict[str, Any] = {
            "config": config, "dtype": torch.float32, "attn_implementation": "sdpa", "use_safetensors": True,
            "ignore_mismatched_sizes": other_head,
        }  # fmt: skip
        quantization = quantization_of(config.to_dict()) or {}
        if block_size(quantization) is None and group_size(quantization) is None:
            model = model_class.from_pretrained(path, **how)
        else:
            model = _load_dequantized(model_class, path, **how)
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{flag}: {path}: {error}", field=flag, value=path) from error
    model.config.use_cache = False
    language = model if model_class is AutoModelForCausalLM else model.get_decoder()
    delta_net.use_packed_delta_nets(language)
    sparse_attention.use_packed_sparse_attention(language)
    use_packed_attention(language, flag=flag)
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            # Rows have no padding: where this token occurs the model wrote it, and it trains like any other.
            module.padding_idx = None
    if model_class is AutoModelForImageTextToText:
        accept_images(model)
    return model.eval()


def _load_dequantized(model_class: Any, path: str, *, config: Any, **how: Any) -> nn.Module:
    """Loads a model in FP8 or INT4 as a plain one, with the weights that a Megatron model has from the same directory.

    transformers would keep the weights quantized where it can, and they would not train.
    """
    source = HfSource(path, config.to_dict())
    try:
        tensors = {name: source.load(name) for name in source.tensors}
    finally:
        source.close()
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        kind = type(model_class.from_config(config))
    return kind.from_pretrained(None, config=config, state_dict=tensors, **how)


def check_vocabulary(config: Any, tokens: int, flag: str, path: str) -> None:
    """Raises InvalidSetting if the model at `path` has fewer than `tokens` tokens, the policy's vocabulary."""
    known = config.get_text_config().vocab_size
    if known < tokens:
        raise InvalidSetting.must_be(
            flag, f"a model that knows the policy's {tokens} tokens", got=known,
            reason=f"{path} has a smaller vocabulary",
        )  # fmt: skip


def layer_types(config: Any) -> set[str]:
    text = config.get_text_config()
    declared = getattr(text, "layer_types", None)
    if declared:
        return set(declared)
    return {"sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"}


def _turn_off_dropout(config: Any) -> None:
    """Sets every dropout rate in a model's config and its nested configs to 0."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "get_text_config"):
            _turn_off_dropout(value)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)


def _untie_head(config: Any) -> None:
    """Gives the output layer its own weights, a copy of the embedding's."""
    for part in (config, config.get_text_config()):
        part.tie_word_embeddings = False
        if getattr(part, "final_logit_softcapping", None):
            part.final_logit_softcapping = None


def enable_recomputation(model: Any) -> None:
    """Makes the backward pass recompute activations.

    transformers recomputes modules in train mode only. Only the recomputed modules themselves get that mode, nothing
    inside them, so that a router's jitter, for example, stays off.
    """
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.training = True


def shard(model: nn.Module, device_type: str, world_size: int, *, bf16: bool) -> nn.Module:
    """Shards a model with FSDP2 over all ranks: one group of parameters per decoder layer, and one for the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device_type, (world_size,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


def shards_two_types() -> bool:
    """Tells whether FSDP2 takes frozen parameters of another type beside those that train; torch 2.7 does not."""
    return tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 9)


def round_parameters(model: nn.Module) -> None:
    """Rounds parameters that do not train to bfloat16. Buffers (rotary frequencies) keep their type, as under FSDP2."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def reshard(model: nn.Module) -> None:
    """Frees the whole parameters that the last forward pass left, so that the model holds each rank's shard."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of the longest ModuleList: the decoder layers of every causal language model in transformers.

    Vision layers are not included: a rank whose samples have no images does not run them.
    """
    language: Any = model if vision_of(model.config.to_dict()) is None else model.get_decoder()  # type: ignore[operator]
    lists = [list(m.children()) for m in language.modules() if isinstance(m, nn.ModuleList)]
    return max(lists, key=len, default=[])
