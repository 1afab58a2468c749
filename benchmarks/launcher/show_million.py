"""The page of a run with a million kept samples: seconds of each request of `slime show`, and memory of its server.

    python benchmarks/launcher/show_million.py [--json] [--samples 1000000] [--steps 10000 1000 1]

Writes runs that keep so many samples, spread evenly over so many iterations, in files as a run writes them, and asks
the server of `slime show` what the page asks for: the overview, all curves and the first checks when it opens, and then
what a key or a click needs. Each request is made several times, in other places of the run; the slowest one counts.
Beside the time of an answer stands what the server computed for it, in seconds of a core, which other programs do not
lengthen as much.

Required: at most 0.3 s for what a key or a click needs. The checks of samples for faults are no part of it: each of
these requests works for 0.3 s in the background, until all samples are checked.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import psutil

from slime.launcher.run_directory.kept_samples import DIRECTORY, write_file

RESPONSE, PROMPT = 8, 6
GROUP = 4
# Samples of a file that are made one by one; a larger file repeats them.
DISTINCT = 4000
PAGE = 64
TIMES = 7
SECONDS = 120.0
# Requests of the page when it opens.
OPENING = ("page", "runs", "curves", "steps", "settings", "pairs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--samples", type=int, default=1_000_000, help="Samples that a run keeps (default: 1000000)")
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 1000, 1], help="Iterations, a run for each")
    parser.add_argument("--dir", type=Path, help="Directory for the runs (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        results = [measure(Path(directory) / f"run-{n}", options.samples, n) for n in options.steps]
    if options.json:
        print(json.dumps({"samples": options.samples, "results": results}, indent=1))
        return
    for row in results:
        print(f"{row['samples']:,} samples in {row['steps']:,} iterations, {row['megabytes']:.0f} MB on disk, written "
              f"in {row['write_seconds']:.0f} s; server {row['memory_mb'][0]:.0f} MB, at the end "
              f"{row['memory_mb'][1]:.0f} MB")  # fmt: skip
        for name, seconds in row["seconds"].items():
            print(f"  {name:36} {seconds[0]:7.3f} s, median {seconds[1]:.3f} s; computing at most {seconds[2]:.2f} s")


def write_run(run: Path, samples: int, steps: int) -> None:
    """Writes metrics.jsonl, run.yaml and a file of samples for each iteration."""
    (run / DIRECTORY).mkdir(parents=True)
    (run / "run.yaml").write_text(f"hf_checkpoint: /models/none\nnum_rollout: {steps}\n")
    per_step = samples // steps
    made = [sample(index) for index in range(min(per_step, DISTINCT))]
    with (run / "metrics.jsonl").open("w") as metrics:
        for step in range(steps):
            values = {f"train/metric_{n}": float(np.sin(step / 100 + n)) for n in range(30)}
            metrics.write(json.dumps({"step": step, "rollout/raw_reward": step / steps, **values}) + "\n")
            rows = [
                made[i % len(made)] | {"step": step, "index": step * per_step + i, "group_index": i // GROUP,
                                       "spans": [{"start": 0, "end": RESPONSE, "weight_version": str(step)}]}
                for i in range(per_step)
            ]  # fmt: skip
            write_file(run / DIRECTORY / f"{step:06d}.parquet", rows)


def sample(index: int) -> dict[str, Any]:
    values = np.random.default_rng(index)
    engine = -values.uniform(0.1, 4, RESPONSE).astype(np.float32)
    return {
        "dataset": "train", "prompt": f"{index} + 1 =", "response": str(index + index % 2), "label": str(index),
        "reward": float(index % 2 == 0), "reward_json": None, "status": "completed", "response_length": RESPONSE,
        "tokens": values.integers(0, 50_000, PROMPT + RESPONSE, np.int32), "loss_mask": np.ones(RESPONSE, np.uint8),
        "engine_log_probs": engine, "trainer_log_probs": engine + np.float32(0.01), "metadata": "{}",
    }  # fmt: skip


def measure(run: Path, samples: int, steps: int) -> dict[str, Any]:
    started = time.monotonic()
    write_run(run, samples, steps)
    written = time.monotonic() - started
    command = [sys.executable, "-m", "slime.launcher.cli", "show", str(run), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        process = psutil.Process(server.pid)
        before = process.memory_info().rss / 1e6
        seconds = timed(url, process, samples, steps)
        return {
            "samples": samples, "steps": steps, "write_seconds": written, "seconds": seconds,
            "megabytes": sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) / 1e6,
            "memory_mb": [before, process.memory_info().rss / 1e6],
        }  # fmt: skip
    finally:
        server.terminate()
        server.wait(SECONDS)


def timed(url: str, process: psutil.Process, samples: int, steps: int) -> dict[str, tuple[float, float, float]]:
    """Returns the slowest and the median time of each request, and the most that the server computed, by name."""
    per_step = samples // steps
    places = random.Random(0)
    found: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}

    def ask(name: str, path: str) -> Any:
        before, started = sum(process.cpu_times()[:2]), time.monotonic()
        with urlopen(url + path, timeout=SECONDS) as answer:
            body = answer.read()
        found.setdefault(name, []).append(time.monotonic() - started)
        computed.setdefault(name, []).append(sum(process.cpu_times()[:2]) - before)
        return json.loads(body) if path else None

    ask("page", "")
    for request in OPENING[1:]:
        ask(request, f"data/{request}?run=0")
    ask("first checks, in the background", "data/checks?run=0")
    for _ in range(TIMES):
        step = places.randrange(steps)
        last, row = max(per_step - PAGE, 0), places.randrange(per_step)
        ask("first page of a step", f"data/samples?run=0&step={step}&start=0&count={PAGE}")
        ask("last page of a step", f"data/samples?run=0&step={step}&start={last}&count={PAGE}")
        ask("one sample", f"data/sample?run=0&step={step}&row={row}")
        ask("overview, each second", "data/runs?run=0")
        ask("curves, after a step", f"data/curves?run=0&after={steps - 1}&edition=1")
        ask("further checks, in the background", "data/checks?run=0")
    return {name: (max(times), sorted(times)[len(times) // 2], max(computed[name])) for name, times in found.items()}


if __name__ == "__main__":
    main()
