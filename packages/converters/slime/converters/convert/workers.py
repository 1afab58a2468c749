"""Processes that share a conversion: workers that this process starts, or the ranks of torchrun."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from slime.types.errors import InvalidSetting, RemoteError, SlimeError, Unavailable

Item = TypeVar("Item")
Result = TypeVar("Result")

# A rank that dies closes its connections, which the others see at once; this bounds one that hangs.
WAIT_SECONDS = 6 * 3600.0
# Progress is reported at the end of a job, and a job of an import writes one file.
JOB_BYTES = 4 << 30


class TorchrunRanks:
    """The processes of torchrun, or this one alone without torchrun's environment. Use as a context."""

    def __init__(self) -> None:
        self.rank, self.size = self._number("RANK", 0), self._number("WORLD_SIZE", 1)

    @staticmethod
    def _number(name: str, default: int) -> int:
        text = os.environ.get(name, str(default))
        if not text.isdigit():
            raise InvalidSetting.must_be(name, "a number", got=text)
        return int(text)

    def __enter__(self) -> TorchrunRanks:
        if self.size > 1:
            import torch.distributed as dist

            # Before the group is made: its functions keep a default group that exists when they are defined, gloo's
            # threads then outlive destroy_process_group(), and the process may abort when it exits.
            import torch.distributed.nn  # noqa: F401

            self._started = not dist.is_initialized()
            if self._started:
                dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=WAIT_SECONDS))
        return self

    def __exit__(self, *error: object) -> None:
        if self.size > 1 and self._started:
            import torch.distributed as dist

            dist.destroy_process_group()

    def share(self, make: Callable[[], Result]) -> list[Result]:
        """Returns on every rank the results of `make` on all ranks; raises the error of one rank on every rank."""
        if self.size == 1:
            return [make()]
        import torch.distributed as dist

        try:
            outcome: tuple[Result | None, BaseException | None] = make(), None
        except SlimeError as error:
            outcome = None, error
        except Exception as error:
            outcome = None, RemoteError(f"rank {self.rank}: {type(error).__name__}: {error}")
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, outcome)
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [result for result, _ in everyone]

    def on_first(self, make: Callable[[], Result]) -> Result:
        """Runs `make` on rank 0 alone and returns its result on all ranks; raises its error on all ranks."""
        return self.share(make if self.rank == 0 else lambda: None)[0]  # type: ignore[arg-type, return-value]


def run_jobs(
    work: Callable[[Item], Result],
    jobs: Sequence[Item],
    num_workers: int,
    done: Callable[[Item], None] = lambda job: None,
) -> list[Result]:
    """Runs `work` on each job, in processes of their own where there are several workers.

    Raises the error of a job, and Unavailable for a worker that was killed.
    """
    if num_workers <= 1 or len(jobs) <= 1:
        results = []
        for job in jobs:
            results.append(work(job))
            done(job)
        return results
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(num_workers, len(jobs)), context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(work, job): job for job in jobs}
        try:
            for future in as_completed(futures, timeout=WAIT_SECONDS):
                future.result()
                done(futures[future])
        except BrokenProcessPool:
            raise Unavailable(
                "a worker process was killed, perhaps because memory ran out: use fewer --num-workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
        return [future.result() for future in futures]


def _end_with_parent() -> None:
    """Ends a worker whose parent was killed, which would wait for its next job for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        # No deadline: a daemon thread may wait as long as the process lives.
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def divide(sizes: Iterable[int], count: int) -> list[list[int]]:
    """Divides the numbers of items into at most `count` runs of similar size, in order; no run is empty."""
    sizes = list(sizes)
    total, passed = sum(sizes) or 1, 0
    runs: list[list[int]] = [[] for _ in range(max(1, count))]
    for number, size in enumerate(sizes):
        middle = passed + size / 2
        runs[min(int(middle * len(runs) / total), len(runs) - 1)].append(number)
        passed += size
    return [run for run in runs if run]


class _Share(Protocol):
    """A job's share of a conversion: the numbers of its parameters."""

    @property
    def parameters(self) -> tuple[int, ...]: ...


Share = TypeVar("Share", bound=_Share)


def convert_in_jobs(
    ranks: TorchrunRanks,
    work: Callable[[Share], Result],
    make_job: Callable[[int, tuple[int, ...]], Share],
    sizes: Sequence[int],
    total: int,
    num_workers: int,
    progress: Callable[[str], None],
) -> list[list[Result]]:
    """Divides parameters into jobs and runs those of this rank; returns the results of every rank.

    make_job: (number of the job, numbers of its parameters); sizes: bytes of each parameter; total: bytes in all.
    """
    runs = divide(sizes, max(ranks.size * num_workers, -(-total // JOB_BYTES)))
    jobs = [make_job(number, tuple(run)) for number, run in enumerate(runs) if number % ranks.size == ranks.rank]
    left = total

    def done(job: Share) -> None:
        nonlocal left
        left -= sum(sizes[number] for number in job.parameters) * ranks.size
        progress(f"{max(0, left) / 2**30:.2f} GiB to go")

    return ranks.share(lambda: run_jobs(work, jobs, num_workers, done))


@contextmanager
def reported(target: Path, total: int, progress: Callable[[str], None]) -> Iterator[None]:
    """Reports, once the block has written `total` bytes to `target`, the time that this took."""
    start = time.monotonic()
    yield
    seconds = max(time.monotonic() - start, 1e-9)
    progress(f"wrote {target}: {total / 2**30:.2f} GiB in {seconds:.1f} s, {total / 2**30 / seconds:.2f} GiB/s")
