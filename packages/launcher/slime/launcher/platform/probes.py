"""Probes of the machine. They change nothing, and return None if there is nothing to find.

Checks call them and decide; a test replaces a probe to present a broken machine to a check.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime.rollout.engines.gpus import VISIBLE, visible_gpus
from slime.types.models import processor

SHARED_MEMORY = Path("/dev/shm")
# Ray writes the address of the cluster that was started on this machine into this file.
RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")
# Program of a node of a Ray cluster, and its option for the address of the cluster.
RAY_NODE, RAY_FLAG = "raylet", "--gcs-address="
# oneDNN multiplies bfloat16 on a processor with these, so torch, which takes a second to import, need not be asked.
_AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
# Variables that keep torch from using what the processor has.
_ISA_LIMITS = {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"}


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it.

    name: its entry in CUDA_VISIBLE_DEVICES; model: the driver's name for it; total_bytes, free_bytes: its memory, -1
    if unknown.
    """

    name: str
    model: str
    total_bytes: int
    free_bytes: int


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def gpus() -> list[Gpu]:
    """Returns the GPUs that this process may use, as NVIDIA's driver describes them; none without a driver."""
    names = visible_gpus()
    if not names:
        return []
    nvml = ctypes.CDLL("libnvidia-ml.so.1")
    if nvml.nvmlInit_v2() != 0:
        return []
    try:
        return [_gpu(nvml, name) for name in names]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: ctypes.CDLL, name: str) -> Gpu:
    handle = ctypes.c_void_p()
    if name.isdigit():
        found = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(handle))
    else:
        found = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
    if found != 0:
        return Gpu(name, "unknown", -1, -1)
    model, memory = ctypes.create_string_buffer(96), _Memory()
    nvml.nvmlDeviceGetName(handle, model, len(model))
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return Gpu(name, model.value.decode(errors="replace"), -1, -1)
    return Gpu(name, model.value.decode(errors="replace"), memory.total, memory.free)


def visible_devices() -> str | None:
    return os.environ.get(VISIBLE)


def torch_sees_gpus() -> bool:
    """Imports torch; returns whether it can use a GPU."""
    import torch

    return torch.cuda.is_available()


def multiplies_bfloat16() -> bool:
    """Returns whether the processor multiplies matrices in bfloat16."""
    if _AVX512 <= processor_flags() and not _ISA_LIMITS & os.environ.keys():
        return True
    import torch

    return processor.multiplies_bfloat16(torch)


def processor_flags() -> set[str]:
    """Returns the processor's instruction sets as Linux names them; none elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def python_version() -> str:
    return platform.python_version()


def package_version(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def disk_free(directory: Path) -> tuple[Path, int]:
    """Returns (the nearest existing directory above, bytes free there)."""
    nearest = directory.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    return nearest, shutil.disk_usage(nearest).free


def writable(directory: Path) -> bool:
    return os.access(directory, os.W_OK | os.X_OK)


def on_linux() -> bool:
    return sys.platform == "linux"


def shared_memory() -> int | None:
    """Returns the bytes free in /dev/shm; None if it does not exist."""
    return shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None


def memory_size() -> int:
    """Returns the bytes of the machine's memory, or of the container's if that is limited to less."""
    size, limit = psutil.virtual_memory().total, _number("/sys/fs/cgroup/memory.max")
    return size if limit is None else min(size, limit)


def memory_available() -> int:
    """Returns the bytes of memory that a new program can have, within the limit of the container."""
    free = psutil.virtual_memory().available
    limit, used = _number("/sys/fs/cgroup/memory.max"), _number("/sys/fs/cgroup/memory.current")
    return free if limit is None or used is None else min(free, max(0, limit - used))


def _number(path: str) -> int | None:
    file = Path(path)
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def open_files_limit() -> tuple[int, int]:
    """Returns (soft, hard) limit of open files; -1 for none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (-1 if soft == resource.RLIM_INFINITY else soft), (-1 if hard == resource.RLIM_INFINITY else hard)


def free_ports(count: int, host: str = "127.0.0.1") -> int:
    """Returns how many of `count` ports the system hands out at the same time."""
    held: list[socket.socket] = []
    try:
        for _ in range(count):
            held.append(socket.socket())
            held[-1].bind((host, 0))
    except OSError:
        return len(held) - 1
    finally:
        for each in held:
            each.close()
    return count


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Returns whether a server could listen on this port now; does not listen itself."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def answers(host: str, port: int, seconds: float = 3.0) -> bool:
    """Returns whether a server accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=seconds):
            return True
    except OSError:
        return False


def ray_without_token(address: str, seconds: float = 3.0) -> bool:
    """Returns whether the Ray cluster at "host:port" accepts work without a token."""
    from slime.launcher.platform.ray_access import answers_without_token

    return answers_without_token(address, seconds)


def local_ray_address() -> str | None:
    """Returns host:port of the cluster that Ray last started on this machine, running or not."""
    try:
        return RAY_CLUSTER.read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError):
        return None


def own_ray_addresses() -> set[str]:
    """Returns host:port of the clusters of which this user runs a node on this machine."""
    found = set()
    for process in psutil.process_iter(["name", "uids", "cmdline"]):
        name, uids, words = (process.info[key] for key in ("name", "uids", "cmdline"))
        # Both ids, because a program with the set-user-id bit has one of its caller.
        if name == RAY_NODE and uids is not None and {uids.real, uids.effective} == {os.geteuid()}:
            found |= {word.removeprefix(RAY_FLAG) for word in words or () if word.startswith(RAY_FLAG)}
    return found - {""}
