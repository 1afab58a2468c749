"""Kills or stops random processes of CPU runs at random moments, and compares each run with one that was left alone.

    python tests/slow/random_faults.py --faults 100 --seed 0 --report faults.jsonl
    python tests/slow/random_faults.py --kind megatron --faults 8
    python tests/slow/random_faults.py --terminate --faults 4
    python tests/slow/random_faults.py --sum faults.jsonl

Prints a line for each fault, with the seconds until what it hit was back, and at the end how many runs had the weights
and the metrics of the undisturbed run, bit for bit; a fully asynchronous run has to end with all its iterations. The
exit code is 1 where one had not, did not end, or left something behind. With --terminate each fault is followed by
SIGTERM to the launcher while the process is started again, and the run has to end by that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from tiny_runs import (
    command,
    command_line,
    descendants,
    evaluations,
    gone,
    metrics,
    processes_with,
    quickstart,
    services,
    timeless,
    write_inputs,
)

VICTIMS = ("buffer", "rollout", "trainer-0", "engine")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
ENGINE = "slime.rollout.engines.embedded"
# Metrics that count the faults themselves.
COUNTS = ("rollout/engine_restarts",)
# Far beyond any recovery.
HANG_SECONDS = 300.0
# In the environment of a run's processes.
MARK = "SLIME_RANDOM_FAULTS"


@dataclass(frozen=True)
class Kind:
    """Runs of one kind. fully_async: trained by `slime train-async`, whose numbers depend on the times. external: with
    an engine that somebody else has started."""

    flags: tuple[str, ...] = ()
    victims: tuple[str, ...] = VICTIMS
    fully_async: bool = False
    external: bool = False


KINDS = {
    "plain": Kind(),
    "two-ranks": Kind(("--actor-num-gpus-per-node", "2"), (*VICTIMS, "trainer-1")),
    "megatron": Kind(("--train-backend", "megatron", "--tensor-model-parallel-size", "2"), (*VICTIMS, "trainer-1")),
    "fully-async": Kind(("--fully-async", "--use-tis"), fully_async=True),
    "external": Kind(("--rollout-engine", "auto", "--deterministic"), VICTIMS[:-1], external=True),
}


def started_engine(model: Path) -> EngineProcess:
    options = EmbeddedOptions(model_path=str(model), deterministic=True, device="cpu", threads=1)
    return start_embedded(options).wait_ready(HANG_SECONDS)


@dataclass
class Run:
    """A run of the tiny quickstart whose output is read as it comes."""

    directory: Path
    flags: tuple[str, ...]
    kind: Kind = KINDS["plain"]
    lines: list[str] = field(default_factory=list)
    engine: EngineProcess | None = None
    _steps: int = 0
    _read_bytes: int = 0

    def _start(self) -> subprocess.Popen[str]:
        # A temporary directory of its own shows what it leaves there.
        self.temporary = self.directory.with_name(f"{self.directory.name}-tmp")
        self.temporary.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {MARK: str(self.directory), "TMPDIR": str(self.temporary)}
        flags = (*self.kind.flags, *self.flags)
        if not (self.kind.fully_async or self.kind.external):
            return quickstart(self.directory, *flags, env=environment)
        inputs = self.directory.with_name(f"{self.directory.name}-inputs")
        inputs.mkdir(parents=True, exist_ok=True)
        write_inputs(inputs)
        if self.kind.external:
            self.engine = started_engine(inputs / "model")
            flags += ("--rollout-external-engine-addrs", urlsplit(self.engine.url).netloc)
        name = "train-async" if self.kind.fully_async else "train"
        return command(name, inputs, self.directory, *flags, env=environment)

    @contextmanager
    def going_on(self) -> Iterator[Run]:
        self.process = self._start()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.terminate()
            self.process.wait(HANG_SECONDS)
            self._reader.join(HANG_SECONDS)
            if self.engine is not None:
                self.engine.stop()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    @property
    def steps(self) -> int:
        with suppress(FileNotFoundError), (self.directory / "metrics.jsonl").open("rb") as file:
            file.seek(self._read_bytes)
            whole = file.read().rpartition(b"\n")
            self._steps += whole[0].count(b'"perf/step_time"')
            self._read_bytes += len(whole[0]) + len(whole[1])
        return self._steps

    def family(self) -> list[psutil.Process]:
        """Returns its processes, whoever their parents are now."""
        return [process for process in processes_with({MARK: str(self.directory)}) if not gone([process])]

    def left_behind(self, ray_directories: set[str]) -> list[str]:
        """Names what outlives the run by a minute."""
        deadline = time.monotonic() + 60.0
        while True:
            found = [f"process {command_line(process)[:120]}" for process in self.family()]
            found += [str(path) for path in self.temporary.glob("slime-*")]
            found += [path for path in ray_directories if os.path.exists(path)]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def ray_directories(self) -> set[str]:
        """Returns the directories of Ray that its processes name."""
        return {path for each in self.family() for path in re.findall(r"/tmp/slime-ray-\w+", command_line(each))}

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
                found = services(each, self.directory.resolve() / "logs" / f"{victim}.log")
            return found[0] if found else None
        return None

    def send(self, victim: str, number: signal.Signals) -> bool:
        """Sends the signal; returns False where there is no such process any more."""
        process = self.process_of(victim)
        if process is None or self.ended:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
        return True

    def strike(self, victim: str, number: signal.Signals) -> float | None:
        """Sends the signal; returns the seconds until the victim is back, None where the run ended before."""
        before, began = self.repairs(victim), time.monotonic()
        if not self.send(victim, number):
            return None
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


@dataclass(frozen=True)
class Fault:
    victim: str
    number: str
    seconds: float


def faults_in(run: Run, count: int, choose: random.Random, num_rollout: int) -> Iterator[tuple[str, signal.Signals]]:
    """Yields victims and signals at the moments at which the signals are to be sent."""
    for moment in sorted(choose.uniform(0.2, num_rollout - 0.5) for _ in range(count)):
        victim, number = choose.choice(run.kind.victims), choose.choice(SIGNALS)
        while run.steps < int(moment) and not run.ended:
            time.sleep(0.02)
        # Somewhere in the step.
        time.sleep(choose.random() * 0.3)
        yield victim, number


def disturbed(run: Run, count: int, choose: random.Random, num_rollout: int) -> list[Fault]:
    """Goes through one run with faults; prints each, and returns them."""
    faults: list[Fault] = []
    for victim, number in faults_in(run, count, choose, num_rollout):
        took = run.strike(victim, number)
        if took is None:
            print(f"  {number.name:8} {victim:10} not sent: the run is over", flush=True)
            continue
        print(f"  {number.name:8} {victim:10} before step {run.steps + 1:3}: back after {took:5.1f} s", flush=True)
        faults.append(Fault(victim, number.name, took))
    wait_for_end(run)
    return faults


def terminated(run: Run, choose: random.Random, num_rollout: int) -> list[Fault]:
    """Ends one run by SIGTERM while a process is started again; the seconds are those until the run has ended."""
    for victim, number in faults_in(run, 1, choose, num_rollout):
        if not run.send(victim, number):
            return []
        # Found within half a second, and started again in seconds.
        time.sleep(choose.uniform(0.0, 5.0))
        began = time.monotonic()
        run.process.send_signal(signal.SIGTERM)
        wait_for_end(run)
        took = time.monotonic() - began
        print(f"  {number.name:8} {victim:10} and SIGTERM to the launcher: ended after {took:5.1f} s", flush=True)
        return [Fault(victim, f"{number.name}, SIGTERM", took)]
    return []


def wait_for_end(run: Run) -> None:
    began = time.monotonic()
    while not run.ended:
        if time.monotonic() - began > HANG_SECONDS:
            raise TimeoutError(f"the run does not end: {run.lines[-5:]}")
        time.sleep(0.1)


def problems(run: Run, alone: Path | None, num_rollout: int, terminates: bool, ray_directories: set[str]) -> list[str]:
    """Names what is wrong with a run that has ended."""
    code = run.process.returncode
    found = [f"left behind: {each}" for each in run.left_behind(ray_directories)]
    if code != (128 + signal.SIGTERM if terminates else 0):
        return [*found, f"the exit code {code}"]
    if terminates:
        return found
    if alone is not None:
        return found + same(run.directory, alone)
    return found if run.steps == num_rollout else [*found, f"{run.steps} iterations"]


def summary(records: list[Mapping[str, Any]]) -> list[str]:
    """Returns a table of the runs in a report, by their kind and by what was hit."""
    groups: dict[tuple[str, str], list[float]] = {}
    for record in records:
        for fault in record["faults"]:
            groups.setdefault((record["kind"], fault["victim"].partition("-")[0]), []).append(fault["seconds"])
    lines = ["| runs | process | faults | median s | longest s |", "|---|---|---|---|---|"]
    for (kind, victim), seconds in sorted(groups.items()):
        lines.append(f"| {kind} | {victim} | {len(seconds)} | {median(seconds):.1f} | {max(seconds):.1f} |")
    for kind in sorted({record["kind"] for record in records}):
        of_kind = [record for record in records if record["kind"] == kind]
        seconds = [fault["seconds"] for record in of_kind for fault in record["faults"]] or [0.0]
        wrong = [record for record in of_kind if record["problems"]]
        loads = sorted(record["load"] for record in of_kind)
        lines.append(
            f"{kind}: {len(seconds)} faults in {len(of_kind)} runs, {len(of_kind) - len(wrong)} as they should be, "
            f"{len(wrong)} not; median {median(seconds):.1f} s, longest {max(seconds):.1f} s; load average "
            f"{loads[0]:.1f} to {loads[-1]:.1f} on {os.cpu_count()} cores, until {of_kind[-1]['date']}"
        )
    return lines


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="Number of processes to kill or stop")
    parser.add_argument("--faults-per-run", type=int, default=4, help="Faults in one run")
    parser.add_argument("--num-rollout", type=int, default=12, help="Iterations of a run")
    parser.add_argument("--kind", choices=KINDS, default="plain", help="Runs to disturb")
    parser.add_argument("--terminate", action="store_true", help="End each run by SIGTERM after one fault")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no run after so many seconds")
    parser.add_argument("--seed", type=int, default=0, help="Seed of moments, processes and signals")
    parser.add_argument("--directory", type=Path, help="Directory that keeps the runs (default: a temporary directory)")
    parser.add_argument("--report", type=Path, help="File to which a line of JSON is appended for each run")
    parser.add_argument("--sum", type=Path, metavar="REPORT", help="Print the sums of a report, and run nothing")
    return parser.parse_args()


def main() -> int:
    began, options = time.monotonic(), parse()
    if options.sum is not None:
        print("\n".join(summary([json.loads(line) for line in options.sum.read_text().splitlines()])))
        return 0
    choose, kind = random.Random(options.seed), KINDS[options.kind]
    many = str(10 * options.faults_per_run)
    # The run that is to end by the signal must not end before.
    iterations = 100000 if options.terminate else options.num_rollout
    flags = (
        "--num-rollout", str(iterations), "--service-max-restarts", many,
        "--rollout-engine-max-restarts", many, "--restart-point-interval", "1", "--rollout-health-check-interval", "1",
        "--rollout-health-check-timeout", "2",
    )  # fmt: skip
    records: list[Mapping[str, Any]] = []
    # A signal to this script ends its run, too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="slime-faults-") as temporary:
        directory = options.directory or Path(temporary)
        alone = None if options.terminate or kind.fully_async else undisturbed(directory, flags, kind)
        count = 0
        while count < options.faults and time.monotonic() - began < options.seconds:
            run = Run(directory / f"run-{len(records)}", flags, kind)
            print(f"run {len(records) + 1}", flush=True)
            with run.going_on():
                while not run.steps and not run.ended:
                    time.sleep(0.02)
                ray_directories = run.ray_directories()
                if options.terminate:
                    faults = terminated(run, choose, options.num_rollout)
                else:
                    wanted = min(options.faults_per_run, options.faults - count)
                    faults = disturbed(run, wanted, choose, options.num_rollout)
            wrong = problems(run, alone, options.num_rollout, options.terminate, ray_directories)
            if wrong:
                print(f"  WRONG: {', '.join(wrong)}\n" + "\n".join(f"    | {line}" for line in run.lines[-20:]))
            count += max(1, len(faults))
            name = f"{options.kind}, SIGTERM" if options.terminate else options.kind
            records.append({
                "date": f"{date.today()}", "kind": name, "seed": options.seed, "load": os.getloadavg()[1],
                "faults": [vars(fault) for fault in faults], "problems": wrong,
            })  # fmt: skip
            if options.report is not None:
                with options.report.open("a") as file:
                    file.write(json.dumps(records[-1]) + "\n")
    print("\n".join(summary(records)))
    return 1 if any(record["problems"] for record in records) else 0


def undisturbed(directory: Path, flags: tuple[str, ...], kind: Kind) -> Path:
    alone = Run(directory / "alone", flags, kind)
    with alone.going_on():
        alone.process.wait()
    if alone.process.returncode:
        sys.exit("\n".join([*alone.lines, "the undisturbed run failed"]))
    return alone.directory


if __name__ == "__main__":
    sys.exit(main())
