"""FP8 in the decoder's linear layers: what it requires of a run, checked at the start, and of the length of a row.

megatron-core enters Transformer Engine's context around each layer, in passes with and without gradients. Every recipe
that is taken here scales a tensor by that tensor alone: the same weights and tokens have the same log-probs in every
pass, and there is nothing to save but weights and moments. Weights are parameters in bfloat16. Attention, routers,
delta nets, embedding and output layer compute in bfloat16.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_align_size, get_fp8_context
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from slime.converters.megatron.flags import refuse_fp8_on_cpu
from slime.types.errors import InvalidSetting, NotAvailable

# Tokens that share a factor in the product that makes a weight's gradient. Ranks of sequence parallelism exchange
# quantized tokens, and so hold whole blocks of them.
BLOCK = 128


def require(args: Mapping[str, Any], device: torch.device, *, bf16: bool) -> None:
    """Raises InvalidSetting or NotAvailable where `args`, Megatron's by attribute, ask for FP8 that this process cannot
    compute. Otherwise megatron-core would leave it out without a word."""
    if not args.get("fp8"):
        return
    flag = f"--fp8-format {args['fp8']}"
    if args.get("transformer_impl") == "local":
        reason = "only Transformer Engine's layers compute in FP8"
        raise InvalidSetting.conflict(flag, "--transformer-impl local", reason)
    if device.type != "cuda":
        refuse_fp8_on_cpu(args)
    if importlib.util.find_spec("transformer_engine") is None:
        raise NotAvailable.not_installed(flag, "transformer-engine", "transformer-engine[pytorch]")
    if not bf16:
        raise InvalidSetting.requires(flag, "--bf16", "weights and activations are quantized from bfloat16")


def check_recipe(config: TransformerConfig) -> None:
    """Raises NotAvailable for a recipe that the GPU, CUDA or Transformer Engine of this process does not have."""
    if not config.fp8:
        return
    try:
        # Here Transformer Engine checks the recipe against the device.
        with get_fp8_context(config):
            pass
    except (AssertionError, RuntimeError, ValueError) as error:
        name, cuda = torch.cuda.get_device_name(), torch.version.cuda
        raise NotAvailable.unavailable(
            f"--fp8-recipe {config.fp8_recipe} on {name} with CUDA {cuda}",
            str(error).rstrip("."),
            "--fp8-recipe tensorwise, or on Hopper with CUDA 12.9 or newer blockwise, or on Blackwell mxfp8",
        ) from error


def check_weights(chunks: Iterable[torch.nn.Module], config: TransformerConfig) -> None:
    """Raises InvalidSetting where a chunk has no layers of Transformer Engine, or ones of sizes that FP8 cannot
    multiply."""
    if not config.fp8:
        return
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule  # pants: no-infer-dep

    for chunk in chunks:
        modules = [(n, m) for n, m in chunk.named_modules() if isinstance(m, TransformerEngineBaseModule)]
        weights = [(f"{n}.{key}", w) for n, m in modules for key, w in m.named_parameters(recurse=False) if w.dim() > 1]
        if not weights:
            reason = "no layer of the model is one that computes in FP8"
            raise InvalidSetting.requires(f"--fp8-format {config.fp8}", "layers of Transformer Engine", reason)
        check_sizes(weights, config)


def check_sizes(weights: Iterable[tuple[str, Tensor]], config: TransformerConfig) -> None:
    """Raises InvalidSetting naming the weights that have a size which FP8 products do not take."""
    multiple = get_fp8_align_size(config.fp8_recipe)
    odd = [f"{name} {list(weight.shape)}" for name, weight in weights if any(n % multiple for n in weight.shape)]
    if odd:
        more = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        raise InvalidSetting.conflict(
            f"--fp8-format {config.fp8}",
            "this model and its parallel sizes",
            f"the sizes of each weight on a rank must be multiples of {multiple}, and {odd[0]}{more} is not; use a "
            "smaller --tensor-model-parallel-size or leave out --fp8-format",
        )


def row_multiple(config: TransformerConfig) -> int:
    """Returns the number that the tokens of a row on each rank have to be a multiple of."""
    if not config.fp8:
        return 1
    # Tokens of an expert are padded in its layer.
    return BLOCK if config.fp8_recipe == "blockwise" else get_fp8_align_size(config.fp8_recipe)
