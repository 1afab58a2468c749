"""Applies deltas of weights that are broadcast to an SGLang engine (--update-weight-mode delta with NCCL).

SGLang fuses and shards the tensors of a checkpoint, so the delta of one of them has no single place to go. The model's
own `load_weights` therefore runs over empty tensors, `ReadBack`, which turn each `copy_` round: from the parameter into
the tensor. The ranks combine their shards by all-reduce; then the delta is applied, the checksum compared with the
trainer's, and the tensor loaded as in a full update. No second copy of the model is kept, only the tensors of one
bucket. A loader that does more than copy cannot be read back: such an engine refuses deltas.

A bucket is loaded only if the checksums of all its tensors match. After a refusal the trainer sends all weights, which
replaces the buckets that were loaded before.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from slime.types.errors import DataLoss
from slime.types.weight_deltas import BROADCAST, REFUSED
from slime.types.weight_deltas.buckets import (
    ITEM_BYTES,
    TensorDelta,
    VersionDelta,
    check_tensor,
    decode_tensor,
    read_bucket,
)

# Every tensor of a bucket begins at a multiple of it, so that it can be viewed in its type.
ALIGNMENT = 16
# Functions that read values out of a tensor, which cannot be turned round.
VALUES = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__float__, Tensor.__int__, Tensor.__bool__,
    Tensor.__index__, torch.is_nonzero, Tensor.is_nonzero,
}  # fmt: skip

THREADS = min(8, os.cpu_count() or 1)
# By the bytes of an element: types whose bits can be changed.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Result = TypeVar("Result")
Loader = Callable[[Iterable[tuple[str, Tensor]]], object]
# The largest of each element over all ranks of an engine, in place.
Gather = Callable[[Tensor], object]


def update_weights(
    own: Callable[..., tuple[bool, str]], updater: Any, names: Any, dtypes: Any, shapes: Any, group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:  # fmt: skip
    """Receives a bucket and applies it, in place of `own`: SGLang's `WeightUpdater.update_weights_from_distributed`.

    Returns whether it is loaded, and a message, which begins with REFUSED where all weights have to be sent.
    """
    if load_format != BROADCAST:
        return own(updater, names, dtypes, shapes, group_name, load_format)
    from sglang.srt.distributed import get_tp_group  # pants: no-infer-dep

    try:
        content = torch.empty(shapes[0], dtype=torch.uint8, device=updater.device)
        dist.broadcast(content, src=0, group=updater._model_update_group[group_name])
        tp = get_tp_group()
        gather = _all_reduce(tp.device_group) if tp.world_size > 1 else None
        apply_bucket(updater.get_model().load_weights, content.cpu().numpy().tobytes(), content.device, gather)
    except DataLoss as error:
        return False, REFUSED + error.message
    except Exception as error:
        return False, f"a weight delta could not be loaded: {type(error).__name__}: {error}"
    return True, "Success"


def _all_reduce(group: Any) -> Gather:
    return lambda tensor: dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)


@dataclass
class _Part:
    """A tensor of a bucket. tensor: its memory, from byte `start` of the bucket's."""

    delta: TensorDelta
    start: int
    tensor: Tensor


def apply_bucket(load: Loader, data: bytes, device: torch.device, gather: Gather | None = None) -> None:
    """Applies a bucket to the weights that `load` loads. Raises DataLoss; then nothing is changed.

    load: a model's `load_weights`. data: see `slime.types.weight_deltas.buckets`. gather: where an engine has several
    ranks, each of which calls this.
    """
    about, deltas = read_bucket(data)
    if not deltas:
        # It shows the trainer that deltas are applied here.
        return
    content, parts = _on_all_ranks(lambda: _lay_out(deltas, device), device, gather)
    held = read_back(load, content, {part.delta.name: part.tensor for part in parts}, gather)
    changed = [part for part in parts if part.delta.change.changed]
    for part in changed:
        if (name := part.delta.name) not in held:
            # The engine has no such tensor, or its loader waits for another one to load the two together.
            raise DataLoss(f"{name} has changed, and the model's loader leaves it out", field=name)
    with _threads(device) as threads:
        # Few at once: changes take more memory than the elements that change.
        for start in range(0, len(changed), THREADS):
            few = changed[start : start + THREADS]
            for part, decoded in zip(few, threads.map(functools.partial(_decode, about), few), strict=True):
                _change(part.tensor, *decoded, xor=about.delta_encoding == "xor")
        new = _on_host(content).numpy()

        def check(part: _Part) -> None:
            check_tensor(about, part.delta, new[part.start : part.start + part.tensor.nbytes])

        list(threads.map(check, [part for part in parts if part.delta.name in held]))
    if changed:
        load([(part.delta.name, part.tensor) for part in changed])


def _on_all_ranks(work: Callable[[], Result], device: torch.device, gather: Gather | None) -> Result:
    """Returns what `work` returns. Raises its error, and DataLoss on the other ranks, which would wait for this one."""
    result, error = None, None
    try:
        result = work()
    except Exception as caught:
        error = caught
    failed = torch.tensor([error is not None], dtype=torch.uint8, device=device)
    if gather is not None:
        gather(failed)
    if error is not None:
        raise error
    if failed.item():
        raise DataLoss("another rank of the engine has no memory for a bucket", field="weights")
    return cast(Result, result)


def _lay_out(deltas: Sequence[TensorDelta], device: torch.device) -> tuple[Tensor, list[_Part]]:
    """Returns memory for the tensors of a bucket, zeros, uint8 [n], and each tensor's part of it."""
    sizes = [ITEM_BYTES[delta.dtype] * int(np.prod(delta.shape, dtype=np.int64)) for delta in deltas]
    starts = np.cumsum([0, *(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]).tolist()
    content = torch.zeros(starts[-1] + ALIGNMENT, dtype=torch.uint8, device=device)
    return content, [
        _Part(delta, start, content[start : start + size].view(getattr(torch, delta.dtype)).reshape(delta.shape))
        for delta, start, size in zip(deltas, starts, sizes, strict=False)
    ]


def _threads(device: torch.device) -> ThreadPoolExecutor:
    """Returns threads that allocate on this one's device and stream: memory of another stream could be given away while
    a kernel of this one still reads it."""
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    return ThreadPoolExecutor(
        THREADS, thread_name_prefix="delta", initializer=torch.cuda.set_stream, initargs=(stream,)
    )


def _decode(about: VersionDelta, part: _Part) -> tuple[Tensor | None, Tensor]:
    """Returns what `encoding.decode` does, as integers on the device of the part."""
    positions, values = decode_tensor(about, part.delta)
    device = part.tensor.device
    places = None if positions is None else torch.tensor(positions, device=device)
    return places, torch.tensor(values.view(f"i{part.tensor.itemsize}"), device=device)


def _change(tensor: Tensor, places: Tensor | None, values: Tensor, *, xor: bool) -> None:
    elements = tensor.view(-1).view(INTEGERS[tensor.itemsize])
    if places is None:
        elements.copy_(elements ^ values if xor else values)
    else:
        elements[places] = elements[places] ^ values if xor else values


def _on_host(content: Tensor) -> Tensor:
    if content.device.type == "cpu":
        return content
    # A GPU copies to pinned memory faster.
    return torch.empty_like(content, device="cpu", pin_memory=True).copy_(content)


def read_back(load: Loader, content: Tensor, parts: Mapping[str, Tensor], gather: Gather | None = None) -> set[str]:
    """Fills tensors with what `load` has loaded; returns the names of those that it does not leave out.

    content: zeros, uint8 [n], in which all of `parts` lie. Raises DataLoss naming a tensor that `load` does not simply
    copy.
    """
    reading = _Reading(content, {part.data_ptr() - content.data_ptr(): name for name, part in parts.items()})
    with reading:
        error = _run(load, [(name, part.as_subclass(ReadBack)) for name, part in parts.items()])
    if gather is None:
        failed, found = error is not None, reading.found
    else:
        flags = torch.tensor([error is not None, *(name in reading.found for name in parts)], device=content.device)
        flags = flags.to(torch.uint8)
        gather(flags)
        gather(content)
        failed, *is_found = flags.tolist()
        found = {name for name, is_there in zip(parts, is_found, strict=True) if is_there}
    if error is not None:
        raise error
    if failed:
        raise DataLoss("another rank of the engine cannot read its weights back", field="weights")
    return found


def _run(load: Loader, tensors: Sequence[tuple[str, Tensor]]) -> DataLoss | None:
    """Returns the error, so that this rank still takes part in what follows."""
    try:
        load(tensors)
    except DataLoss as error:
        return error
    except Exception as error:
        return DataLoss(f"the weights cannot be read back: {type(error).__name__}: {error}", field="weights")
    return None


@dataclass
class _Reading:
    """One run of a loader over tensors in `content`, uint8 [n]. names: by the first byte of each. found: those read."""

    content: Tensor
    names: Mapping[int, str]
    found: set[str] = field(default_factory=set)

    def __enter__(self) -> None:
        # A loader may run in several threads.
        with _lock:
            _readings[_memory(self.content)] = self

    def __exit__(self, *_: object) -> None:
        with _lock:
            del _readings[_memory(self.content)]

    def read(self, source: ReadBack, target: Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            plain = source.as_subclass(Tensor)
            if plain.shape != target.shape:
                raise self.error(source, f"copies {list(plain.shape)} to {list(target.shape)}")
            plain.copy_(target.detach())
        self.found.add(self.name(source))

    def name(self, tensor: ReadBack) -> str:
        with torch._C.DisableTorchFunctionSubclass():
            place = tensor.data_ptr() - self.content.data_ptr()
        return self.names[max(start for start in self.names if start <= place)]

    def error(self, tensor: ReadBack, what: str) -> DataLoss:
        name = self.name(tensor)
        return DataLoss(f"{name} cannot be read back: the model's loader {what}", field=name)


_lock = threading.Lock()
_readings: dict[int, _Reading] = {}


class ReadBack(Tensor):
    """A tensor into which a parameter is copied by whoever copies the tensor into the parameter.

    Views of it may be made. Anything else that a loader may do with a weight raises DataLoss.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        tensors = list(_tensors([*args, *kwargs.values()]))
        ours = [tensor for tensor in tensors if isinstance(tensor, cls)]
        if not ours:
            return super().__torch_function__(func, types, args, kwargs)
        reading = _readings[_memory(ours[0])]
        if func is Tensor.copy_ and len(ours) == 1 and tensors[1] is ours[0]:
            reading.read(ours[0], args[0])
            return args[0]
        if func in VALUES or len(ours) < len(tensors):
            raise reading.error(ours[0], f"calls {name}, and not copy_ alone")
        result = super().__torch_function__(func, types, args, kwargs)
        if not set(map(_memory, _tensors([result]))) <= set(map(_memory, tensors)):
            raise reading.error(ours[0], f"calls {name}, and not copy_ alone")
        return result


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
