"""Parts of a torch_dist checkpoint that a rank has, of the model and of the optimizer, by key and place.

Keys, shapes and places are megatron-core's (`sharded_state_dict`), so that every layout of ranks can load what any
layout saved, and Megatron-LM can too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from slime.converters.files.rectangles import Index, Shape
from slime.trainer.backends.megatron.optim.offload import allocate, settle

Chunks = list[torch.nn.Module]
# (key, the part of that tensor, what to fill with it)
Read = Callable[[str, Index, Tensor], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """`tensor` is the part from `start` of the tensor `key` of `shape`; it may lack leading dimensions of size 1."""

    key: str
    shape: Shape
    start: Shape
    tensor: Tensor

    @property
    def size(self) -> Shape:
        return (1,) * (len(self.shape) - self.tensor.dim()) + tuple(self.tensor.shape)

    @property
    def index(self) -> Index:
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size, strict=True))


def _metadata() -> dict[str, Any]:
    return {
        # The optimizer's state as tensors of the shapes of the parameters, whatever ranks hold of it.
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def model_state(chunks: Chunks) -> dict[str, Any]:
    """Returns the state by Megatron-LM's names: "model", or "model0" and so on for virtual pipeline stages."""
    single = len(chunks) == 1
    return {
        "model" if single else f"model{number}": chunk.sharded_state_dict(metadata=_metadata())
        for number, chunk in enumerate(chunks)
    }


def model_parts(chunks: Chunks) -> Iterator[Part]:
    """Yields the model's parts on this rank; of copies on several ranks, one rank has the part."""
    yield from _parts(model_state(chunks))


def optimizer_parts(optimizer: Any, chunks: Chunks) -> tuple[list[Part], dict[str, Any]]:
    """Returns (this rank's parts of the optimizer's state, what of it is the same on all ranks). Collective."""
    state = optimizer.sharded_state_dict(model_state(chunks), metadata=_metadata())
    parts = list(_parts({"optimizer": state}))
    rank_types = (ShardedBase, LocalNonpersistentObject)
    _, common = extract_matching_values(state, lambda value: isinstance(value, rank_types), return_lists_as_dicts=True)
    return parts, {"optimizer": common}


def _parts(state: dict[str, Any]) -> Iterator[Part]:
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and is_main_replica(value.replica_id):
            assert value.data is not None and value.flattened_range is None
            yield Part(value.key, tuple(value.global_shape), tuple(value.global_offset), value.data.detach())


@torch.no_grad()
def load_model(chunks: Chunks, read: Read) -> None:
    """Fills every parameter and persistent buffer, one at a time."""
    for state in model_state(chunks).values():
        for value in state.values():
            if isinstance(value, ShardedTensor):
                _fill(value, read)
            elif isinstance(value, ShardedTensorFactory):
                built = value.build()
                dict_list_map_inplace(lambda part: _read(part, read), built)
                value.data.copy_(value.merge_fn(built))


@torch.no_grad()
def load_optimizer(optimizer: Any, chunks: Chunks, read: Read, updates: int) -> None:
    """Restores moments and float32 weights. updates: that the moments have seen."""
    _allocate(optimizer, updates)
    state = optimizer.sharded_state_dict(model_state(chunks), is_loading=True, metadata=_metadata())
    factories, _ = extract_matching_values(
        state, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(state)

    def filled(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return _read(value, read)
        return value.unwrap() if isinstance(value, LocalNonpersistentObject) else value

    dict_list_map_inplace(filled, state)
    state = apply_factory_merges(state, factories)
    chained = optimizer.chained_optimizers
    for number, part in enumerate(chained):
        _restore(part, state if len(chained) == 1 else state[number])


def _restore(optimizer: Any, state: dict[str, Any]) -> None:
    if getattr(optimizer, "is_stub_optimizer", False):
        return
    if not isinstance(optimizer, DistributedOptimizer):
        optimizer.load_state_dict(state)
        return
    # Megatron takes the step counters of torch's AdamW for tensors of the checkpoint, so they are set aside meanwhile.
    # All parameters share one counter, which each of them would advance: give each a copy.
    inner = optimizer.optimizer.state
    steps = {parameter: of.pop("step") for parameter, of in inner.items() if "step" in of}
    optimizer.load_parameter_state_from_fully_reshardable(state["param_state"])
    for parameter, step in steps.items():
        inner[parameter]["step"] = step.clone()
    if isinstance(optimizer.optimizer, HybridDeviceOptimizer):
        settle(optimizer.optimizer)


def _allocate(optimizer: Any, updates: int) -> None:
    """Allocates the state that Megatron's optimizers lack before the first update: they load into the layout of
    existing state."""
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            allocate(part.optimizer, updates)
            continue
        part.init_state_fn(part.optimizer, part.config)
        if not isinstance(part.optimizer, torch.optim.Adam | torch.optim.AdamW):
            # Other optimizers have fused kernels, which count steps per group and not per parameter.
            for group in part.optimizer.param_groups:
                group["step"] = updates
            continue
        for state in part.optimizer.state.values():
            state["step"] = torch.tensor(float(updates))


def _read(part: ShardedTensor, read: Read) -> Tensor:
    tensor = torch.empty(part.local_shape, dtype=part.dtype)
    shape = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    index = tuple(slice(a, a + n) for a, n in zip(part.global_offset, shape, strict=True))
    read(part.key, index, tensor.view(shape))
    return tensor


def _fill(part: ShardedTensor, read: Read) -> None:
    assert part.data is not None
    part.data.copy_(_read(part, read))
