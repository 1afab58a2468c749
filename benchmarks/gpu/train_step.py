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

All in one process, one after the other, `--repeats` times after warming up; small differences need both orders of
`--lengths`. With torchrun on several ranks, each with `--samples`: the first step's loss and gradient norm are those of
one rank with `--lots 2`.
MFU counts 6 x parameters (without the input
embedding) x tokens plus causal attention, over the rate of a large bf16 matrix product measured before.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.trainer.trainer import pick_device, prepare_process
from slime.types import Sample
from slime.types.clients import SampleSummary
from workload import SHAPES, make_samples, regrouped, release, write_model

WARM_UP = 3
LENGTHS = ("equal", "ragged", "log-normal", "groups", "apart", "turns", "turns-apart")
# Kinds of samples that are laid out one by one -> those that share.
APART = {"apart": "groups", "turns-apart": "turns"}


def main() -> int:
    options = parse()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    settings = TrainerSettings(hf_checkpoint="-")
    prepare_process(settings)
    device = pick_device(rank)
    # A port of its own: torchrun listens on its.
    address = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{int(os.environ.get('MASTER_PORT', 29500)) + 1}"
    ranks = Ranks(rank, world, address, 10, device.type)
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "command": " ".join(sys.argv), "device": device_name(device), "ranks": world,
        "python": platform.python_version(), "rows": [],
        "versions": {name: version(name) for name in ("torch", "transformers", "megatron-core", "transformer-engine")},
    }  # fmt: skip
    result["matmul_flops"] = matmul_rate(device)
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as own:
            # transformers writes on the first rank alone.
            parent = options.models or own
            directory = ranks.from_first(functools.partial(os.path.join, parent, shape))
            ranks.on_first(functools.partial(write_model, Path(directory), shape, device))
            result["rows"] += measure(options, shape, directory, ranks, device, result["matmul_flops"])
            ranks.gather(None)
        if rank == 0 and options.output:
            Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
    if rank == 0:
        print(table(result))
    ranks.close()
    return 0


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


def measure(
    options: argparse.Namespace, shape: str, directory: str, ranks: Ranks, device: torch.device, rate: float
) -> list[dict[str, Any]]:
    vocabulary = SHAPES[shape][1]["vocab_size"]
    number = WARM_UP + options.repeats
    steps: dict[str, list[list[Sample]]] = {}
    for kind in {"equal", *options.lengths}:
        lots = options.lots * ranks.world_size
        made = [make_samples(options, vocabulary, kind, seed) for seed in range(number * lots)]
        steps[kind] = [regrouped(sum(made[i::number], [])) for i in range(number)]
    rows: list[dict[str, Any]] = []
    subjects: dict[str, tuple[str, Callable[[], tuple[Callable[[], None], int]]]] = {}
    for name in options.backends:
        for fp8 in (False, True) if name == "megatron" and options.fp8_format else (False,):
            label = f"{name} {options.fp8_format} {options.fp8_recipe}" if fp8 else name
            for kind in options.lengths:
                make_step = functools.partial(
                    step_of, options, name, directory, steps[kind], ranks, device, kind, fp8=fp8
                )
                subjects[f"step, {label}, {kind}"] = kind, make_step
    for name in options.peers if ranks.world_size == 1 else ():
        make_peer = functools.partial(peer, options, name, directory, steps["equal"][0], device)
        subjects[f"transformers, {name}"] = "equal", make_peer
    for name, (kind, make) in subjects.items():
        torch._dynamo.utils.counters.clear()
        started = time.perf_counter()
        run, parameters = make()
        lengths = [[len(s.array("tokens")) for s in samples] for samples in steps[kind]][WARM_UP:]
        seconds, memory, first, compiled = timed(run, options.repeats, device, started)
        flops = [work(SHAPES[shape][1], parameters, of_step) for of_step in lengths]
        speeds = [sum(of_step) / s for of_step, s in zip(lengths, seconds, strict=True)]
        rows.append({
            "shape": shape, "name": name, "parameters": parameters, "tokens": [sum(of_step) for of_step in lengths],
            "seconds": seconds, "tokens_per_second": sorted(speeds), "first_seconds": first,
            "mfu": statistics.median(f / s for f, s in zip(flops, seconds, strict=True)) / rate / ranks.world_size,
            "compiled_in_measured_steps": compiled, "peak_gib": memory[0] / 2**30, "reserved_gib": memory[1] / 2**30,
            "resident_gib": memory[2] / 2**30,
            "cache_misses": int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_miss"]),
            "cache_hits": int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"]),
            **getattr(run, "seen", dict)(),
        })  # fmt: skip
        if ranks.rank == 0:
            print(f"{shape} {name}: {statistics.median(speeds):,.0f} tok/s {rows[-1]}", file=sys.stderr, flush=True)
        del run
        release(device)
    return rows


class MeasuredSteps:
    """Steps of a trainer, each with its own samples."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        device: torch.device,
        steps: Sequence[Sequence[Sample]],
        megatron: dict[str, Any],
        share: bool,
    ) -> None:
        self.backend = build_backend(settings, ranks, device, megatron=megatron)
        self.backend.can_share_prompts = self.backend.can_share_prompts and share
        self._step = TrainStep(settings, self.backend, ranks)
        self._steps = steps
        self._plans = [Planner(settings).plan(0, [SampleSummary.of(s) for s in samples]) for samples in steps]
        self._settings = settings
        self._done = 0
        self._captured_warm: int | None = None
        self.first: dict[str, float] = {}

    def __call__(self) -> None:
        number = self._done % len(self._steps)
        self._done += 1
        samples = self._steps[number]
        self.metrics = self._step.run(self._plans[number], lambda positions: (samples[p] for p in positions))
        self.first = self.first or self.metrics
        if self._done == WARM_UP:
            self._captured_warm = getattr(self._static_rows, "captured", None)

    @property
    def _static_rows(self) -> Any:
        return getattr(getattr(self.backend, "_passes", None), "rows", None)

    def seen(self) -> dict[str, Any]:
        limit = self._settings.max_tokens_per_gpu or 1
        rows = self._static_rows
        return {
            "full": self.metrics["perf/row_tokens"] / self.metrics["train/micro_batches"] / limit,
            "rows": self.metrics["train/micro_batches"], "row_tokens": self.metrics["perf/row_tokens"],
            "row_shapes": rows and len(rows.shapes), "graphs": rows and rows.num_graphs,
            "shapes": rows and [dataclasses.asdict(shape) for shape in rows.shapes],
            "captured_in_measured_steps": rows and rows.captured - (self._captured_warm or 0),
            "first_step": {name: self.first[f"train/{name}"] for name in ("loss", "grad_norm", "entropy_loss")},
            "metrics": {name: value for name, value in self.metrics.items() if "time" in name or "norm" in name},
        }  # fmt: skip


def step_of(
    options: argparse.Namespace,
    backend: str,
    directory: str,
    steps: Sequence[Sequence[Sample]],
    ranks: Ranks,
    device: torch.device,
    kind: str = "equal",
    *,
    fp8: bool = False,
) -> tuple[MeasuredSteps, int]:
    settings = TrainerSettings(
        hf_checkpoint=directory, train_backend=backend, bf16=options.dtype == "bfloat16", lr=1e-6,
        use_dynamic_batch_size=True, max_tokens_per_gpu=options.row, log_probs_chunk_size=options.chunk,
        compile=False if options.no_compile else None, fsdp_sharding=getattr(options, "sharding", "auto"),
        activation_memory_budget=getattr(options, "budget", 1.0),
    ).on(device.type)  # fmt: skip
    implementation = getattr(options, "transformer_impl", None)
    megatron = {"transformer_impl": implementation} if implementation else {}
    if fp8:
        megatron |= {"fp8": options.fp8_format, "fp8_recipe": options.fp8_recipe}
    step = MeasuredSteps(settings, ranks, device, steps, megatron, share=kind not in APART)
    return step, step.backend.num_parameters


def peer(
    options: argparse.Namespace, kind: str, directory: str, samples: list[Sample], device: torch.device
) -> tuple[Callable[[], None], int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, options.dtype), attn_implementation="sdpa"
    ).to(device)
    model.config.use_cache = False
    parameters = sum(p.numel() for p in model.parameters())
    forward: Any = torch.compile(model) if kind == "compiled" else model
    rows = torch.tensor(np.stack([sample.array("tokens") for sample in samples]), dtype=torch.int64, device=device)
    batches = rows.split(max(1, options.row // options.length))

    def run() -> None:
        for batch in batches:
            logits = forward(input_ids=batch, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
            loss.backward()
        model.zero_grad(set_to_none=True)

    return run, parameters


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
