"""Megatron's process groups, made from its arguments: how the ranks of a trainer share a model."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import Float16Module

from slime.converters.megatron import cpu_shim
from slime.converters.megatron.rank_layout import sizes_of
from slime.trainer.backends.megatron.model import rotary
from slime.trainer.process.collective import Ranks

Chunks = list[torch.nn.Module]

# Made here rather than by Ranks, so that `destroy` knows what is its own.
_own_group = False


def initialize(args: Mapping[str, Any], ranks: Ranks, *, seed: int = 1234) -> None:
    """Makes Megatron's groups over the ranks of `ranks`, and seeds its random numbers. Collective.

    Where there is one rank, and so no process group yet, makes a group of one. Raises InvalidSetting where the ranks
    cannot be laid out as `args` say.
    """
    global _own_group
    sizes = sizes_of(args, ranks.world_size)
    cpu_shim.install()
    rotary.install()
    cpu_shim.enter_thread()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=datetime.timedelta(minutes=10)
        )
        _own_group = True
    _leave()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual if sizes.virtual > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor if args.get("num_experts") else None,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def destroy() -> None:
    """Leaves Megatron's groups, and the process group if `initialize` made it."""
    global _own_group
    _leave()
    if _own_group:
        dist.destroy_process_group()
        _own_group = False


def _leave() -> None:
    # Megatron forgets most of its groups and torch keeps them, each of gloo's with three threads.
    for group in dict.fromkeys(parallel_state._global_process_group_list or []):
        if group is not None:
            dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()


def mixed_precision(chunks: Chunks, config: Any) -> Chunks:
    """Returns the chunks in wrappers that convert activations, where weights are bfloat16."""
    return [Float16Module(config, chunk) for chunk in chunks] if config.bf16 else chunks
