"""Runs for hours under random kills, or left alone, and records the memory of each process as a curve.

    python tests/slow/soak.py --hours 2 --output soak
    python tests/slow/soak.py --hours 0.13 --warm-up 90 --seconds-between 30
    python tests/slow/soak.py --hours 0.35 --left-alone

Writes OUTPUT/memory.csv (seconds, process, MiB), OUTPUT/memory.png and OUTPUT/report.md. The exit code is 1 where the
run ended, hung, or where the memory of a process grew by more than --most-growth per hour.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import sys
import threading
import time
from contextlib import suppress
from datetime import date
from pathlib import Path

import psutil

from random_faults import HANG_SECONDS, SIGNALS, VICTIMS, Run

SAMPLE_SECONDS = 5.0
# Fewer samples of a process than these say nothing.
LEAST_SAMPLES = 12
MEBIBYTE = 2**20
Point = tuple[float, float]


class Memory:
    """Samples the resident memory of the run's processes, in a thread. A process that was started again has a curve of
    its own: NAME, NAME/2, ..."""

    def __init__(self, run: Run) -> None:
        self.curves: dict[str, list[Point]] = {}
        self._run = run
        self._names: dict[psutil.Process, str] = {}
        self._began = time.monotonic()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLE_SECONDS):
            now = time.monotonic() - self._began
            each = {"launcher": psutil.Process(self._run.process.pid)} if not self._run.ended else {}
            each |= {name: process for name in VICTIMS if (process := self._run.process_of(name)) is not None}
            for name, process in each.items():
                with suppress(psutil.NoSuchProcess):
                    curve = self.curves.setdefault(self._curve_of(name, process), [])
                    curve.append((now, process.memory_info().rss / MEBIBYTE))

    def _curve_of(self, name: str, process: psutil.Process) -> str:
        if process not in self._names:
            before = sum(known.partition("/")[0] == name for known in self._names.values())
            self._names[process] = name if not before else f"{name}/{before + 1}"
        return self._names[process]


def growth(curve: list[Point], warm_up: float) -> float | None:
    """Returns the slope in MiB an hour, by least squares, after the warm-up; None for a life that is too short."""
    points = [(t, m) for t, m in curve if t - curve[0][0] >= warm_up]
    if len(points) < LEAST_SAMPLES:
        return None
    mean_t, mean_m = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((t - mean_t) ** 2 for t, _ in points)
    return 3600.0 * sum((t - mean_t) * (m - mean_m) for t, m in points) / spread


def write(output: Path, curves: dict[str, list[Point]], lines: list[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with (output / "memory.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["seconds", "process", "MiB"])
        table.writerows([f"{t:.0f}", name, f"{m:.1f}"] for name, curve in curves.items() for t, m in curve)
    figure, axes = plt.subplots(figsize=(9, 5), dpi=120)
    kinds = sorted({name.partition("/")[0] for name in curves})
    for name, curve in curves.items():
        kind = name.partition("/")[0]
        label = kind if name == kind else None
        times = [t / 3600.0 for t, _ in curve]
        axes.plot(times, [m for _, m in curve], color=f"C{kinds.index(kind)}", linewidth=1, label=label)
    axes.set(xlabel="hours", ylabel="resident memory, MiB", ylim=(0, None))
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(output / "memory.png")
    plt.close(figure)
    (output / "report.md").write_text("\n".join(lines) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--seconds-between", type=float, default=60.0, help="Mean time between two faults")
    parser.add_argument(
        "--warm-up", type=float, default=300.0, help="Seconds in which a process grows to what its work needs"
    )
    parser.add_argument("--most-growth", type=float, default=50.0, help="MiB an hour that a process may grow")
    parser.add_argument("--left-alone", action="store_true", help="Send no signals, so that all processes live long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("soak"))
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    choose = random.Random(options.seed)
    flags = (
        "--num-rollout", "1000000", "--service-max-restarts", "100000", "--rollout-engine-max-restarts", "100000",
        "--rollout-health-check-interval", "2", "--rollout-health-check-timeout", "5", "--log-samples", "0",
        "--save-interval", "50", "--save-keep", "1", "--overwrite",
    )  # fmt: skip
    run = Run(options.output / "run", flags)
    seconds: dict[str, list[float]] = {}
    problem = ""
    with run.going_on():
        began = time.monotonic()
        while run.steps < 1 and not run.ended and time.monotonic() - began < HANG_SECONDS:
            time.sleep(0.5)
        memory, began = Memory(run), time.monotonic()
        try:
            while time.monotonic() - began < 3600.0 * options.hours and not run.ended:
                if not options.left_alone:
                    time.sleep(choose.expovariate(1.0 / options.seconds_between))
                steps = run.steps
                if not options.left_alone and not strike(run, choose, seconds, began):
                    continue
                waits_since = time.monotonic()
                while run.steps == steps and not run.ended:
                    if time.monotonic() - waits_since > HANG_SECONDS:
                        raise TimeoutError(f"no step within {HANG_SECONDS:.0f} s")
                    time.sleep(0.2)
        except TimeoutError as error:
            problem = str(error)
        problem = problem or ("the run ended" if run.ended else "")
        lasted, steps = time.monotonic() - began, run.steps
        memory.stop()
        # Before the run is stopped, since hours of curves must not hang on how it ends.
        lines, grown = report(options, memory.curves, seconds, lasted, steps, problem)
        write(options.output, memory.curves, lines)
        print("\n".join(lines + run.lines[-10:] if problem else lines), flush=True)
        if not run.ended:
            # A shell that starts this in the background has it ignore SIGINT, and the run inherits that.
            run.process.terminate()
            run.process.wait(HANG_SECONDS)
    return 1 if problem or grown else 0


def strike(run: Run, choose: random.Random, seconds: dict[str, list[float]], began: float) -> bool:
    """Kills or stops a random process, and adds to `seconds` how long it was away; False where the run has ended."""
    victim, number = choose.choice(VICTIMS), choose.choice(SIGNALS)
    took = run.strike(victim, number)
    if took is None:
        return False
    print(f"{time.monotonic() - began:7.0f} s {number.name} {victim}: back after {took:.1f} s", flush=True)
    seconds.setdefault(victim, []).append(took)
    return True


def report(
    options: argparse.Namespace,
    curves: dict[str, list[Point]],
    seconds: dict[str, list[float]],
    lasted: float,
    steps: int,
    problem: str,
) -> tuple[list[str], dict[str, float]]:
    """Returns the lines of report.md, and the growth in MiB an hour of the processes that grew too much.

    seconds: those that each process took to be back; lasted: those of the whole soak.
    """
    slopes = {name: slope for name, curve in curves.items() if (slope := growth(curve, options.warm_up)) is not None}
    grown = {name: slope for name, slope in slopes.items() if slope > options.most_growth}
    how = "left alone" if options.left_alone else f"under random kills (seed {options.seed})"
    lines = [
        f"# {lasted / 3600:.2f} hours {how}",
        "",
        f"{steps} iterations, {sum(map(len, seconds.values()))} faults. {problem or 'The run went on to the end.'} "
        f"Load average at the end {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores, {date.today()}.",
        "",
        "| process | faults | median s | longest s |",
        "|---|---|---|---|",
        *(f"| {n} | {len(s)} | {sorted(s)[len(s) // 2]:.1f} | {max(s):.1f} |" for n, s in sorted(seconds.items())),
        "",
        "| process that lived long enough | minutes | MiB at the end | MiB an hour after its warm-up |",
        "|---|---|---|---|",
        *(
            f"| {name} | {(curve[-1][0] - curve[0][0]) / 60:.1f} | {curve[-1][1]:.0f} | {slopes[name]:+.1f} |"
            for name, curve in sorted(curves.items())
            if name in slopes
        ),
    ]
    return lines, grown


if __name__ == "__main__":
    sys.exit(main())
