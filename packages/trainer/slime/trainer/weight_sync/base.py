"""The parts that all transports of weights share: the interface, the stream of tensors, the buckets."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from slime.trainer.checkpoints.hf_directory import NamedTensors
from slime.types.clients import Engine
from slime.types.errors import NotAvailable

# Whole tensors by their Hugging Face names, in the same order every time.
Weights = NamedTensors


class WeightTransport(abc.ABC):
    """Sends one version of the policy to engines that a transaction has paused; kept from update to update."""

    name: ClassVar[str]
    # True if every rank calls `send` with whole tensors, not rank 0 alone.
    on_every_rank: ClassVar[bool] = False
    # True if `send` takes tensors on the training device, not on the CPU.
    on_device: ClassVar[bool] = False

    @abc.abstractmethod
    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        """Sends the tensors of `weights`, taken one at a time in the type of the wire; returns the bytes sent.

        in_place: the tensors are views of memory that stays allocated, so holding all of them at once costs nothing.

        Raises EngineError or DeadlineExceeded naming rank, engine and bucket, NotAvailable for an engine that does not
        take weights by this transport.
        """

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last `send` besides its time and bytes."""
        return {}

    def close(self) -> None:
        """Releases the resources that were kept between updates."""
        return None

    def check_engines(self, engines: Sequence[Engine]) -> None:
        for engine in engines:
            if self.name not in engine.weight_transports:
                raise NotAvailable.conflict(
                    f"--update-weight-transport {self.name}",
                    f"engine {engine.name} ({engine.kind})",
                    f"it takes weights by {' or '.join(engine.weight_transports) or 'no transport'}",
                )


def buckets(weights: Weights, max_bytes: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Yields (bucket, whether it is the last). A bucket is tensors by name, at most `max_bytes` together; a larger
    tensor has a bucket of its own, and so have larger ones that an engine needs together. Tensors with wider elements
    come first: in `flatten`, each then begins at a multiple of the bytes of an element, where it can be viewed.

    A caller that clears a bucket frees its tensors: nothing here refers to them any more.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for joined in _joined(weights):
        needed = sum(tensor.nbytes for tensor in joined.values())
        if bucket and size + needed > max_bytes:
            _widest_first(bucket)
            yield bucket, False
            bucket, size = {}, 0
        bucket |= joined
        size += needed
        joined.clear()
    _widest_first(bucket)
    yield bucket, True


def _joined(weights: Weights) -> Iterator[dict[str, Tensor]]:
    """Yields tensors that have to be in one bucket, most of them alone.

    SGLang loads some of them as one, and loses each that comes without the other (0.5.17, deepseek_weight_loader.py).
    """
    waiting: dict[str, tuple[str, Tensor]] = {}
    for name, tensor in weights:
        awaited = _awaited(name, tensor)
        if awaited is not None:
            waiting[awaited] = name, tensor
        else:
            yield dict([waiting.pop(name)] if name in waiting else []) | {name: tensor}
        del tensor
    for name, tensor in waiting.values():
        yield {name: tensor}


def _awaited(name: str, tensor: Tensor) -> str | None:
    """Returns the name of a later tensor that engines need together with this one."""
    if ".self_attn.q_a_proj." in name:
        return name.replace(".q_a_proj.", ".kv_a_proj_with_mqa.")
    if name.endswith(".indexer.wk.weight") and tensor.dtype == torch.float8_e4m3fn:
        return f"{name}_scale_inv"
    return None


def _widest_first(bucket: dict[str, Tensor]) -> None:
    for name in sorted(bucket, key=lambda name: -bucket[name].itemsize):
        bucket[name] = bucket.pop(name)


def describe(number: int, bucket: Mapping[str, Tensor], version: int) -> str:
    """Names a bucket for errors."""
    names = list(bucket)
    content = f"{names[0]} to {names[-1]}" if names else "empty"
    return f"bucket {number} ({content}) of weight version {version}"


def flatten(bucket: dict[str, Tensor]) -> Tensor:
    """Returns the bytes of all tensors, one after the other, as uint8 on their device; empties the bucket."""
    flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in bucket.values()])
    bucket.clear()
    return flat
