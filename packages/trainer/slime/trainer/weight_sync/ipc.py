"""Transport `ipc`: for SGLang engines on the trainer's own GPUs, which read each bucket where it lies.

POST {engine}/update_weights_from_tensor, load_format "flattened_bucket", with a CUDA IPC handle for each of its
tensor-parallel ranks. Only a process on a GPU can make a handle to its memory: every rank lays the whole bucket out on
its own GPU, makes the handle, and waits while rank 0 posts the handles of all. The engines' GPUs, engine by engine, are
the GPUs of the trainer's ranks in rank order, one rank per GPU; an update may be for some of the engines only.

Weights that already lie end to end in memory that stays allocated, in the dtype of the wire, are neither copied nor
divided into buckets: the handle points to that memory.

A handle travels as a pickle, because SGLang reads nothing else. The pickle uses only names that SGLang's unpickler
allows: torch's and builtins. It goes to engines that this run started, and nothing that engines send is unpickled here.
"""

from __future__ import annotations

import base64
import io
import itertools
import types
from collections.abc import Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from slime.trainer.process.collective import Ranks
from slime.trainer.weight_sync.base import Weights, WeightTransport, buckets, describe, flatten
from slime.trainer.weight_sync.requests import EngineRequests
from slime.types.clients import Engine
from slime.types.errors import InvalidSetting

# Place of the GPU's number among the arguments that rebuild a tensor in the other process.
DEVICE_ARGUMENT = 6


class IpcTransport(WeightTransport):
    """Shares GPU memory with engines. bucket_bytes: largest bucket of weights that have to be copied first; a GPU holds
    the tensors of one bucket and a flat copy of them."""

    name = "ipc"
    on_every_rank = True
    on_device = True

    def __init__(self, ranks: Ranks, bucket_bytes: int, timeout_seconds: float) -> None:
        self._ranks = ranks
        self._bucket_bytes = bucket_bytes
        self._requests = EngineRequests(timeout_seconds)

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        self.check_engines(engines)
        shares = ranks_of_engines(engines, self._ranks.world_size)
        if not shares:
            return 0
        pieces, rest = _pieces(weights) if in_place else ([], weights)
        sent = number = 0
        for bucket, last in buckets(rest, self._bucket_bytes):
            if bucket:
                what, layout = describe(number, bucket, version), _layout(bucket)
                sent += self._send(shares, flatten(bucket), layout, version if last and not pieces else None, what)
                number += 1
        for piece in pieces:
            what = describe(number, piece, version)
            memory = _memory(piece)
            self._send(shares, memory, _places(piece, memory), version if piece is pieces[-1] else None, what)
            sent += sum(tensor.nbytes for tensor in piece.values())
            number += 1
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()
        return sent

    def _send(
        self,
        shares: Sequence[tuple[Engine, range]],
        flat: Tensor,
        layout: Sequence[types.SimpleNamespace],
        version: int | None,
        what: str,
    ) -> int:
        """Returns when the memory is free again: an engine answers once it no longer uses it."""
        # A handle that no process opens would keep its memory for ever.
        used = any(self._ranks.rank in share for _, share in shares)
        handle = self._ranks.together(lambda: serialize(flat, layout) if used else "")
        handles = self._ranks.gather(handle)
        self._ranks.together(lambda: self._post(shares, handles, version, what))
        return flat.nbytes

    def _post(
        self, shares: Sequence[tuple[Engine, range]], handles: Sequence[str], version: int | None, what: str
    ) -> None:
        if self._ranks.rank != 0:
            return
        body: dict[str, Any] = {"load_format": "flattened_bucket", "flush_cache": False}
        if version is not None:
            # Engines report the last version that they were sent: send it with the last bucket.
            body["weight_version"] = str(version)
        answers = [
            self._requests.start(
                engine,
                "/update_weights_from_tensor",
                {"serialized_named_tensors": [handles[rank] for rank in share], **body},
                f"{what}, from the memory of rank {_span(share)}",
            )
            for engine, share in shares
        ]
        for answer in answers:
            answer.result()

    def close(self) -> None:
        self._requests.close()


def ranks_of_engines(engines: Sequence[Engine], world_size: int) -> list[tuple[Engine, range]]:
    """Returns each engine with the trainer's ranks on whose GPUs it runs.

    Raises InvalidSetting where engines need more GPUs than the trainer has, or name the same ones.
    """
    shares = [(engine, range(engine.first_rank, engine.first_rank + engine.tp_size)) for engine in engines]
    needed = max((share.stop for _, share in shares), default=0)
    if needed > world_size:
        raise InvalidSetting.conflict(
            "--update-weight-transport ipc",
            f"engines on {needed} GPUs",
            f"an engine reads the memory of its own GPUs only, and the trainer has {world_size}; use nccl or disk",
        )
    ranks = [rank for _, share in shares for rank in share]
    if len(set(ranks)) < len(ranks):
        raise InvalidSetting.conflict(
            "--update-weight-transport ipc",
            "engines on the same GPUs",
            "each reads the memory of its own; a rollout service of an older slime does not say which those are",
        )
    return shares


def _layout(bucket: Mapping[str, Tensor]) -> list[types.SimpleNamespace]:
    """Returns the place to which `flatten` copies each tensor."""
    ends = itertools.accumulate(tensor.nbytes for tensor in bucket.values())
    return [_place(name, tensor, end - tensor.nbytes) for (name, tensor), end in zip(bucket.items(), ends, strict=True)]


def _places(piece: Mapping[str, Tensor], memory: Tensor) -> list[types.SimpleNamespace]:
    """Returns the place at which each tensor lies in `memory`."""
    return [_place(name, tensor, tensor.data_ptr() - memory.data_ptr()) for name, tensor in piece.items()]


def _place(name: str, tensor: Tensor, start: int) -> types.SimpleNamespace:
    """Returns the place in bytes, as attributes of SGLang's FlattenedTensorMetadata."""
    return types.SimpleNamespace(
        name=name, shape=tensor.shape, dtype=tensor.dtype, start_idx=start, end_idx=start + tensor.nbytes,
        numel=tensor.nbytes,
    )  # fmt: skip


def _pieces(weights: Weights) -> tuple[list[dict[str, Tensor]], Weights]:
    """Returns tensors that lie together in one piece of memory, by piece; and those that have memory of their own."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in weights:
        found.setdefault(tensor.untyped_storage().data_ptr(), {})[name] = tensor
    alone = [tensors for tensors in found.values() if len(tensors) == 1]
    return [tensors for tensors in found.values() if len(tensors) > 1], (
        item for tensors in alone for item in tensors.items()
    )


def _memory(piece: Mapping[str, Tensor]) -> Tensor:
    """Returns all the memory that the tensors of `piece` are parts of, as bytes.

    The result has a storage of its own, because torch never forgets that a storage was shared with another process.
    """
    storage = next(iter(piece.values())).untyped_storage()
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return torch.from_dlpack(whole)


def serialize(flat: Tensor, layout: Sequence[types.SimpleNamespace]) -> str:
    """Serializes a flattened bucket as SGLang's `MultiprocessingSerializer` does, in base64; `flat` must outlive it."""
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump({"flattened_tensor": _Shared(flat), "metadata": list(layout)})
    return encoded(buffer)


def encoded(pickled: io.BytesIO) -> str:
    return base64.b64encode(pickled.getvalue()).decode()


class _Shared:
    """Becomes the tensor, in the same memory, when it is unpickled in another process."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = reductions.reduce_tensor(self._tensor)
        if self._tensor.is_cuda:
            # Processes may number the GPUs differently: SGLang takes the GPU's own identifier in place of a number.
            uuid = str(torch.cuda.get_device_properties(self._tensor.device).uuid)
            arguments = (*arguments[:DEVICE_ARGUMENT], uuid, *arguments[DEVICE_ARGUMENT + 1 :])
        return rebuild, arguments


def _span(share: range) -> str:
    return f"{share[0]}" if len(share) == 1 else f"{share[0]} to {share[-1]}"
