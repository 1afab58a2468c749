"""Collective operations of a trainer's ranks: join, add numbers, and fail together.

Numbers and errors travel as tensors over a gloo group on the CPU, never as pickles.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from slime.trainer.process.stores import meeting_store
from slime.types.errors import DataLoss, InvalidSetting, RemoteError, SlimeError, error_classes

T = TypeVar("T")
# The size of a value and its first bytes travel together, so that most values, which are short, need one exchange.
FRAME_BYTES, SIZE_BYTES = 4096, 8
# In the store where ranks meet: the error of the first rank that left.
LEFT = "slime-left"


class Ranks:
    """The process group of a trainer; with a world size of 1 there is none and every call is local."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_address: str,
        timeout_minutes: float,
        device_type: str = "cpu",
        backend: str | None = None,
    ) -> None:
        """master_address: "host:port" where rank 0 listens, or "file:///path" for one machine. backend: "nccl" or
        "gloo"; None chooses by `device_type`. Blocks until all ranks have joined. Raises InvalidSetting.
        """
        backend = _process_groups(backend, device_type, world_size)
        self.rank = rank
        self.world_size = world_size
        self.control: dist.ProcessGroup | None = None
        # True once an error has parted this rank from the others, which only a new start mends.
        self.left = False
        self._notes: dist.Store | None = None
        if world_size == 1:
            return
        timeout = datetime.timedelta(minutes=timeout_minutes)
        store = meeting_store(master_address, rank, world_size, timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        self.control = dist.new_group(backend="gloo", timeout=timeout)
        # A connection of its own, where the kind of store has one: another thread may wait at the other.
        self._notes = store.clone()

    def close(self) -> None:
        """Leaves; ranks that wait for this one fail at once rather than at their deadline."""
        if self.control is not None:
            self.control = None
            dist.destroy_process_group()

    def leave(self, error: BaseException) -> BaseException:
        """Leaves the others because of an error that they cannot know of. Returns the error to raise: `error`, or that
        of the rank that left first, of which this one's may be a consequence."""
        if self.control is None:
            return error
        first = error
        with contextlib.suppress(RuntimeError):  # the store is gone with its rank
            own = json.dumps({"rank": str(self.rank), **_described(error)})
            if self._notes is not None and self._notes.compare_set(LEFT, "", own).decode() != own:
                first = self.first_error() or error
        self.left = True
        self.close()
        return first

    def first_error(self) -> SlimeError | None:
        """Returns the error of the rank that left first; None while all are here. Any thread may call this."""
        with contextlib.suppress(RuntimeError):
            if self._notes is not None and self._notes.check([LEFT]):
                fields = json.loads(self._notes.get(LEFT))
                return _rebuilt(int(fields["rank"]), fields)
        return None

    @contextlib.contextmanager
    def leaving_on_error(self) -> Iterator[None]:
        """Leaves at an error in the block, which makes collective calls: the others cannot follow."""
        try:
            yield
        except Exception as error:
            first = self.leave(error)
            if first is error:
                raise
            raise first from error

    def add(self, values: Tensor) -> Tensor:
        """Returns the sum of a tensor over ranks, in its own dtype, on its own device."""
        if self.control is None:
            return values
        total = values.detach().cpu().clone()
        dist.all_reduce(total, group=self.control)
        return total.to(values.device)

    def add_numbers(self, values: Mapping[str, float]) -> dict[str, float]:
        """Adds up each number in float64, in the order of ranks; a rank may lack keys that others have."""
        totals: dict[str, float] = {}
        for numbers in self.gather(dict(values)):
            for name, value in numbers.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def gather(self, value: Any) -> list[Any]:
        """Returns a JSON value of every rank, in their order."""
        if self.control is None:
            return [value]
        text = json.dumps(value).encode()
        frames = self._exchange(len(text).to_bytes(SIZE_BYTES, "little") + text[:FRAME_BYTES], SIZE_BYTES + FRAME_BYTES)
        sizes = [int.from_bytes(frame[:SIZE_BYTES], "little") for frame in frames]
        rests = [b""] * len(frames)
        if max(sizes) > FRAME_BYTES:
            rests = self._exchange(text[FRAME_BYTES:], max(sizes) - FRAME_BYTES)
        texts = ((frame + rest)[SIZE_BYTES:] for frame, rest in zip(frames, rests, strict=True))
        return [json.loads(text[:size]) for text, size in zip(texts, sizes, strict=True)]

    def _exchange(self, data: bytes, size: int) -> list[bytes]:
        """Returns the bytes of every rank, each filled up to `size` bytes with zeros."""
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(found, own, group=self.control)
        return [each.numpy().tobytes() for each in found]

    def together(self, work: Callable[[], T]) -> T:
        """Returns `work()` of this rank. If it failed on any rank, every rank raises, and names the one that failed.

        A DataLoss on one rank is raised as a DataLoss on all. `work` must make no collective calls: this is for work
        before such calls begin.
        """
        result, error = None, None
        try:
            result = work()
        except Exception as failure:  # kept until the other ranks know
            error = failure
        failures = self.gather(_described(error))
        # Once a rank has lost samples, others may fail because the step is gone: raise the loss, which callers handle.
        lost = next((rank for rank, fields in enumerate(failures) if fields.get("type") == DataLoss.__name__), None)
        if lost is not None and lost != self.rank:
            raise _rebuilt(lost, failures[lost]) from error
        if error is not None:
            raise error
        for rank, fields in enumerate(failures):
            if fields:
                raise _rebuilt(rank, fields)
        return result  # type: ignore[return-value]

    def from_first(self, work: Callable[[], Any]) -> Any:
        """Returns the JSON value of `work()` of rank 0 on every rank; all fail if it fails."""
        return self.gather(self.together(lambda: work() if self.rank == 0 else None))[0]

    def on_first(self, work: Callable[[], T], *streams: Iterator[Any]) -> T | None:
        """Runs `work()` on rank 0, fed by collective `streams` that other ranks run, too; all fail if it fails."""

        def run() -> T | None:
            with contextlib.ExitStack() as at_the_end:
                # Even if `work` or a stream failed, the ranks have to make the same collective calls.
                for stream in reversed(streams) if self.world_size > 1 else ():
                    at_the_end.callback(_exhaust, stream)
                return work() if self.rank == 0 else None

        return self.together(run)


def _exhaust(stream: Iterator[Any]) -> None:
    for _ in stream:
        pass


def _process_groups(name: str | None, device_type: str, world_size: int) -> str:
    """Returns torch's names of the backends for `--distributed-backend`."""
    if device_type != "cuda":
        if name not in (None, "gloo"):
            raise InvalidSetting.requires(f"--distributed-backend {name}", "GPUs", "use gloo, the default here")
        return "gloo"
    if name == "gloo" and world_size > 1:
        raise InvalidSetting.conflict(
            "--distributed-backend gloo",
            f"{world_size} ranks on GPUs",
            "it cannot add up gradients in GPU memory; use nccl, the default here",
        )
    return "cpu:gloo,cuda:nccl"


def _described(error: BaseException | None) -> dict[str, str]:
    if error is None:
        return {}
    fields = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, SlimeError):
        fields |= {"field": error.field, "value": str(error.value), "expected": error.expected}
    return fields


def _rebuilt(rank: int, fields: dict[str, str]) -> SlimeError:
    message = f"rank {rank}: {fields['type']}: {fields['message']}"
    cls = error_classes().get(fields["type"], RemoteError)
    return cls.restore(message, **{name: fields.get(name, "") for name in ("field", "value", "expected")})
