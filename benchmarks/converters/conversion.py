"""Conversion of a random checkpoint with the layout of a model of 7 billion parameters, beside copying the same files.

    python benchmarks/converters/conversion.py [--json] [--gib 3] [--repeats 3] [--directory DIR]

The model is Qwen2.5-7B with all widths scaled down alike: 28 layers, in four files as published. Each measurement is a
process of its own. What is compared:

    speed     bytes of weights a second, everything on disk (fsync) at the end, against `shutil.copyfile` and fsync of
              the same files. The best of the repeats counts, in turns. Starting Python and importing torch, about two
              seconds, is not part of it.
    CPU       user and system time of the process and its workers, as a multiple of copying's, which is the kernel's
              alone.
    memory    the peak above what the process needed after its imports, and that as a part of the largest layer and the
              largest file together. "resident" is the kernel's own maximum (VmHWM), which counts pages of files that
              are mapped too; "anonymous" (RssAnon, looked at every 2 ms) does not. Nothing is mapped here, so the two
              should agree. The cache of the file system is not counted.

A virtual machine may get the memory of its host at first touch, and give it back once it is free: writing a file into
such pages took 5 times as long here as writing one into others. So each process first writes a file as large as its
target, and deletes it.

Required: at most 1.3 of the memory, at least 0.5 of the speed; of CPU time, at most 2 is the goal. Four times the size
of the model must be free in `--directory`; all of it is deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from slime.converters.families import find_family
from slime.converters.files.hf_writer import HfFiles, HfTensor, create, divide_into_files, places

SECONDS = 900.0
MAX_MEMORY, MIN_SPEED = 1.3, 0.5
NUM_FILES = 4
WIDTHS = {"hidden_size": 3584, "intermediate_size": 18944, "vocab_size": 152064}
CONFIG: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(*options.child)))
        return
    with tempfile.TemporaryDirectory(prefix="conversion-", dir=options.directory) as directory:
        result = run(Path(directory), options.gib, options.repeats)
    print(json.dumps(result, indent=1) if options.json else table(result))
    sys.exit(not all(row["passes"] for row in result["conversions"]))


def run(directory: Path, gib: float, repeats: int) -> dict[str, Any]:
    source = directory / "hf"
    sizes = make_model(source, gib)
    td, back, copy = directory / "torch_dist", directory / "back", directory / "copy"
    steps: list[tuple[str, int, Path, Path]] = [("copy", 1, source, copy)]
    for workers in (1, 2):
        steps += [("hf-to-torch-dist", workers, source, td), ("torch-dist-to-hf", workers, td, back)]
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(repeats):
        for name, workers, first, second in steps:
            shutil.rmtree(second, ignore_errors=True)
            found = child(name, workers, first, second)
            known = best.setdefault((name, workers), found)
            for key in ("seconds", "cpu_seconds", "resident", "anonymous"):
                known[key] = (min if key.endswith("seconds") else max)(known[key], found[key])
            if name == "copy":
                shutil.rmtree(copy)
        shutil.rmtree(td)
        shutil.rmtree(back)
    allowed = sizes["layer"] + sizes["file"]
    speed = sizes["total"] / best["copy", 1]["seconds"]
    rows = []
    for (name, workers), found in best.items():
        if name == "copy":
            continue
        row = {"name": name, "workers": workers, "speed": sizes["total"] / found["seconds"], **found}
        row["of_copying"] = row["speed"] / speed
        row["cpu_of_copying"] = row["cpu_seconds"] / best["copy", 1]["cpu_seconds"]
        row["memory"] = max(found["resident"], found["anonymous"]) / allowed
        # Workers have memory of their own, and a time to start that is not the conversion's.
        row["passes"] = workers > 1 or (row["of_copying"] >= MIN_SPEED and row["memory"] <= MAX_MEMORY)
        rows.append(row)
    return {"sizes": sizes, "copying": speed, "conversions": rows}


def make_model(directory: Path, gib: float) -> dict[str, int]:
    """Bytes of the whole, of the largest layer and of the largest file."""
    tensors = hf_tensors(1.0)
    scale = math.sqrt(gib * 2**30 / sum(tensor.num_bytes for tensor in tensors))
    tensors = hf_tensors(scale)
    total = sum(tensor.num_bytes for tensor in tensors)
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config(scale), indent=2))
    files = divide_into_files(tensors, max_bytes=-(-total // NUM_FILES) + max(t.num_bytes for t in tensors) // 2)
    create(directory, files)
    # Once the embedding's worth of noise: conversion does not look at values.
    noise = torch.randn(max(math.prod(tensor.shape) for tensor in tensors)).to(torch.bfloat16)
    with HfFiles(places(directory, files)) as out:
        for tensor in tensors:
            index = tuple(slice(0, size) for size in tensor.shape)
            out.write(tensor.name, index, noise[: math.prod(tensor.shape)].view(tensor.shape))
    layers: dict[str, int] = {}
    for tensor in tensors:
        if tensor.name.startswith("model.layers."):
            layer = ".".join(tensor.name.split(".")[:3])
            layers[layer] = layers.get(layer, 0) + tensor.num_bytes
    largest = max(sum(tensor.num_bytes for tensor in group) for group in files.values())
    return {"total": total, "layer": max(layers.values()), "file": largest, "files": len(files)}


def config(scale: float) -> dict[str, Any]:
    """Widths are multiples of what heads and blocks need."""
    return CONFIG | {name: max(1, round(width * scale / 56)) * 56 for name, width in WIDTHS.items()}


def hf_tensors(scale: float) -> list[HfTensor]:
    scaled = config(scale)
    shapes = {b.name: b.shape for p in find_family(scaled).parameters(scaled) for b in p.blocks}
    return [HfTensor(name, torch.bfloat16, shape) for name, shape in shapes.items()]


def child(name: str, workers: int, source: Path, target: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, str(workers), str(source), str(target)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(name: str, workers: str, source: str, target: str) -> dict[str, float]:
    """Seconds of one conversion, and bytes of memory above what the process had before it."""
    work = job(name, int(workers), Path(source), Path(target))
    touch(Path(target).parent, sum(path.stat().st_size for path in Path(source).rglob("*")))
    before = {key: status(key) for key in ("RssAnon", "VmRSS")}
    # The maximum since the process began is from its imports; from here on it is the conversion's.
    Path("/proc/self/clear_refs").write_text("5")
    peak, ended = before["RssAnon"], threading.Event()

    def look() -> None:
        nonlocal peak
        while not ended.wait(0.002):
            peak = max(peak, status("RssAnon"))

    thread = threading.Thread(target=look)
    thread.start()
    start, used = time.monotonic(), cpu_seconds()
    work()
    seconds, used = time.monotonic() - start, cpu_seconds() - used
    ended.set()
    thread.join()
    return {
        "seconds": seconds,
        "cpu_seconds": used,
        "resident": status("VmHWM") - before["VmRSS"],
        "anonymous": peak - before["RssAnon"],
    }


def touch(directory: Path, size: int) -> None:
    """Writes a file of `size` bytes and deletes it, so that memory for another is at hand."""
    block = bytes(1 << 20)
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(-(-size // len(block))):
            file.write(block)


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def job(name: str, workers: int, source: Path, target: Path) -> Callable[[], object]:
    if name == "copy":
        return lambda: copy_files(source, target)
    from torch.distributed.checkpoint import metadata  # noqa: F401  imported late by the writer

    from slime.converters.convert import hf_to_torch_dist, torch_dist_to_hf

    if name == "hf-to-torch-dist":
        return lambda: hf_to_torch_dist.convert(source, target, num_workers=workers)
    return lambda: torch_dist_to_hf.convert(source, target, num_workers=workers)


def copy_files(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def status(key: str) -> int:
    """Bytes, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def table(result: dict[str, Any]) -> str:
    sizes = {name: value / 2**20 for name, value in result["sizes"].items() if name != "files"}
    lines = [
        f"{sizes['total']:,.0f} MiB in {result['sizes']['files']} files, the largest {sizes['file']:,.0f} MiB; "
        f"the largest layer {sizes['layer']:,.0f} MiB",
        f"copying: {result['copying'] / 2**20:,.0f} MiB/s",
        "",
        f"{'':18} {'workers':>7} {'MiB/s':>7} {'of copying':>10} {'CPU':>5} {'resident':>9} {'anonymous':>9} "
        f"{'of layer + file':>15}",
    ]
    for row in result["conversions"]:
        memory = "-" if row["workers"] > 1 else f"{row['memory']:.2f}"
        peaks = f"{row['resident'] / 2**20:9,.0f} {row['anonymous'] / 2**20:9,.0f} {memory:>15}"
        lines.append(
            f"{row['name']:18} {row['workers']:7} {row['speed'] / 2**20:7,.0f} {row['of_copying']:10.2f} "
            f"{row['cpu_of_copying']:5.2f} {peaks}" + ("" if row["passes"] else "   too much or too slow")
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
