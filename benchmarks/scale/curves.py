"""Throughput, latency and memory of the services against engines, trainer readers and groups, as curves.

    python benchmarks/scale/curves.py [--quick] [--json FILE] [--pictures DIR]
        [--engines 1 10 100 1000] [--readers 1 4 16 64] [--groups 1000 10000 100000 1000000]

engines   slime-rollout generates on stand-ins of set latency (one process, a port for each), `--per-engine` samples in
          flight on each, with groups from slime-buffer, and completes them there
readers   clients in `--reader-processes` processes read one sealed step of the samples made, at the same time
groups    a buffer that holds so many waiting groups: prompts are added, then `--cycle` groups go from lease to commit

Buffer and rollout service are processes of their own, as in a run, and are called over gRPC. The stand-ins compute
nothing, so a row shows what the services cost. Each row has the load average of the machine when it was measured, which
counts this benchmark's processes too. `--quick` takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from processes import DEADLINE, MeasuredProcess, started, wait_for
from slime.types import Sample
from slime.types.clients import BufferClient, RolloutClient
from slime.types.rpc import RpcSettings

HERE = Path(__file__).resolve().parent
SETTINGS = RpcSettings(call_timeout_seconds=DEADLINE)
QUICK = {
    "engines": [1, 8], "readers": [1, 4], "groups": [100, 1000], "latency": 0.2, "tokens": 16, "per_engine": 4,
    "samples": 4, "cycle": 20, "reader_processes": 2,
}  # fmt: skip
Row = dict[str, float]


def main() -> None:
    options = read_options()
    # So that a batch system's SIGTERM ends the children, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parts: dict[str, list[Row]] = {}
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="slime-scale-") as directory:
            parts["engines"], parts["readers"] = measure_engines(options, Path(directory))
            parts["groups"] = measure_groups(options, Path(directory))
    except KeyboardInterrupt:
        sys.exit(130)
    report = {
        "benchmark": "scale",
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "seconds": round(time.perf_counter() - began, 1),
        "hardware": f"{len(os.sched_getaffinity(0))} cores, {processor()}",
        "python": platform.python_version(),
        "settings": {key: value for key, value in vars(options).items() if key not in ("json", "pictures", "quick")},
        **parts,
    }
    print_tables(parts)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    if options.pictures:
        draw(parts, options.pictures)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--quick", action="store_true", help=f"Small sizes, in place of the defaults: {json.dumps(QUICK)}")
    add("--json", type=Path, metavar="FILE", help="JSON file to write")
    add("--pictures", type=Path, metavar="DIR", help="Directory for scale-engines.png and its like")
    whole: dict[str, Any] = {"type": positive, "metavar": "N"}
    add(
        "--engines", **whole, nargs="+", default=[1, 10, 100, 300, 1000], help="Engine stand-ins (default: %(default)s)"
    )
    add("--readers", **whole, nargs="+", default=[1, 4, 16, 64], help="Trainer readers (default: %(default)s)")
    add(
        "--groups", **whole, nargs="+", default=[1000, 10_000, 100_000, 1_000_000],
        help="Groups in the buffer (default: %(default)s)",
    )  # fmt: skip
    add("--latency", type=float, default=2.0, help="Seconds until an engine answers (default: %(default)s)")
    add("--tokens", **whole, default=256, help="Tokens of a response (default: %(default)s)")
    add("--samples", **whole, default=8, help="Samples of a group (default: %(default)s)")
    add("--per-engine", **whole, default=8, help="Samples in flight on an engine (default: %(default)s)")
    add("--rounds", **whole, default=2, help="Samples made, in multiples of those in flight (default: %(default)s)")
    add("--cycle", **whole, default=500, help="Groups from lease to commit at each size (default: %(default)s)")
    add("--reader-processes", **whole, default=8, help="Processes of the readers, at most (default: %(default)s)")
    parser.set_defaults(**({} if "--quick" not in sys.argv else QUICK))
    options = parser.parse_args()
    for name in ("engines", "readers", "groups"):
        setattr(options, name, sorted(set(getattr(options, name))))
    return options


def positive(word: str) -> int:
    if not word.isdecimal() or not int(word):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0, got {word}")
    return int(word)


def progress(words: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {words}", file=sys.stderr, flush=True)


def buffer_service(stack: ExitStack, directory: Path, *flags: str) -> MeasuredProcess:
    argv = ["-m", "slime.buffer.cli", "serve", "--buffer-dir", str(directory), "--release-committed", *flags]
    return stack.enter_context(started("slime-buffer", argv, serves=True))


def measure_engines(options: argparse.Namespace, directory: Path) -> tuple[list[Row], list[Row]]:
    """Returns the rows of engines, and those of readers of the last one's samples."""
    sys.path.insert(0, str(HERE.parent / "launcher"))
    from latent_run import write_inputs

    inputs, rows, readers = directory / "inputs", [], []
    inputs.mkdir()
    write_inputs(inputs, 1000)
    data = ["--prompt-data", str(inputs / "prompts.jsonl"), "--input-key", "prompt", "--label-key", "label"]
    data += ["--n-samples-per-prompt", str(options.samples)]
    for count in options.engines:
        with ExitStack() as stack:
            ports = directory / f"ports-{count}"
            words = ["--tokens", options.tokens, "--delay-ms", options.latency * 1000, "--engines", count]
            argv = [str(HERE.parent / "gpu" / "canned_engine.py"), str(ports), *map(str, words)]
            engines = stack.enter_context(started("engines", argv))
            wait_for(ports.exists, engines, "the process of the engines")
            buffer = buffer_service(stack, directory / f"buffer-{count}", *data)
            in_flight = count * options.per_engine
            groups = max(1, options.rounds * in_flight // options.samples)
            flags = ["--hf-checkpoint", str(inputs), "--rm-type", "random", "--buffer-address", buffer.address]
            flags += ["--n-samples-per-prompt", str(options.samples), "--rollout-batch-size", str(groups)]
            flags += ["--rollout-max-response-len", str(options.tokens)]
            flags += ["--sglang-server-concurrency", str(options.per_engine), "--rollout-external-engine-addrs"]
            flags += [f"127.0.0.1:{port}" for port in ports.read_text().split()]
            began = time.perf_counter()
            argv = ["-m", "slime.rollout.cli", "serve", *flags]
            rollout = stack.enter_context(started("slime-rollout", argv, serves=True))
            start_seconds = time.perf_counter() - began
            client = stack.enter_context(BufferClient(buffer.address, settings=SETTINGS))
            writer = client.open_run("scale")
            caller = stack.enter_context(RolloutClient(rollout.address, writer=writer, settings=SETTINGS))
            children = {"rollout": rollout, "buffer": buffer, "engines": engines}
            before = {name: child.cpu_seconds for name, child in children.items()}
            began = time.perf_counter()
            metrics = caller.generate(0, groups, timeout=DEADLINE).metrics
            seconds = time.perf_counter() - began
            samples = groups * options.samples
            # A group waits for all of its samples, so fewer than all in flight make one round of a group.
            least = options.latency * -(-samples // in_flight)
            row = {
                "engines": count, "groups": groups, "samples_per_s": samples / seconds, "ideal_per_s": samples / least,
                "seconds": seconds, "start_seconds": start_seconds, "load": os.getloadavg()[0],
            }  # fmt: skip
            for name, child in children.items():
                row[f"{name}_cpu_ms_per_sample"] = (child.cpu_seconds - before[name]) / samples * 1e3
                row[f"{name}_mib"] = child.resident_mib
            row |= {name: value for name, value in metrics.items() if "time" in name or "latency" in name}
            rows.append(row)
            progress(f"{count} engines: {row['samples_per_s']:.0f} of {row['ideal_per_s']:.0f} samples/s")
            if count == options.engines[-1]:
                began = time.perf_counter()
                total = len(client.seal_step(0, groups, wait_seconds=60))
                progress(f"sealed {total} samples in {time.perf_counter() - began:.2f} s")
                readers = [measure_readers(options, buffer, number, total) for number in options.readers]
    return rows, readers


def measure_readers(options: argparse.Namespace, buffer: MeasuredProcess, readers: int, samples: int) -> Row:
    """Reads the whole step once, each reader its part."""
    processes = min(readers, options.reader_processes)
    shares = [readers // processes + (number < readers % processes) for number in range(processes)]
    with ExitStack() as stack:
        children = []
        for number, share in enumerate(shares):
            words = [buffer.address, 0, sum(shares[:number]), share, readers, samples]
            argv = [str(HERE / "reader.py"), *map(str, words)]
            children.append(stack.enter_context(started("a reader", argv)).process)
        for child in children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                sys.exit("a reader did not start")
        cpu, began = buffer.cpu_seconds, time.perf_counter()
        for child in children:
            assert child.stdin is not None
            print(file=child.stdin, flush=True)
        lines = [child.stdout.readline() for child in children if child.stdout is not None]
        seconds = time.perf_counter() - began
        if not all(lines):
            sys.exit("a reader failed: its error is above")
        taken = sorted(value for line in lines for value in json.loads(line))
        row = {
            "readers": readers, "samples": samples, "samples_per_s": samples / seconds, "seconds": seconds,
            "reader_s_median": statistics.median(taken), "reader_s_longest": taken[-1],
            "buffer_cpu_ms_per_sample": (buffer.cpu_seconds - cpu) / samples * 1e3, "buffer_mib": buffer.resident_mib,
            "load": os.getloadavg()[0],
        }  # fmt: skip
        progress(f"{readers} readers: {row['samples_per_s']:.0f} samples/s")
        return row


def measure_groups(options: argparse.Namespace, directory: Path) -> list[Row]:
    rows: list[Row] = []
    with ExitStack() as stack:
        where, prompts = directory / "groups", ["--n-samples-per-prompt", str(options.samples)]
        opened = stack.enter_context(ExitStack())
        buffer = buffer_service(opened, where, *prompts)
        client = opened.enter_context(BufferClient(buffer.address, settings=SETTINGS))
        client.open_run("scale")
        held = added = 0
        for step, size in enumerate(options.groups):
            cpu, began, missing = buffer.cpu_seconds, time.perf_counter(), size - held
            while held < size:
                batch = min(10_000, size - held)
                client.add_prompts([f"What is {added + n} + 1?" for n in range(batch)], key=str(added))
                held, added = held + batch, added + batch
            add_seconds = time.perf_counter() - began
            row = {
                "groups": size, "adds_per_s": missing / add_seconds,
                "add_cpu_us": (buffer.cpu_seconds - cpu) / missing * 1e6,
            }  # fmt: skip
            row |= cycle(client, step, options)
            held -= min(options.cycle, size)
            row["stats_ms"] = milliseconds(client.stats)
            row["buffer_mib"] = buffer.resident_mib
            row["disk_mib"] = sum(file.stat().st_size for file in where.rglob("*") if file.is_file()) / 2**20
            opened.close()
            opened = stack.enter_context(ExitStack())
            began = time.perf_counter()
            buffer = buffer_service(opened, where, *prompts)
            client = opened.enter_context(BufferClient(buffer.address, settings=SETTINGS))
            client.get_run()
            row["restart_seconds"] = time.perf_counter() - began
            row["load"] = os.getloadavg()[0]
            rows.append(row)
            progress(f"{size} groups: {row['adds_per_s']:.0f} added/s, {row['cycles_per_s']:.0f} leased to committed/s")
    return rows


def cycle(client: BufferClient, step: int, options: argparse.Namespace) -> Row:
    """Leases, completes, seals, reads and commits `options.cycle` groups."""
    began = time.perf_counter()
    leases: list[Any] = []
    lease: list[float] = []
    complete: list[float] = []
    total = min(options.cycle, options.groups[0])
    while len(leases) < total:
        lease.append(milliseconds(lambda: leases.extend(client.lease_groups(min(32, total - len(leases))))))
    for leased in leases:
        samples = finish(leased.group.samples, options.tokens)
        complete.append(milliseconds(lambda: client.complete_group(leased.token, samples)))  # noqa: B023
    seal_ms = milliseconds(lambda: client.seal_step(step, total, wait_seconds=60))
    read_ms = milliseconds(lambda: list(client.read_step(step, range(total * options.samples))))
    client.acknowledge_step(step)
    commit_ms = milliseconds(lambda: client.commit_steps(step))
    return {
        "cycles_per_s": total / (time.perf_counter() - began), "lease_32_ms": statistics.median(lease),
        "complete_ms": statistics.median(complete), "complete_ms_p99": float(np.percentile(complete, 99)),
        "seal_ms": seal_ms, "read_ms": read_ms, "commit_ms": commit_ms,
    }  # fmt: skip


def finish(samples: list[Sample], tokens: int) -> list[Sample]:
    for sample in samples:
        random = np.random.default_rng(sample.index)
        sample.tokens = random.integers(0, 150_000, tokens + 16, dtype=np.int32)
        sample.response, sample.response_length = "The answer is 13. " * 10, tokens
        sample.loss_mask = np.ones(tokens, np.uint8)
        sample.rollout_log_probs = -random.exponential(size=tokens).astype(np.float32)
        sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
    return samples


def milliseconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def print_tables(parts: dict[str, list[Row]]) -> None:
    for rows in parts.values():
        names = list(rows[0])
        widths = [max(len(name), 9) for name in names]
        print("  ".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True)))
        for row in rows:
            cells = [f"{row[name]:.{0 if row[name] >= 100 else 3}f}" for name in names]
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
        print()


def draw(parts: dict[str, list[Row]], directory: Path) -> None:
    """Writes a picture for each part: throughput, times and resident memory against its size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "engines": [
            ("samples/s", ["samples_per_s", "ideal_per_s"]),
            ("CPU ms per sample", ["rollout_cpu_ms_per_sample", "buffer_cpu_ms_per_sample"]),
            ("MiB resident", ["rollout_mib", "buffer_mib"]),
        ],
        "readers": [
            ("samples/s", ["samples_per_s"]), ("seconds", ["reader_s_median", "reader_s_longest"]),
            ("MiB resident", ["buffer_mib"]),
        ],
        "groups": [
            ("groups/s", ["adds_per_s", "cycles_per_s"]),
            ("ms", ["lease_32_ms", "complete_ms", "seal_ms", "stats_ms"]), ("MiB", ["buffer_mib", "disk_mib"]),
        ],
    }  # fmt: skip
    directory.mkdir(parents=True, exist_ok=True)
    for part, rows in parts.items():
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
        for axis, (label, names) in zip(axes, panels[part], strict=True):
            for name in names:
                axis.plot([row[part] for row in rows], [row[name] for row in rows], marker="o", label=name)
            axis.set(xscale="log", yscale="log", xlabel=part, ylabel=label)
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8)
        figure.savefig(directory / f"scale-{part}.png", dpi=110)
        pyplot.close(figure)


if __name__ == "__main__":
    main()
