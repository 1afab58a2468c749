"""Kills or stops random processes of CPU runs at random moments, and compares each run with one that was left alone.

    python tests/slow/random_faults.py --faults 100 --seed 0

Prints a line for each fault, with the seconds until what it hit was back, and at the end how many runs had the weights
and the metrics of the undisturbed run, bit for bit. The exit code is 1 where one had not, or did not end.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from tiny_runs import (
    command_line,
    descendants,
    evaluations,
    gone,
    metrics,
    quickstart,
    services,
    timeless,
)

VICTIMS = ("buffer", "rollout", "trainer-0", "engine")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
ENGINE = "slime.rollout.engines.embedded"
# Metrics that count the faults themselves.
COUNTS = ("rollout/engine_restarts",)
# Far beyond any recovery.
HANG_SECONDS = 300.0


@dataclass
class Run:
    """A run of the tiny quickstart whose output is read as it comes."""

    directory: Path
    flags: tuple[str, ...]
    lines: list[str] = field(default_factory=list)

    @contextmanager
    def going_on(self) -> Iterator[Run]:
        self.process = quickstart(self.directory, *self.flags)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait(HANG_SECONDS)
            self._reader.join(HANG_SECONDS)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def steps(self) -> int:
        path = self.directory / "metrics.jsonl"
        return path.read_text().count('"perf/step_time"') if path.exists() else 0

    def repairs(self, victim: str) -> int:
        """Counts how often the victim came back so far."""
        if victim != "engine":
            return sum(" back after " in line for line in list(self.lines))
        log = self.directory / "logs" / "rollout.log"
        return log.read_text(errors="replace").count(" was started again in ") if log.exists() else 0

    def process_of(self, victim: str) -> psutil.Process | None:
        with suppress(psutil.NoSuchProcess):
            each = descendants(self.process)
            if victim == "engine":
                found = [process for process in each if ENGINE in command_line(process)]
            else:
                found = services(each, self.directory / "logs" / f"{victim}.log")
            return found[0] if found else None
        return None

    def strike(self, victim: str, number: signal.Signals) -> float | None:
        """Sends the signal; returns the seconds until the victim is back, None where the run ended before."""
        process, before = self.process_of(victim), self.repairs(victim)
        if process is None or self.ended:
            return None
        began = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        while self.repairs(victim) == before:
            if self.ended:
                return None
            if time.monotonic() - began > HANG_SECONDS:
                raise TimeoutError(f"{victim} is not back {HANG_SECONDS:.0f} s after {number.name}")
            time.sleep(0.02)
        return time.monotonic() - began


def plain(rows: list[dict]) -> list[dict]:
    return [{key: value for key, value in row.items() if key not in COUNTS} for row in timeless(rows)]


def same(run: Path, alone: Path) -> list[str]:
    """Names what differs."""
    differ = []
    if plain(metrics(run)) != plain(metrics(alone)):
        differ.append("metrics")
    if plain(evaluations(run)) != plain(evaluations(alone)):
        differ.append("evaluations")
    weights = "model/model.safetensors"
    if not (run / weights).exists() or (run / weights).read_bytes() != (alone / weights).read_bytes():
        differ.append("weights")
    return differ


def disturbed(run: Run, faults: int, choose: random.Random, num_rollout: int) -> list[float]:
    """Goes through one run with faults; prints each, and returns the seconds of recovery."""
    seconds: list[float] = []
    with run.going_on():
        moments = sorted(choose.uniform(0.2, num_rollout - 0.5) for _ in range(faults))
        for moment in moments:
            victim, number = choose.choice(VICTIMS), choose.choice(SIGNALS)
            while run.steps < int(moment) and not run.ended:
                time.sleep(0.01)
            # Somewhere in the step.
            time.sleep(choose.random() * 0.3)
            took = run.strike(victim, number)
            if took is None:
                print(f"  {number.name:8} {victim:10} not sent: the run is over", flush=True)
                continue
            print(f"  {number.name:8} {victim:10} in step {int(moment):3}: back after {took:5.1f} s", flush=True)
            seconds.append(took)
        family = descendants(run.process) if not run.ended else []
        began = time.monotonic()
        while not run.ended:
            if time.monotonic() - began > HANG_SECONDS:
                raise TimeoutError(f"the run does not end: {run.lines[-5:]}")
            time.sleep(0.1)
    began = time.monotonic()
    while not gone(family) and time.monotonic() - began < 60:
        time.sleep(0.1)
    assert gone(family), [process for process in family if process.is_running()]
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="Number of processes to kill or stop")
    parser.add_argument("--faults-per-run", type=int, default=4, help="Faults in one run")
    parser.add_argument("--num-rollout", type=int, default=12, help="Iterations of a run")
    parser.add_argument("--seed", type=int, default=0, help="Seed of moments, processes and signals")
    parser.add_argument("--directory", type=Path, help="Directory that keeps the runs (default: a temporary directory)")
    options = parser.parse_args()
    choose = random.Random(options.seed)
    many = str(10 * options.faults_per_run)
    flags = (
        "--num-rollout", str(options.num_rollout), "--service-max-restarts", many,
        "--rollout-engine-max-restarts", many, "--restart-point-interval", "1", "--rollout-health-check-interval", "1",
        "--rollout-health-check-timeout", "2",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="slime-faults-") as temporary:
        directory = options.directory or Path(temporary)
        alone = Run(directory / "alone", flags)
        with alone.going_on():
            alone.process.wait()
        if alone.process.returncode:
            print("\n".join(alone.lines), "\nthe undisturbed run failed", sep="")
            return 1
        seconds: list[float] = []
        runs = wrong = 0
        while len(seconds) < options.faults and wrong < 10:
            run = Run(directory / f"run-{runs}", flags)
            runs += 1
            print(f"run {runs}", flush=True)
            count = min(options.faults_per_run, options.faults - len(seconds))
            seconds += disturbed(run, count, choose, options.num_rollout)
            differ = same(run.directory, alone.directory) if run.process.returncode == 0 else ["the exit code"]
            if differ:
                wrong += 1
                print(f"  DIFFERS: {', '.join(differ)}\n" + "\n".join(f"    | {line}" for line in run.lines[-20:]))
        ordered = sorted(seconds) or [0.0]
        print(
            f"{len(seconds)} faults in {runs} runs (seed {options.seed}): {runs - wrong} runs equal to the undisturbed "
            f"one, {wrong} not; recovery median {ordered[len(ordered) // 2]:.1f} s, longest {ordered[-1]:.1f} s"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
