"""Tokens a second of a GRPO training step, against transformers' forward and backward pass over the same tokens.

    python benchmarks/gpu/train_step.py [--shapes 135m 0.6b] [--backends fsdp megatron] [--output FILE.json]
    python benchmarks/gpu/train_step.py --lengths equal ragged --backends fsdp
    torchrun --master-addr 127.0.0.1 --nproc-per-node 2 benchmarks/gpu/train_step.py --shapes 0.6b --backends fsdp
    # Transformer Engine's layers in bfloat16 and in FP8:
    python benchmarks/gpu/train_step.py --shapes 0.6b --backends megatron --fp8-format e4m3 --peers
    # Without a GPU, to see that it runs:
    python benchmarks/gpu/train_step.py --shapes tiny --samples 8 --length 64 --row 256 --dtype float32
    python benchmarks/gpu/train_step.py --shapes tiny --lengths turns turns-apart --peers --samples 16 --prompt 128 \\
        --turn 64 --response 64 --row 4096 --dtype float32

step         `TrainStep.run`: samples packed into rows, log-probs, loss, backward pass, clipping, AdamW; weights random
eager        AutoModelForCausalLM with sdpa, rows of equal length without padding, cross-entropy of every token,
             backward pass; no optimizer
compiled     the same under torch.compile

Every step has other samples. Lengths are equal, or ragged: log-uniform from 16 tokens to `--length`, as many samples as
fill 98.5 % of the same number of rows; or log-normal with a mean of `--length`, four times that at most, in groups of 8
with a prompt of 64 tokens. Only samples' own tokens are counted. Groups are of 8 samples with one prompt of
`--prompt` tokens and `--response` tokens each, `--samples` in all; "apart" are the same samples with every prompt laid
out anew. Turns are such groups with four turns of `--turn` tokens more in common, between the prompt and the response
of each sample; every other sample is one that its trajectory fans out into. "turns-apart" are the same samples one by
one. full: tokens of rows that are samples'; shapes: of rows; later: what was compiled and what was captured in the
steps that are measured.
reserved: GiB that the process had of the GPU; above: of them, more than between steps. missed: compiled graphs that the
cache of an earlier process did not have, all steps included.

Each subject has a process of its own, one after the other, with `--repeats` steps after warming up: what a process
measures second is a few percent slower. With torchrun on several ranks, each with `--samples`, all share their
processes; the first step's loss and gradient norm are those of one rank with `--lots 2`.
MFU counts 6 x parameters (without the input
embedding) x tokens plus causal attention, over the rate of a large bf16 matrix product measured before.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.trainer import pick_device, prepare_process
from subjects import APART, WARM_UP, peer, step_of
from workload import SHAPES, make_samples, regrouped, release, write_model

PACKAGES = ("torch", "nvidia-cudnn-frontend", "transformers", "megatron-core", "transformer-engine")
LENGTHS = ("equal", "ragged", "log-normal", "groups", "apart", "turns", "turns-apart")


def main() -> int:
    options = parse()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    prepare()
    device = pick_device(rank)
    # A port of its own: torchrun listens on its.
    address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{int(os.environ.get('MASTER_PORT', 29500)) + 1}"
    ranks = Ranks(rank, world, address, 10, device.type)
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "command": " ".join(sys.argv), "device": device_name(device), "ranks": world,
        "python": platform.python_version(), "rows": [],
        "versions": {name: version(name) for name in PACKAGES},
    }  # fmt: skip
    result["matmul_flops"] = matmul_rate(device)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as own:
            # transformers writes on the first rank alone.
            parent = options.models or own
            directory = ranks.from_first(functools.partial(os.path.join, parent, shape))
            ranks.on_first(functools.partial(write_model, Path(directory), shape, device))
            release(device)
            for subject in subjects(options, world):
                arguments = options, shape, directory, subject, result["matmul_flops"]
                alone = world == 1
                result["rows"].append(measure_alone(*arguments) if alone else measure(*arguments, ranks, device))
                if rank == 0 and options.output:
                    Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
            ranks.gather(None)
    if rank == 0:
        print(table(result))
    ranks.close()
    return 0


def prepare() -> None:
    prepare_process(TrainerSettings(hf_checkpoint="-"))


def prepare_child() -> None:
    """Also ends this process with its parent, even if that is killed: it would keep the GPU's memory."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    prepare()


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["135m", "0.6b"])
    parser.add_argument("--backends", nargs="*", choices=("fsdp", "megatron"), default=["fsdp", "megatron"])
    parser.add_argument("--peers", nargs="*", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--lengths", nargs="+", choices=LENGTHS, default=["equal"])
    parser.add_argument("--no-compile", action="store_true", help="Give --no-compile to the trainer, for fsdp")
    parser.add_argument("--samples", type=int, default=32, help="Samples per step and rank, where they are equal")
    parser.add_argument("--lots", type=int, default=1, help="Multiply --samples, as that many ranks have together")
    parser.add_argument("--length", type=int, default=1024, help="Tokens of a sample, three quarters of them response")
    parser.add_argument("--prompt", type=int, default=1024, help="Tokens of the prompt of a group")
    parser.add_argument("--response", type=int, default=128, help="Tokens of each response of a group")
    parser.add_argument("--turn", type=int, default=256, help="Tokens of each of the turns that a group has in common")
    parser.add_argument("--row", type=int, default=8192, help="Most tokens of a forward pass")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--sharding", default="auto", help="Value of --fsdp-sharding")
    parser.add_argument("--budget", type=float, default=1.0, help="Value of --activation-memory-budget")
    parser.add_argument(
        "--transformer-impl", choices=("local", "transformer_engine"), help="Value of Megatron's --transformer-impl"
    )
    parser.add_argument("--fp8-format", choices=("e4m3", "hybrid"), help="Measure megatron in FP8, too, in this format")
    parser.add_argument("--fp8-recipe", default="blockwise", help="Value of Megatron's --fp8-recipe")
    parser.add_argument("--models", help="Directory that keeps random models for the next run")
    parser.add_argument("--chunk", type=int, default=-1, help="Value of --log-probs-chunk-size")
    parser.add_argument("--output", help="JSON file to write")
    return parser.parse_args()


class StepCase(NamedTuple):
    """The steps of a backend or the passes of a peer, on samples of a kind."""

    label: str
    backend: str | None
    peer: str | None
    kind: str
    fp8: bool = False


def subjects(options: argparse.Namespace, world: int) -> list[StepCase]:
    found = []
    for name in options.backends:
        for fp8 in (False, True) if name == "megatron" and options.fp8_format else (False,):
            label = f"{name} {options.fp8_format} {options.fp8_recipe}" if fp8 else name
            found += [StepCase(f"step, {label}, {kind}", name, None, kind, fp8) for kind in options.lengths]
    if world == 1:
        found += [StepCase(f"transformers, {name}", None, name, "equal") for name in options.peers]
    return found


def measure_alone(
    options: argparse.Namespace, shape: str, directory: str, subject: StepCase, rate: float
) -> dict[str, Any]:
    """Measures a subject in a process of its own, which no other has left its memory in. Raises what that raises."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=prepare_child) as pool:
        return pool.submit(measure_here, options, shape, directory, subject, rate).result()


def measure_here(
    options: argparse.Namespace, shape: str, directory: str, subject: StepCase, rate: float
) -> dict[str, Any]:
    device = pick_device(0)
    ranks = Ranks(0, 1, "", 10, device.type)
    try:
        return measure(options, shape, directory, subject, rate, ranks, device)
    finally:
        ranks.close()


def measure(
    options: argparse.Namespace, shape: str, directory: str, subject: StepCase, rate: float, ranks: Ranks,
    device: torch.device,
) -> dict[str, Any]:  # fmt: skip
    vocabulary = SHAPES[shape][1]["vocab_size"]
    number, lots = WARM_UP + options.repeats, options.lots * ranks.world_size
    made = [make_samples(options, vocabulary, subject.kind, seed) for seed in range(number * lots)]
    steps = [regrouped(sum(made[i::number], [])) for i in range(number)]
    lengths = [[len(s.array("tokens")) for s in samples] for samples in steps][WARM_UP:]
    torch._dynamo.utils.counters.clear()
    started = time.perf_counter()
    run: Callable[[], None]
    if subject.peer is not None:
        run, parameters = peer(options, subject.peer, directory, steps[0], device)
    else:
        assert subject.backend is not None
        run, parameters = step_of(
            options, subject.backend, directory, steps, ranks, device, subject.kind, fp8=subject.fp8
        )
    seconds, memory, first, compiled = timed(run, options.repeats, device, started)
    flops = [work(SHAPES[shape][1], parameters, of_step) for of_step in lengths]
    speeds = [sum(of_step) / s for of_step, s in zip(lengths, seconds, strict=True)]
    counters = torch._dynamo.utils.counters["inductor"]
    row = {
        "shape": shape, "name": subject.label, "parameters": parameters, "tokens": [sum(each) for each in lengths],
        "seconds": seconds, "tokens_per_second": sorted(speeds), "first_seconds": first,
        "mfu": statistics.median(f / s for f, s in zip(flops, seconds, strict=True)) / rate / ranks.world_size,
        "compiled_in_measured_steps": compiled, "peak_gib": memory[0] / 2**30, "reserved_gib": memory[1] / 2**30,
        "resident_gib": memory[2] / 2**30, "cache_misses": int(counters["fxgraph_cache_miss"]),
        "cache_hits": int(counters["fxgraph_cache_hit"]), **getattr(run, "seen", dict)(),
    }  # fmt: skip
    if ranks.rank == 0:
        print(f"{shape} {subject.label}: {statistics.median(speeds):,.0f} tok/s {row}", file=sys.stderr, flush=True)
    del run
    release(device)
    return row


def timed(
    run: Callable[[], None], repeats: int, device: torch.device, started: float
) -> tuple[list[float], tuple[int, int, int], float, int]:
    """Returns the seconds of each repeat, the bytes allocated and reserved at most and allocated between steps, the
    seconds from `started` until warm, and the compilations since."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(WARM_UP):
        run()
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    first, compiled = time.perf_counter() - started, graphs_compiled()
    seconds = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        wait()
        seconds.append(time.perf_counter() - begun)
    memory = (0, 0, 0)
    if device.type == "cuda":
        memory = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_allocated()
    return seconds, memory, first, graphs_compiled() - compiled


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def work(shape: dict[str, Any], parameters: int, lengths: Sequence[int]) -> float:
    """Floating-point operations of a forward and backward pass over samples of these lengths."""
    # A tied embedding is the output layer too.
    matrices = parameters if shape["tie_word_embeddings"] else parameters - shape["vocab_size"] * shape["hidden_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    attention = shape["num_hidden_layers"] * 6 * heads
    return sum(6.0 * matrices * length + attention * length * length for length in lengths)


def matmul_rate(device: torch.device) -> float:
    """Operations a second of a large bf16 matrix product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    rates = []
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(10):
            a @ b
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(10 * 2 * size**3 / (time.perf_counter() - started))
    return statistics.median(rates)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "CPU"


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['ranks']} x {result['device']}, matrix product {result['matmul_flops'] / 1e12:,.0f} TFLOP/s",
        f"{'':32} {'tok/s min':>11} {'median':>11} {'max':>11} {'MFU':>6} {'GiB':>6} {'reserved':>8} {'above':>6}"
        f" {'of eager':>9} {'compiled':>9} {'full':>6} {'shapes':>6} {'graphs':>6} {'compiled later':>14}"
        f" {'missed':>6} {'first s':>8}"
        f" {'loss':>10} {'norm':>10}",
    ]
    medians = {(r["shape"], r["name"]): statistics.median(r["tokens_per_second"]) for r in result["rows"]}
    for row in result["rows"]:
        rates = row["tokens_per_second"]
        median = statistics.median(rates)
        ratios = [medians.get((row["shape"], f"transformers, {kind}")) for kind in ("eager", "compiled")]
        shown = [f"{median / peer:.2f}" if peer else "-" for peer in ratios]
        full = f"{row['full']:.1%}" if row.get("full") else "-"
        counts = ["-" if row.get(name) is None else str(row[name]) for name in ("row_shapes", "graphs")]
        later = f"{row['compiled_in_measured_steps']}, {row.get('captured_in_measured_steps') or 0}"
        first = row.get("first_step")
        numbers = f"{first['loss']:>10.6f} {first['grad_norm']:>10.6f}" if first else f"{'-':>10} {'-':>10}"
        lines.append(
            f"{row['shape'] + ' ' + row['name']:32} {min(rates):>11,.0f} {median:>11,.0f} {max(rates):>11,.0f} "
            f"{row['mfu']:>6.1%} {row['peak_gib']:>6.1f} {row['reserved_gib']:>8.1f} "
            f"{row['reserved_gib'] - row['resident_gib']:>6.1f} {shown[0]:>9} {shown[1]:>9} "
            f"{full:>6} {counts[0]:>6} {counts[1]:>6} {later:>14} "
            f"{row['cache_misses']:>6} {row['first_seconds']:>8.0f} {numbers}"
        )
    for row in result["rows"]:
        step, _, kind = row["name"].rpartition(", ")
        shared = medians.get((row["shape"], f"{step}, {APART.get(kind)}"))
        if shared is not None:
            faster = shared / medians[row["shape"], row["name"]]
            lines.append(f"{row['shape']} {step}, {APART[kind]}: {faster:.2f} times as fast as the same samples apart")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
