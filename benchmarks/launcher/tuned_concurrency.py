"""Tokens a second with a tuned limit of samples in flight, against limits set by hand, on three workloads.

    python benchmarks/launcher/tuned_concurrency.py [--workloads short long turns] [--limits 1 2 4 ...] [--json FILE]
    python benchmarks/launcher/tuned_concurrency.py --embedded --workloads short --limits 1 4 16 64 [--cache-tokens N]

short   one request per sample, responses of 48 to 80 tokens, an engine that runs 96 samples at once
long    log-normal responses of 200 tokens on average, 1,000 at most, an engine whose cache holds about 85 of them
turns   200 conversations of four turns, each turn a request, 0.5 s apart on average; the engine runs 64 at once

The fleet, its router and HTTP are the real ones. The engine is a stand-in whose speed saturates and which retracts
requests when its cache is full (`batching_engine.py`), or with `--embedded` a real one with a model of four layers.
Demand is without end. The embedded engine is compared in tokens per second of its own CPU time, which other work on the
machine changes little; it always has work. Rates are of the time after the warm-up, in which the tuned limit grows from
16; `first` is the tuned rate of the warm-up, against the best rate. Every row has the load average of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from batching_engine import BatchingEngine, Speed
from fully_async import log_normal
from latent_run import write_inputs
from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.watched import FleetOptions

TUNED = "tuned"
PROMPT = 32
Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """speed: that of the stand-in. lengths: those of responses, drawn in turn, of at most `most` tokens. turns: of a
    conversation, whose prompt grows by 64 tokens with each, and the mean seconds between them. clients: requests or
    conversations at the same time."""

    speed: Speed
    lengths: Callable[[int], list[int]]
    most: int
    turns: int = 1
    idle_seconds: float = 0.0
    clients: int = 320


def uniform(least: int, most: int) -> Callable[[int], list[int]]:
    return lambda seed: [random.Random(f"{seed} {i}").randint(least, most) for i in range(4096)]


def long_tailed(mean: int, most: int) -> Callable[[int], list[int]]:
    return lambda seed: [min(most, length) for length in log_normal(4096, mean, 1.0, seed)]


WORKLOADS = {
    "short": Workload(
        Speed(step_seconds=0.01, sequence_seconds=1e-4, prefill_seconds=1e-5, max_running=96), uniform(48, 80), 80
    ),
    "long": Workload(
        Speed(step_seconds=0.005, sequence_seconds=2e-5, cache_seconds=2e-7, prefill_seconds=2e-5, cache_tokens=16_000),
        long_tailed(200, 1000),
        1000,
    ),
    "turns": Workload(
        Speed(step_seconds=0.01, sequence_seconds=1e-4, prefill_seconds=1e-5, max_running=64, cache_tokens=20_000),
        uniform(20, 60), 60, turns=4, idle_seconds=0.5, clients=200,
    ),
}  # fmt: skip


class Clients:
    """Sends the requests of a workload to a fleet, without end. made: tokens of the answers so far."""

    def __init__(self, workload: Workload, fleet: Fleet, seed: int, *, real: bool) -> None:
        self.workload, self.fleet, self.real = workload, fleet, real
        self.made = 0
        self._lengths = workload.lengths(seed)
        self._random = random.Random(seed)
        self._sent = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._converse()) for _ in range(self.workload.clients)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    raise result

    async def _converse(self) -> None:
        while True:
            for turn in range(self.workload.turns):
                if self.workload.idle_seconds:
                    await asyncio.sleep(self._random.expovariate(1 / self.workload.idle_seconds))
                await self._send(PROMPT + 64 * turn)

    async def _send(self, prompt: int) -> None:
        length = self._lengths[self._sent % len(self._lengths)]
        self._sent += 1
        # A real engine ends a response at its limit, the stand-in at the length that the prompt begins with.
        most = length if self.real else self.workload.most
        ids = [self._random.randint(3, 400) if self.real else length for _ in range(prompt)]
        params = {"max_new_tokens": most, "ignore_eos": True}
        (output,) = await self.fleet.generate([ids], [params], rids=[f"request-{self._sent}"])
        self.made += output["meta_info"]["completion_tokens"]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    workload: Workload, limit: int | str, options: argparse.Namespace, real: tuple[RemoteEngine, int] | None
) -> Row:
    """real: an embedded engine and the id of its process; None for the stand-in."""
    with contextlib.ExitStack() as stack:
        stand_in = None
        if real is None:
            stand_in = BatchingEngine(workload.speed)
            stack.callback(stand_in.stop)
        engine = real[0] if real else RemoteEngine("stand-in", f"http://{stand_in.address}")  # type: ignore[union-attr]
        tuned = limit == TUNED
        most = max(options.limits) if tuned else int(limit)
        loop = LoopThread()
        stack.callback(loop.stop)
        fleet = Fleet([engine], loop, FleetOptions(concurrency=most, tunes_concurrency=tuned))
        fleet.start()
        stack.callback(fleet.stop)
        clients = Clients(workload, fleet, options.seed, real=real is not None)

        def made() -> int:
            return clients.made if stand_in is None else stand_in.batch.made

        async def run() -> Row:
            async with clients.running():
                clock = time.perf_counter if real is None else partial(cpu_seconds, real[1])
                times, counts = [clock()], [made()]
                for seconds in (options.warm_up if tuned else options.warm_up / 3, options.seconds):
                    await asyncio.sleep(seconds)
                    times.append(clock())
                    counts.append(made())
                rates = [(b - a) / (y - x) for a, b, x, y in zip(counts, counts[1:], times, times[1:], strict=False)]
                value = fleet.concurrency_metrics.get("rollout/concurrency", float(most))
                return {"limit": limit, "in_flight": value, "rate": rates[1], "warm_up": rates[0]}

        row = loop.run(run(), timeout=600)
        loop.run(fleet.abort(), timeout=60)
        retracted = {} if stand_in is None else {"retracted": stand_in.batch.retracted}
        return row | retracted | {"load": round(os.getloadavg()[0], 1)}


@contextlib.contextmanager
def embedded(cache_tokens: int) -> Iterator[tuple[RemoteEngine, int]]:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=2048, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        write_inputs(Path(directory), 508)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
        process = start_embedded(EmbeddedOptions(model_path=directory, threads=1, max_total_tokens=cache_tokens))
        with process:
            process.wait_ready(120)
            yield RemoteEngine(process.name, process.url, "embedded", process.api_key), process.pid


def main() -> None:
    options = read_options()
    report: dict[str, Any] = {
        "benchmark": "tuned_concurrency", "date": str(date.today()), "cores": len(os.sched_getaffinity(0)),
        "engine": "embedded" if options.embedded else "stand-in",
        "unit": "tokens per CPU second" if options.embedded else "tokens per second", "workloads": {},
        "settings": vars(options) | {"json": None},
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        real = stack.enter_context(embedded(options.cache_tokens)) if options.embedded else None
        for name in options.workloads:
            rows = []
            for limit in [*options.limits, TUNED]:
                rows.append(measure(WORKLOADS[name], limit, options, real))
                print(json.dumps({"workload": name} | rows[-1]), flush=True)
            best = max(row["rate"] for row in rows[:-1])
            result = {"rows": rows, "ratio": rows[-1]["rate"] / best, "first": rows[-1]["warm_up"] / best}
            report["workloads"][name] = result
    print_table(report)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    add("--limits", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 96, 128, 256], metavar="N")
    add(
        "--warm-up",
        type=float,
        default=12.0,
        help="Seconds before the measurement; a third of it for limits set by hand",
    )
    add("--seconds", type=float, default=8.0, help="Seconds of a measurement (default: 8)")
    add("--embedded", action="store_true", help="Measure an embedded engine of one thread, in place of the stand-in")
    add("--cache-tokens", type=int, default=8000, metavar="N", help="Its key-value cache in tokens (default: 8000)")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="JSON file to write")
    return parser.parse_args()


def print_table(report: dict[str, Any]) -> None:
    print(f"| workload | limit | in flight | {report['unit']} | of the best | retracted | load average |")
    print("|---|---|---|---|---|---|---|")
    for name, result in report["workloads"].items():
        best = max(row["rate"] for row in result["rows"][:-1])
        for row in result["rows"]:
            rate, retracted = row["rate"], row.get("retracted", "")
            cells = [name, row["limit"], f"{row['in_flight']:.0f}", f"{rate:,.0f}", f"{rate / best:.2f}", retracted]
            print(f"| {' | '.join(map(str, cells))} | {row['load']} |")


if __name__ == "__main__":
    main()
