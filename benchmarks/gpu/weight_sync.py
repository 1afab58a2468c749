"""Seconds of a weight update into a running SGLang engine, and the fraction of memory bandwidth that it is.

    python benchmarks/gpu/weight_sync.py [--cases 135m 0.6b 8b] [--transports ipc nccl] [--deltas] [--output FILE.json]

135m, 0.6b   the fsdp backend with float32 weights, bfloat16 on the wire: what a training run does
8b           random bfloat16 tensors on the trainer's GPU, end to end as that backend's are, or with --apart each by
             itself; the engine's start out random, too

ipc: engine and trainer on one GPU; nccl: the engine on a second one. An update is begin (pause, flush), transfer,
commit (go on), as a run has it, and the seconds between are those in which the engine generates nothing. The first,
which opens connections, is reported apart. Bandwidth is that of a copy of 4 GiB within the GPU, in bytes copied a
second, measured before in the same process.

--deltas: after all weights, the engine gets deltas by nccl. Before each update every weight moves by 1e-6, up or down,
as AdamW moves it at this learning rate.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import pstats
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.group import set_nccl_environment
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine
from workload import SHAPES, write_model

CASES = ("135m", "0.6b", "8b")
TRANSPORTS = ("ipc", "nccl")


def main() -> int:
    options = parse()
    gpus = visible_gpus()
    needed = 2 if "nccl" in options.transports else 1
    if len(gpus) < needed:
        print(f"GPUs needed: {needed}, visible: {len(gpus)}", file=sys.stderr)
        return 1
    set_nccl_environment()
    torch.cuda.set_device(0)
    result: dict[str, Any] = {
        "date": date.today().isoformat(), "command": " ".join(sys.argv), "device": torch.cuda.get_device_name(0),
        "versions": {name: metadata.version(name) for name in ("torch", "sglang", "transformers")},
        "bucket_bytes": options.bucket, "rows": [],
    }  # fmt: skip
    result["copy_bytes_per_second"] = copy_rate()
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        models = {case: write(Path(directory), case) for case in options.cases}
        engines = {
            (transport, case): stack.enter_context(
                start(options, models[case], case, gpus[TRANSPORTS.index(transport)])
            )
            for transport in options.transports
            for case in options.cases
        }
        for (transport, case), engine in engines.items():
            engine.wait_ready(options.start_seconds)
            for mode in ("full", "delta") if options.deltas and transport == "nccl" else ("full",):
                result["rows"].append(measure(options, transport, mode, case, models[case], engine, result))
                torch.cuda.empty_cache()
                if options.output:
                    Path(options.output).write_text(json.dumps(result, indent=1) + "\n")
        print(table(result))
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=["ipc"])
    parser.add_argument("--deltas", action="store_true", help="Also measure --update-weight-mode delta by nccl")
    parser.add_argument("--bucket", type=int, default=512 << 20, help="Value of --update-weight-buffer-size")
    parser.add_argument("--apart", action="store_true", help="Give every tensor of 8b memory of its own")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--attention", default="fa3", help="Value of --sglang-attention-backend")
    parser.add_argument("--start-seconds", type=float, default=400, help="Seconds that the engines may take to start")
    parser.add_argument("--profile", action="store_true", help="Print where the host's time of one more update goes")
    parser.add_argument("--output", help="JSON file to write")
    return parser.parse_args()


def write(parent: Path, case: str) -> Path:
    """A directory with the model of `case`, or with its config alone where the engine makes weights up."""
    directory = parent / case
    if case == "8b":
        import transformers

        kind, values = SHAPES[case]
        config = getattr(transformers, kind)(**values, architectures=["Qwen3ForCausalLM"], dtype=torch.bfloat16)
        config.save_pretrained(directory)
    else:
        write_model(directory, case, torch.device("cuda", 0))
    return directory


def start(options: argparse.Namespace, model: Path, case: str, gpu: str) -> EngineProcess:
    # Several engines start on a GPU at once: what each would find free does not measure its cache.
    args: dict[str, Any] = {
        "mem_fraction_static": 0.9, "max_total_tokens": 8192, "attention_backend": options.attention,
        "disable_cuda_graph": True, "skip_tokenizer_init": True,
    }  # fmt: skip
    if case == "8b":
        args["load_format"] = "dummy"
    return start_sglang(
        SGLangOptions(
            model_path=str(model), gpus=[gpu], memory_saver=True, random_seed=1, deltas=options.deltas, args=args
        ),
        name=f"sglang-{case}",
    )


def measure(
    options: argparse.Namespace, transport: str, mode: str, case: str, model: Path, engine: EngineProcess,
    result: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    settings = TrainerSettings(
        hf_checkpoint=str(model), bf16=True, colocate=transport == "ipc", update_weight_buffer_size=options.bucket,
        update_weight_timeout_seconds=120.0, update_weight_mode=mode,
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 1)
    source: Any = RandomWeights(model, apart=options.apart) if case == "8b" else None
    source = source or build_backend(settings, ranks, torch.device("cuda", 0))
    rollout = Rollout(engine)
    updates = WeightSender(settings, ranks, source, rollout, model)
    try:
        move = partial(move_weights, source) if mode == "delta" else lambda: None
        seconds, size = timed(updates, rollout.version(), options.repeats + 1, move)
        if options.profile:
            move()
            print_profile(updates, rollout.version() + 1)
        updates.close()
    except Exception as error:
        time.sleep(1)
        error.add_note("last lines of the engine:\n" + "\n".join(engine.last_lines))
        raise
    rate = size / statistics.median(seconds[1:])
    return {
        "transport": transport, "mode": mode, "case": case, "bytes": size, "tensors": len(source.weight_sizes()),
        "first_seconds": seconds[0], "seconds": sorted(seconds[1:]), "bytes_per_second": rate,
        "around_seconds": statistics.median(rollout.seconds[1:]),
        "of_copy_bandwidth": rate / result["copy_bytes_per_second"],
        "changed": updates.metrics.get("perf/update_weights_changed"),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def timed(updates: WeightSender, held: int, count: int, move: Callable[[], object]) -> tuple[list[float], int]:
    seconds, size = [], 0
    for version in range(held + 1, held + count + 1):
        move()
        torch.cuda.synchronize()
        started = time.perf_counter()
        size = updates.push(version)
        seconds.append(time.perf_counter() - started)
        print(f"version {version}: {size:,} bytes in {seconds[-1]:.3f} s", file=sys.stderr, flush=True)
    return seconds, size


@torch.no_grad()
def move_weights(source: Any) -> None:
    tensors = source.tensors.values() if isinstance(source, RandomWeights) else source.policy.parameters()
    for tensor in tensors:
        tensor.add_(torch.randint_like(tensor, 2).mul_(2).sub_(1), alpha=1e-6)


def print_profile(updates: WeightSender, version: int, count: int = 25) -> None:
    profiler = cProfile.Profile()
    torch.cuda.synchronize()
    profiler.runcall(updates.push, version)
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(count)


class RandomWeights:
    """Stands for a backend: the tensors of a model that does not fit a test run's disk or optimizer."""

    device = torch.device("cuda", 0)

    def __init__(self, directory: Path, *, apart: bool) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        self._apart = apart
        if apart:
            self.tensors = {name: torch.empty(shape, **self._kind).normal_(std=0.02) for name, shape in shapes.items()}
            return
        flat = torch.empty(sum(shape.numel() for shape in shapes.values()), **self._kind).normal_(std=0.02)
        parts = flat.split([shape.numel() for shape in shapes.values()])
        self.tensors = {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}

    @property
    def _kind(self) -> dict[str, Any]:
        return {"dtype": torch.bfloat16, "device": self.device}

    def weights_stay(self, dtype: torch.dtype) -> bool:
        return not self._apart

    def named_weights(
        self, *, dtype: torch.dtype | None = None, everywhere: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def weight_sizes(self) -> dict[str, int]:
        return {name: tensor.numel() for name, tensor in self.tensors.items()}


class Rollout:
    """A rollout service of one engine: pauses it, empties its cache, holds its version against ours, lets it go on."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        # Engine calls of each update, before and after the transfer.
        self.seconds: list[float] = []

    def call(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.engine.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read()

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        started = time.perf_counter()
        self.call("/pause_generation", {"mode": "abort"})
        self.call("/flush_cache", {})
        self.seconds.append(time.perf_counter() - started)
        kind, held = KINDS["sglang"], self.version()
        return [
            Engine(
                self.engine.name,
                self.engine.url,
                kind.name,
                True,
                held,
                weight_transports=kind.weight_transports,
                delta_carriers=kind.delta_carriers,
            )  # fmt: skip
        ]

    def version(self) -> int:
        return int(json.loads(self.call("/model_info"))["weight_version"])

    def begin_joining(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        return []

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        return None

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        started = time.perf_counter()
        held = self.version()
        if held != weight_version:
            raise RuntimeError(f"the engine holds weight version {held}, expected {weight_version}")
        self.call("/continue_generation", {})
        self.seconds[-1] += time.perf_counter() - started

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        print(f"update {weight_version} was given up: {reason}", file=sys.stderr, flush=True)


def copy_rate() -> float:
    """Bytes copied a second from one place of the GPU's memory to another, median of ten."""
    source = torch.ones(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(11):
        torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        rates.append(source.nbytes / (time.perf_counter() - started))
    return statistics.median(rates[1:])


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['device']}, buckets of {result['bucket_bytes'] / 2**20:,.0f} MiB, copy "
        f"{result['copy_bytes_per_second'] / 1e12:.2f} TB/s",
        f"{'':16} {'GB':>7} {'tensors':>8} {'first s':>8} {'min s':>8} {'median':>8} {'max':>8} {'around':>8} "
        f"{'GB/s':>8} {'of copy':>8}",
    ]
    for row in result["rows"]:
        name = " ".join([row["transport"], row["case"], *(["deltas"] if row["mode"] == "delta" else [])])
        low, middle, high = min(row["seconds"]), statistics.median(row["seconds"]), max(row["seconds"])
        lines.append(
            f"{name:16} {row['bytes'] / 1e9:>7.3f} {row['tensors']:>8} "
            f"{row['first_seconds']:>8.3f} {low:>8.3f} {middle:>8.3f} {high:>8.3f} {row['around_seconds']:>8.3f} "
            f"{row['bytes_per_second'] / 1e9:>8.1f} {row['of_copy_bandwidth']:>8.1%}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
