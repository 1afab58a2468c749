"""Profiles a training step: time by kind of kernel, launches and idle time of the GPU.

    python benchmarks/gpu/profile_step.py [--shapes 135m 0.6b] [--backends fsdp megatron] [--output FILE.json]

The steps of train_step.py, one of them under torch's profiler after three to warm up. busy: the GPU's time with at
least one kernel running, of the step's; launches: kernels, copies and fills; host: seconds of the step in which the
host waited for the GPU (synchronisation), which is what stops it from running ahead. The profiler slows the host:
"plain" is the same step without it, and kernel seconds over plain seconds says how much of it the GPU can have worked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.trainer import pick_device, prepare_process
from subjects import step_of
from train_step import PACKAGES, device_name, version
from workload import SHAPES, make_samples, release, write_model

# By the first pattern that the kernel's name has, in this order.
KINDS = {
    "attention": r"flash|fmha|attention|varlen|softmax_warp|mem_eff",
    "matrix products": r"gemm|cutlass|nvjet|xmma|wgmma|cublas|splitK",
    "optimizer": r"multi_tensor|adam|foreach",
    "softmax and log-probs": r"softmax|logsumexp|gather|scatter|index",
    "copies and casts": r"memcpy|memset|copy|cast|CatArray|fill",
    "reductions and norms": r"reduce|norm|mean|sum",
    "elementwise": r"elementwise|vectorized|unrolled|triton",
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpyAsync")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "0.6b"])
    parser.add_argument("--backends", nargs="+", choices=("fsdp", "megatron"), default=["fsdp", "megatron"])
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--row", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk", type=int, default=-1)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), help="Value of Megatron's --transformer-impl"
    )
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    prepare_process(TrainerSettings(hf_checkpoint="-"))
    device = pick_device(0)
    if device.type != "cuda":
        print("a GPU is needed", file=sys.stderr)
        return 1
    rows = []
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as directory:
            write_model(Path(directory), shape, device)
            samples = make_samples(options, SHAPES[shape][1]["vocab_size"])
            for backend in options.backends:
                run, _ = step_of(options, backend, directory, [samples], Ranks(0, 1, "", 10, device.type), device)
                rows.append({"shape": shape, "backend": backend, **measure(run)})
                print(table(rows[-1]), flush=True)
                del run
                release(device)
    if options.output:
        result = {
            "date": date.today().isoformat(), "command": " ".join(sys.argv), "device": device_name(device),
            "versions": {name: version(name) for name in PACKAGES},
            "rows": rows,
        }  # fmt: skip
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(run: Callable[[], None]) -> dict[str, Any]:
    for _ in range(3):
        run()
    plain = timed(run)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        profiled = timed(run)
    events = recorded.events() or []
    device = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    for event in device:
        seconds = event.time_range.elapsed_us() / 1e6
        kinds[kind_of(event.name)] = kinds.get(kind_of(event.name), 0.0) + seconds
        names[event.name] = names.get(event.name, 0.0) + seconds
    waits = sum(e.time_range.elapsed_us() for e in events if e.name in WAITS and e not in device) / 1e6
    return {
        "plain_seconds": plain, "profiled_seconds": profiled, "launches": len(device),
        "busy_seconds": covered((e.time_range.start, e.time_range.end) for e in device) / 1e6,
        "waits": sum(e.name in WAITS[:3] for e in events), "wait_seconds": waits,
        "seconds_by_kind": dict(sorted(kinds.items(), key=lambda item: -item[1])),
        "slowest": dict(sorted(((n[:100], s) for n, s in names.items()), key=lambda item: -item[1])[:8]),
    }  # fmt: skip


def timed(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "other")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the line that the spans cover together."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def table(row: dict[str, Any]) -> str:
    busy, plain = row["busy_seconds"], row["plain_seconds"]
    lines = [
        f"{row['shape']} {row['backend']}: {plain:.3f} s ({row['profiled_seconds']:.3f} profiled), "
        f"GPU busy {busy:.3f} s = {busy / plain:.0%}, {row['launches']:,} launches, {row['waits']} waits"
    ]
    lines += [f"  {kind:24} {s:8.4f} s {s / plain:6.1%}" for kind, s in row["seconds_by_kind"].items()]
    lines += [f"    {s:8.4f} s  {name}" for name, s in row["slowest"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
