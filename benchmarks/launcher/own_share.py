"""The launcher's own share of an iteration: sealing, metrics, samples on disk, plots, calls between services.

    python benchmarks/launcher/own_share.py [--json] [--samples 256 4096] [--steps 12] [--quickstart-model]

Runs the two-layer model of `scripts/quickstart --tiny` with so many samples an iteration, in groups of 8, through the
real services; with --quickstart-model the language model of `scripts/quickstart`, whose iteration of 4,096 takes some
three minutes. What is not generation, training, memory, weights or saving, as the run's own metrics have them, is the
launcher's; and so is what it does between two iterations. The first two iterations are left out.

Required: a median of at most 25 ms with 256 samples, and of at most 2 % of an iteration with 4,096. A share of the
iterations of the tiny model, which take 0.5 ms for a sample, is an upper bound of what any other has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = (
    "perf/rollout_time", "perf/offload_time", "perf/train_onload_time", "perf/train_time", "perf/train_offload_time",
    "perf/onload_time", "perf/update_weights_time", "perf/save_time", "perf/restart_point_time",
)  # fmt: skip
WARM_UP, GROUP = 2, 8
SECONDS = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 4096], help="Samples an iteration, in turns")
    parser.add_argument("--steps", type=int, default=12, help="Iterations, two of which are left out (default: 12)")
    parser.add_argument("--quickstart-model", action="store_true", help="Run the quickstart's model, not the tiny one")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be more than {WARM_UP} (got: {options.steps})")
    if options.child:
        print(json.dumps(measure(options.child, options.steps, tiny=not options.quickstart_model)))
        return
    results = [child(samples, options.steps, tiny=not options.quickstart_model) for samples in options.samples]
    if options.json:
        model = {"quickstart_model": options.quickstart_model}
        print(json.dumps({"steps": options.steps, **model, "results": results}, indent=1))
        return
    print(f"{'samples':>8} {'iteration, s':>13} {'own, ms: min':>13} {'median':>8} {'max':>8} {'share':>7}")
    for row in results:
        own = f"{row['own_ms'][0]:13.1f} {row['own_ms'][1]:8.1f} {row['own_ms'][2]:8.1f}"
        print(f"{row['samples']:8} {row['step_seconds']:13.3f} {own} {row['share']:7.1%}")


def child(samples: int, steps: int, *, tiny: bool) -> dict[str, Any]:
    """Runs `measure` in a process of its own: Ray and the services end with it."""
    command = [sys.executable, __file__, "--child", str(samples), "--steps", str(steps)]
    command += [] if tiny else ["--quickstart-model"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, timeout=SECONDS if tiny else SECONDS * steps, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(samples: int, steps: int, *, tiny: bool) -> dict[str, Any]:
    """Returns seconds of an iteration and milliseconds that are the launcher's: least, median, most."""
    from slime.launcher.metrics.report import Report
    from slime.launcher.quickstart.__main__ import main as quickstart

    between: list[float] = []
    report_step = Report.step

    def timed(self: Report, *arguments: Any) -> None:
        started = time.perf_counter()
        report_step(self, *arguments)
        between.append(time.perf_counter() - started)

    Report.step = timed  # type: ignore[method-assign, assignment]
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        words = ["--num-rollout", str(steps), "--rollout-batch-size", str(samples // GROUP)]
        words += ["--tiny"] if tiny else ["--n-samples-per-prompt", str(GROUP)]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            code = quickstart([*words, "--global-batch-size", str(samples), "--output-dir", str(run)])
        if code:
            sys.exit(f"the run ended with {code}:\n{printed.getvalue()}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "perf/step_time" in row][WARM_UP:]
    own = [
        row["perf/step_time"] - sum(row.get(phase) or 0.0 for phase in PHASES) + seconds
        for row, seconds in zip(rows, between[WARM_UP:], strict=True)
    ]
    whole = [row["perf/step_time"] + seconds for row, seconds in zip(rows, between[WARM_UP:], strict=True)]
    return {
        "samples": samples,
        "step_seconds": statistics.median(whole),
        "own_ms": [1e3 * value for value in (min(own), statistics.median(own), max(own))],
        "share": statistics.median(mine / each for mine, each in zip(own, whole, strict=True)),
    }


if __name__ == "__main__":
    main()
