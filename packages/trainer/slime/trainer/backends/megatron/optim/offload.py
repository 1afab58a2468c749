"""`--optimizer-cpu-offload`: float32 weights and moments in host memory, updated by the host's processors.

megatron-core's HybridDeviceOptimizer does the work.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

from slime.types.errors import InvalidSetting

FLAG = "--optimizer-cpu-offload"


def check_optimizer(args: Mapping[str, Any], *, bf16: bool, on_gpu: bool) -> None:
    """Raises InvalidSetting where what the flags need is missing: a GPU to relieve, bfloat16, Transformer Engine."""
    offload = args.get("optimizer_cpu_offload")
    if args.get("use_precision_aware_optimizer") and not offload and not find_spec("transformer_engine"):
        raise InvalidSetting.requires(
            "--use-precision-aware-optimizer", f"Transformer Engine or {FLAG}", "Transformer Engine is not installed"
        )
    if offload and not on_gpu:
        raise InvalidSetting.requires(FLAG, "a GPU", "without one the optimizer is on the CPU already")
    if offload and not bf16:
        raise InvalidSetting.requires(FLAG, "--bf16", "it keeps float32 copies of bfloat16 weights on the host")


@torch.no_grad()
def allocate(optimizer: HybridDeviceOptimizer, updates: int) -> None:
    """Makes room for the moments, as after the first update, without moving a weight. updates: done so far."""
    for part in optimizer.sub_optimizers:
        if not isinstance(part, torch.optim.Adam | torch.optim.AdamW):
            # Fused kernels count the steps of a group.
            for group in part.param_groups:
                group["step"] = updates
        for parameter in (parameter for group in part.param_groups for parameter in group["params"]):
            part.state[parameter] = {
                "step": torch.tensor(float(updates), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    optimizer._sync_sub_optimizers_state_to_hdo()


@torch.no_grad()
def settle(optimizer: HybridDeviceOptimizer) -> None:
    """Moves loaded states to the device of their parameters. Without Transformer Engine, host and GPU have the same
    class of optimizer, and megatron-core loads all of its states to the host."""
    for part in optimizer.sub_optimizers:
        for parameter, state in part.state.items():
            for name, value in state.items():
                state[name] = parameter if name == "master_param" else value.to(parameter.device)
