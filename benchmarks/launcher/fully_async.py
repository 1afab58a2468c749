"""Tokens a second of fully asynchronous training against synchronous, in one run and without a GPU.

    python benchmarks/launcher/fully_async.py [--steps 12] [--groups 16] [--sigma 1.0] [--staleness 1 2 4]

The loops, the buffer and the rollout service are the real ones. The engine takes a set time for each token, whatever
else it generates; the lengths of responses are log-normal; the trainer takes as long as the engine needs for a step of
the synchronous run, so that 2 is the best that overlap alone can give. Prints a JSON object.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from latent_run import NoReport, latent_run
from slime.launcher.loops.fully_async import loop_fully_async
from slime.launcher.loops.synchronous import loop


def log_normal(count: int, mean: float, sigma: float, seed: int) -> list[int]:
    """Lengths with this mean; sigma: of their logarithm."""
    lengths = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
    return [max(1, int(length)) for length in lengths]


def measure(options: argparse.Namespace, lengths: Sequence[int], flags: Sequence[str]) -> dict[str, Any]:
    """Runs once; tokens a second are of the tokens that were trained on, from the first rollout to the last step."""
    batches = [lengths[i : i + options.groups] for i in range(0, options.steps * options.groups, options.groups)]
    train_seconds = float(np.mean([max(batch) for batch in batches])) * options.token_seconds
    report = NoReport()
    words = ("--rollout-batch-size", str(options.groups), "--num-rollout", str(options.steps), *flags)
    with tempfile.TemporaryDirectory() as directory:
        sleep = lambda step: time.sleep(train_seconds)  # noqa: E731
        with latent_run(Path(directory), lengths, options.token_seconds, sleep, *words) as run:
            started = time.perf_counter()
            (loop_fully_async if flags else loop)(run.config, run, report)  # type: ignore[arg-type]
            seconds = report.finished[-1] - started
    staleness = [row["rollout/staleness"] for row in report.rows]
    return {
        "tokens_per_second": sum(row["rollout/tokens"] for row in report.rows) / seconds,
        "seconds": seconds,
        "train_seconds_per_step": train_seconds,
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": max(row["rollout/staleness/max"] for row in report.rows),
        "dropped": sum(row["rollout/dropped_stale"] for row in report.rows),
        "trainer_waited": sum(row.get("perf/rollout_wait_time", 0.0) for row in report.rows),
        "engine_waited": sum(row.get("perf/engine_wait_time", 0.0) for row in report.rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--mean", type=float, default=200.0, help="Mean length of a response in tokens")
    parser.add_argument("--sigma", type=float, default=1.0, help="Standard deviation of the logarithm of the lengths")
    parser.add_argument("--token-seconds", type=float, default=0.002)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--policy", choices=("wait", "drop", "keep"), default="wait")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    lengths = log_normal(options.groups * (options.steps + 16), options.mean, options.sigma, options.seed)
    results = {"synchronous": measure(options, lengths, ())}
    base = results["synchronous"]["tokens_per_second"]
    for staleness in options.staleness:
        flags = ("--fully-async", "--max-staleness", str(staleness), "--staleness-policy", options.policy)
        result = measure(options, lengths, flags)
        results[f"staleness {staleness}"] = result | {"ratio": result["tokens_per_second"] / base}
    print(json.dumps({"settings": vars(options), "results": results}, indent=1))


if __name__ == "__main__":
    main()
