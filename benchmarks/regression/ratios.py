"""The table of CPU benchmarks of this machine, beside the committed baseline of its kind.

    benchmarks/run                        # under ten minutes; exit code 1 on a regression
    benchmarks/run --only codec
    benchmarks/run --baseline update      # on a quiet machine: writes baselines/KIND.json, to be committed

Each benchmark measures slime and a peer in one run, so their ratio can be compared between machines of one kind, which
cores and vector instructions make. A speed ratio may fall by 15 %, a memory ratio grow by 5 %. The host factor says how
fast this machine is against that of the baseline, by the eager transformers model of the engine's benchmark; nothing is
judged by it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
BASELINES = Path(__file__).resolve().parent / "baselines"
SPEED, MEMORY = "speed", "memory"
# The share by which a ratio may become worse.
TOLERANCE = {SPEED: 0.15, MEMORY: 0.05}
HOST = "transformers, tokens/s"
# So that all of them end within ten minutes.
SECONDS = 150.0
# Vector instructions by which kinds of machines differ, the fastest first.
VECTORS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "asimd")

# Ratios by name: (speed or memory, value).
Ratios = dict[str, tuple[str, float]]


class BenchmarkFailed(Exception):
    """A benchmark printed no result."""


@dataclass(frozen=True)
class Benchmark:
    """A program of this directory. {json} in its arguments is a file for its result, which is otherwise printed.

    read: returns its ratios, and numbers of the host.
    """

    program: str
    arguments: Sequence[str]
    read: Callable[[Any], tuple[Ratios, dict[str, float]]]


def read_codec(result: Any) -> tuple[Ratios, dict[str, float]]:
    return {
        "codec / pickled numpy": (SPEED, result["ratio_vs_pickle_numpy"]),
        "codec / pickled lists": (SPEED, result["ratio_vs_pickle_lists"]),
    }, {}


def read_conversion(result: Any) -> tuple[Ratios, dict[str, float]]:
    ratios: Ratios = {}
    for row in result["conversions"]:
        if row["workers"] == 1:
            ratios[f"{row['name']} / copying"] = SPEED, row["of_copying"]
            ratios[f"{row['name']} / layer and file"] = MEMORY, row["memory"]
    return ratios, {}


def read_transport(result: Any) -> tuple[Ratios, dict[str, float]]:
    return {"buffer by gRPC / Ray's object store": (SPEED, 1 / result["one reader ratio"])}, {}


def read_buffer(result: Any) -> tuple[Ratios, dict[str, float]]:
    (found,) = result["tokens"].values()
    name = "buffer, process / Ray, lists"
    return {name: (SPEED, found["ratios"][name])}, {}


def read_engine(result: Any) -> tuple[Ratios, dict[str, float]]:
    speeds = {
        name: statistics.median(each["per_second"] for each in rounds) for name, rounds in result["rounds"].items()
    }
    engine = next(speed for name, speed in speeds.items() if name.startswith("embedded"))
    eager = next(speed for name, speed in speeds.items() if name.startswith("transformers"))
    return {"embedded engine / transformers": (SPEED, engine / eager)}, {HOST: eager}


TABLE = {
    "codec": Benchmark("types/codec.py", ["--json"], read_codec),
    "conversion": Benchmark("converters/conversion.py", ["--json", "--gib", "0.5", "--repeats", "5"], read_conversion),
    "transport": Benchmark("launcher/data_transport.py", ["--json", "--samples", "64"], read_transport),
    "buffer": Benchmark(
        "buffer/peers.py", ["--json", "--groups", "256", "--repeats", "3", "--tokens", "1024"], read_buffer
    ),
    "engine": Benchmark(
        "rollout/engine.py",
        ["--json", "{json}", "--samples", "64", "--new-tokens", "32", "--repeats", "2", "--dtypes", "bfloat16",
         "--peers", "bfloat16"],
        read_engine,
    ),
}  # fmt: skip


def run(benchmark: Benchmark, seconds: float = SECONDS) -> Any:
    """Returns the result of a benchmark. Raises BenchmarkFailed where it prints none within `seconds`."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "result.json"
        arguments = [argument.replace("{json}", str(file)) for argument in benchmark.arguments]
        command = [sys.executable, str(BENCHMARKS / benchmark.program), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise BenchmarkFailed(f"{benchmark.program} took more than {seconds:g} s") from None
        # Some programs judge their own numbers too and end with 1, after their result.
        try:
            return json.loads(file.read_text() if file.exists() else done.stdout)
        except ValueError:
            tail = "\n".join((done.stderr or done.stdout).splitlines()[-10:])
            raise BenchmarkFailed(f"{benchmark.program} ended with {done.returncode}\n{tail}") from None


def measure(names: Sequence[str], *, run: Callable[[Benchmark], Any] = run) -> dict[str, Any]:
    """Returns {"date", "host", "ratios"} of these benchmarks."""
    ratios: Ratios = {}
    host: dict[str, float] = {}
    for name in names:
        print(f"{name} ...", file=sys.stderr, flush=True)
        found, about_host = TABLE[name].read(run(TABLE[name]))
        ratios |= found
        host |= about_host
    kinds = {name: {"kind": kind, "value": round(value, 4)} for name, (kind, value) in ratios.items()}
    return {"date": str(date.today()), "host": host, "ratios": kinds}


def device_kind() -> str:
    """Returns the kind of this machine, as its baseline is named: cpu-2-avx512_bf16."""
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        words = set()
    vectors = next((name for name in VECTORS if name in words), platform.machine())
    return f"cpu-{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()}-{vectors}"


def change_of(kind: str, value: float, before: float) -> float:
    """Returns by which share a ratio has become better (positive) or worse."""
    return value / before - 1 if kind == SPEED else 1 - value / before


def compare(now: dict[str, Any], baseline: dict[str, Any] | None) -> tuple[str, list[str]]:
    """Returns the table of ratios, and those that are worse than the baseline allows."""
    lines, regressions = ["| | now | baseline | change |", "|---|---|---|---|"], []
    before = {} if baseline is None else baseline["ratios"]
    for name, found in now["ratios"].items():
        if name not in before:
            lines.append(f"| {name} | {found['value']:.2f} | - | |")
            continue
        change = change_of(found["kind"], found["value"], before[name]["value"])
        worse = change < -TOLERANCE[found["kind"]]
        if worse:
            regressions.append(
                f"{name}: {found['value']:.2f}, {-change:.0%} worse than {before[name]['value']:.2f}; allowed are "
                f"{TOLERANCE[found['kind']]:.0%}"
            )
        lines.append(
            f"| {name} | {found['value']:.2f} | {before[name]['value']:.2f} | {change:+.0%}"
            f"{' WORSE' if worse else ''} |"
        )
    if baseline is not None and HOST in now["host"] and HOST in baseline["host"]:
        factor = now["host"][HOST] / baseline["host"][HOST]
        lines.append(f"\nhost factor {factor:.2f}: eager {HOST}, against the baseline's of {baseline['date']}")
    return "\n".join(lines), regressions


def main(
    argv: Sequence[str] | None = None, *, run: Callable[[Benchmark], Any] = run, baselines: Path = BASELINES
) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", choices=tuple(TABLE), default=list(TABLE), help="Benchmarks to run (default: all)"
    )
    parser.add_argument("--baseline", choices=("compare", "update"), default="compare", help="Action on the baseline")
    parser.add_argument("--json", type=Path, metavar="FILE", help="File to write the result to as well")
    options = parser.parse_args(argv)
    path = baselines / f"{device_kind()}.json"
    baseline = json.loads(path.read_text()) if path.exists() else None
    try:
        now = measure(options.only, run=run)
    except BenchmarkFailed as error:
        print(f"benchmarks/run: error: {error}", file=sys.stderr)
        return 2
    table, regressions = compare(now, baseline)
    print(f"{device_kind()}\n\n{table}")
    if options.json:
        options.json.write_text(json.dumps(now, indent=2) + "\n")
    if options.baseline == "update":
        if baseline is not None:
            # Benchmarks that were left out keep what they had.
            now["ratios"], now["host"] = baseline["ratios"] | now["ratios"], baseline["host"] | now["host"]
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n")
        print(f"\nwritten: {path}")
        return 0
    if baseline is None:
        print(f"\nno baseline for this kind of machine; --baseline update writes {path}")
    for regression in regressions:
        print(f"benchmarks/run: regression: {regression}", file=sys.stderr)
    return int(bool(regressions))


if __name__ == "__main__":
    sys.exit(main())
