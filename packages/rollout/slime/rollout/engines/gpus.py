"""Lists the GPUs that this process may use, without asking CUDA, which would take memory on each of them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environ: Mapping[str, str] | None = None, installed: int | None = None) -> list[str]:
    """Returns one entry for CUDA_VISIBLE_DEVICES per GPU: numbers, or the names (`GPU-...`, `MIG-...`) given there.

    installed: the number of GPUs; None asks the driver. As in CUDA, the list ends at the first entry that names no GPU.
    """
    listed = (os.environ if environ is None else environ).get(VISIBLE)
    count = installed_gpus() if installed is None else installed
    if listed is None:
        return [str(number) for number in range(count)]
    gpu_names: list[str] = []
    for entry in (entry.strip() for entry in listed.split(",")):
        is_name = entry.startswith(("GPU-", "MIG-"))
        if count == 0 or not (is_name or (entry.isdigit() and int(entry) < count)):
            break
        gpu_names.append(entry)
    return gpu_names


def installed_gpus() -> int:
    """Returns the number of GPUs that NVIDIA's driver reports; 0 if there is no driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2() != 0:
        return 0
    try:
        count = ctypes.c_uint()
        return int(count.value) if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0 else 0
    finally:
        nvml.nvmlShutdown()
