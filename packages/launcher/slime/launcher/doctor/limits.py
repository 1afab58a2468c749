"""Checks memory, shared memory, open files and cores."""

from __future__ import annotations

from collections.abc import Iterator

from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.plan.trainer_memory import GIB
from slime.launcher.platform import probes

# Memory of one process of a CPU run before it loads weights, for Python, torch and gRPC.
PROCESS_BYTES = 1 << 30
# NCCL and Ray pass data between the processes of a machine through shared memory.
SHARED_BYTES = 1 << 30
LEAST_SHARED_BYTES = 64 << 20
OPEN_FILES = 4096
LEAST_OPEN_FILES = 1024


def check_limits(subject: Subject) -> Iterator[Finding]:
    yield from _memory(subject)
    yield from _shared_memory(subject)
    yield from _open_files()
    yield ok(f"{probes.cpus()} CPU cores")


def _memory(subject: Subject) -> Iterator[Finding]:
    from slime.launcher.doctor.needs import machine_memory

    free = probes.memory_available()
    needed = machine_memory(subject)
    if needed is None:
        if free < 4 * PROCESS_BYTES:
            yield warn(f"memory: {free / GIB:.1f} GiB available", "a run has four processes of about 1 GiB and more")
        else:
            yield ok(f"memory: {free / GIB:.1f} GiB available")
        return
    size, words = needed
    text = f"memory: {free / GIB:.1f} GiB available, {size / GIB:.1f} needed ({words})"
    if free < size:
        yield fail(text, "use a machine with more memory, a smaller model, or fewer ranks and engines")
    else:
        yield ok(text)


def _shared_memory(subject: Subject) -> Iterator[Finding]:
    size = probes.shared_memory()
    ranks = int(subject.flag("actor_num_gpus_per_node") or 1)
    if size is None and not probes.on_linux():
        yield ok("no /dev/shm on this system: Ray exchanges data through files")
    elif size is None:
        yield warn("there is no /dev/shm", "mount one: without it Ray and NCCL are slower, or fail")
    elif size < LEAST_SHARED_BYTES or (ranks > 1 and probes.gpus() and size < SHARED_BYTES):
        yield fail(
            f"/dev/shm has {size / GIB:.2f} GiB free",
            f"{SHARED_BYTES / GIB:.0f} GiB: docker run --shm-size=16g, or --ipc=host",
        )
    elif size < SHARED_BYTES:
        yield warn(
            f"/dev/shm has {size / GIB:.2f} GiB free", "docker run --shm-size=16g, or --ipc=host, for several GPUs"
        )
    else:
        yield ok(f"/dev/shm: {size / GIB:.1f} GiB free")


def _open_files() -> Iterator[Finding]:
    soft, hard = probes.open_files_limit()
    if soft == -1 or soft >= OPEN_FILES:
        yield ok(f"open files: {'no limit' if soft == -1 else soft}")
        return
    most = OPEN_FILES if hard == -1 else min(hard, OPEN_FILES)
    todo = f"ulimit -n {most}" if most > soft else f"have an administrator raise the hard limit, which is {hard}"
    found = fail if soft < LEAST_OPEN_FILES else warn
    yield found(f"open files: at most {soft}", todo)
