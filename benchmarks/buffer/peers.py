"""Samples a second from client to client: the buffer beside Ray's object store and bare SQLite.

    python benchmarks/buffer/peers.py [--json] [--groups 256] [--samples 8] [--tokens 1024 4096] [--producers 2]
        [--batch 16] [--repeats 5]

`--producers` processes each hand over groups of `--samples` samples, and one process takes all of them, as arrays or
lists of its own. Every process is an actor of one Ray cluster on this machine, whatever way the samples go:

    buffer, process   lease and complete `--batch` groups; then seal, read, acknowledge and commit steps of 32 groups
    buffer, power     the same with --buffer-durability power: every completion waits for the disk
    Ray, lists        ray.put of a group whose fields are lists of numbers, then ray.get
    Ray, numpy        the same with numpy arrays
    SQLite, NORMAL    a transaction for `--batch` groups, encoded by our codec, with synchronous = NORMAL, then SELECT
    SQLite, FULL      the same with synchronous = FULL: every transaction waits for the disk

Ray's ways lose every sample with the process that put it; SQLite has no leases, checks and steps. The ways take turns.
A ratio is that of the buffer's throughput to a peer's in the same repeat, a buffer that waits for the disk beside a
SQLite that does, and the table shows medians.
"""

from __future__ import annotations

import argparse
import json
import sqlite3
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.codec import decode_sample, encode_sample
from slime.types.rpc import RpcSettings

BUFFERS, SQLITE = ("buffer, process", "buffer, power"), ("SQLite, NORMAL", "SQLite, FULL")
WAYS = (*BUFFERS, "Ray, lists", "Ray, numpy", *SQLITE)
PAIRS = (
    ("buffer, process", "Ray, lists"), ("buffer, process", "Ray, numpy"), ("buffer, process", "SQLite, NORMAL"),
    ("buffer, power", "SQLite, FULL"),
)  # fmt: skip
GROUPS_OF_STEP = 32
SECONDS = 300.0


def fields(index: int, tokens: int) -> dict[str, Any]:
    random = np.random.default_rng(index)
    return {
        "tokens": random.integers(0, 150_000, tokens, dtype=np.int32),
        "response": "The answer is 13. " * 10,
        "response_length": tokens - 1,
        "loss_mask": np.ones(tokens - 1, np.uint8),
        "rollout_log_probs": -random.exponential(size=tokens - 1).astype(np.float32),
        "reward": 1.0,
    }


def as_lists(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


class ClientProcess:
    """A producer or the consumer. places: address of each buffer, file of each SQLite database."""

    def __init__(self, places: dict[str, str], samples: int, tokens: int) -> None:
        self.places = places
        self.group = [fields(index, tokens) for index in range(samples)]
        self.lists = [as_lists(sample) for sample in self.group]
        self.clients: dict[str, BufferClient] = {}
        self.databases: dict[str, sqlite3.Connection] = {}

    def client(self, way: str) -> BufferClient:
        if way not in self.clients:
            self.clients[way] = BufferClient(self.places[way], settings=RpcSettings(call_timeout_seconds=SECONDS))
            self.clients[way].get_run()
        return self.clients[way]

    def database(self, way: str) -> sqlite3.Connection:
        if way not in self.databases:
            self.databases[way] = sqlite3.connect(self.places[way], isolation_level=None, timeout=SECONDS)
            self.databases[way].execute(f"PRAGMA synchronous = {way.split()[-1]}")
        return self.databases[way]

    def produce(self, way: str, groups: int, batch: int, consumer: Any) -> None:
        taken = []
        while groups:
            batch = min(batch, groups)
            if way in BUFFERS:
                batch = self.complete(self.client(way), batch)
            elif way.startswith("Ray"):
                group = self.lists if way.endswith("lists") else self.group
                # In a list, so that the consumer and not Ray gets what the reference names.
                taken += [consumer.take.remote([ray.put(group)]) for _ in range(batch)]
            else:
                connection = self.database(way)
                connection.execute("BEGIN IMMEDIATE")
                for _ in range(batch):
                    encoded = [(encode_sample(Sample(prompt="1 + 12", **values)),) for values in self.group]
                    connection.executemany("INSERT INTO samples (sample) VALUES (?)", encoded)
                connection.execute("COMMIT")
            groups -= batch
        ray.get(taken, timeout=SECONDS)

    def complete(self, client: BufferClient, batch: int) -> int:
        """Leases up to `batch` groups and completes them; returns their number."""
        leases = client.lease_groups(batch, wait_seconds=60)
        for lease in leases:
            for sample, values in zip(lease.group.samples, self.group, strict=True):
                sample.__dict__.update(values, status=Sample.Status.COMPLETED)
        client.complete_groups([(lease.token, lease.group.samples) for lease in leases])
        return len(leases)

    def take(self, references: list[Any]) -> None:
        (group,) = ray.get(references)
        assert len(group) == len(self.group)

    def consume(self, way: str, first_step: int, groups: int) -> None:
        if way in BUFFERS:
            client = self.client(way)
            for step in range(first_step, first_step + groups // GROUPS_OF_STEP):
                sealed = client.seal_step(step, GROUPS_OF_STEP, wait_seconds=SECONDS)
                samples = list(client.read_step(step, range(len(sealed))))
                assert len(samples) == GROUPS_OF_STEP * len(self.group)
                client.acknowledge_step(step)
                client.commit_steps(step)
        elif way in SQLITE:
            connection, left = self.database(way), groups * len(self.group)
            deadline = time.monotonic() + SECONDS
            while left:
                rows = connection.execute("SELECT id, sample FROM samples ORDER BY id").fetchall()
                samples = [decode_sample(encoded) for _, encoded in rows]
                if rows:
                    connection.execute("DELETE FROM samples WHERE id <= ?", (rows[-1][0],))
                elif time.monotonic() > deadline:
                    raise TimeoutError(f"{way}: {left} samples did not come")
                else:
                    time.sleep(0.001)
                left -= len(samples)


def make_database(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, sample BLOB NOT NULL)")


def measure(options: argparse.Namespace, tokens: int, directory: Path) -> dict[str, list[float]]:
    """Returns samples a second of each way, by repeat."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from stores import buffer

    per_second: dict[str, list[float]] = {way: [] for way in WAYS}
    steps = options.groups // GROUPS_OF_STEP
    with ExitStack() as stack:
        places, opened = {}, {}
        for way in BUFFERS:
            durability = way.split()[-1]
            place = str(directory / f"{durability}-{tokens}")
            client = stack.enter_context(buffer(["--buffer-dir", place], options.samples, durability))
            places[way], opened[way] = client.address, client
        for way in SQLITE:
            places[way] = str(directory / f"{way.split()[-1]}-{tokens}.sqlite")
            make_database(places[way])
        make = ray.remote(num_cpus=0)(ClientProcess).remote
        consumer, *producers = [make(places, options.samples, tokens) for _ in range(options.producers + 1)]
        shares = [options.groups // options.producers] * options.producers
        shares[0] += options.groups % options.producers
        # The first repeat opens connections and files.
        for repeat in range(options.repeats + 1):
            for way, speeds in per_second.items():
                if way in opened:
                    opened[way].add_prompts([f"{repeat}-{number}" for number in range(options.groups)])
                started = time.perf_counter()
                calls = [consumer.consume.remote(way, repeat * steps, options.groups)]
                calls += [
                    each.produce.remote(way, n, options.batch, consumer)
                    for each, n in zip(producers, shares, strict=True)
                ]
                ray.get(calls, timeout=2 * SECONDS)
                if repeat:
                    speeds.append(options.groups * options.samples / (time.perf_counter() - started))
        for actor in (consumer, *producers):
            ray.kill(actor)
    return per_second


def ratios(per_second: dict[str, list[float]]) -> dict[str, float]:
    return {
        f"{way} / {peer}": statistics.median(
            a / b for a, b in zip(per_second[way], per_second[peer], strict=True)
        )
        for way, peer in PAIRS
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--groups", type=int, default=256, help="Groups of a repeat, steps of 32 (default: 256)")
    parser.add_argument("--samples", type=int, default=8, help="Samples of a group (default: 8)")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096], help="Of a sample (default: 1024 4096)")
    parser.add_argument("--producers", type=int, default=2, help="Processes that hand over groups (default: 2)")
    parser.add_argument("--batch", type=int, default=16, help="Groups that a producer has at once (default: 16)")
    parser.add_argument("--repeats", type=int, default=5, help="Repeats of each way (default: 5)")
    options = parser.parse_args()
    if options.groups < GROUPS_OF_STEP or options.groups % GROUPS_OF_STEP:
        parser.error(f"--groups must be a multiple of {GROUPS_OF_STEP} (got: {options.groups})")

    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="slime-") as directory:
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            for tokens in options.tokens:
                per_second = measure(options, tokens, Path(directory))
                report[str(tokens)] = {
                    "samples_per_s": {way: statistics.median(speeds) for way, speeds in per_second.items()},
                    "ratios": ratios(per_second),
                }
        finally:
            ray.shutdown()
    if options.json:
        print(json.dumps({"tokens": report, **{k: v for k, v in vars(options).items() if k not in ("json", "tokens")}}))
        return
    print(f"{options.groups} groups of {options.samples} samples, {options.producers} producers, samples/s\n")
    print(f"{'':34}" + "".join(f"{tokens + ' tokens':>14}" for tokens in report))
    for way in WAYS:
        print(f"{way:34}" + "".join(f"{each['samples_per_s'][way]:14.0f}" for each in report.values()))
    print()
    for pair in next(iter(report.values()))["ratios"]:
        print(f"{pair:34}" + "".join(f"{each['ratios'][pair]:13.2f}x" for each in report.values()))


if __name__ == "__main__":
    main()
