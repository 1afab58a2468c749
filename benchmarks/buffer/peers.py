"""Samples a second from client to client: the buffer beside Ray's object store, bare SQLite and bare gRPC.

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
    gRPC, memory      a call for `--batch` groups, encoded by our codec, to a service in Python that keeps the bytes and
                      sends them on: what any service costs that takes samples over gRPC

Ray's ways and bare gRPC lose samples with a process; SQLite and bare gRPC have no leases, checks and steps. The ways
take turns. A ratio is that of the buffer's throughput to a peer's in the same repeat, a buffer that waits for the disk
beside a SQLite that does, and the table shows medians.

The CPU time of a sample is that of the clients and the service together, the least of all repeats: it grows where other
programs share the caches. That of Ray is not known, because its own processes do a part of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import ray

from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.codec import decode_sample, encode_sample, sample_from_proto, sample_pieces
from slime.types.rpc import RpcSettings
from slime.types.wire.encoded import MessagePieces
from slime.v1 import buffer_pb2

BUFFERS, SQLITE, GRPC = ("buffer, process", "buffer, power"), ("SQLite, NORMAL", "SQLite, FULL"), "gRPC, memory"
WAYS = (*BUFFERS, "Ray, lists", "Ray, numpy", *SQLITE, GRPC)
PAIRS = (
    ("buffer, process", "Ray, lists"), ("buffer, process", "Ray, numpy"), ("buffer, process", "SQLite, NORMAL"),
    ("buffer, power", "SQLite, FULL"), ("buffer, process", GRPC),
)  # fmt: skip
GRPC_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
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


class BareService:
    """A gRPC service that keeps messages in memory and sends each on once."""

    def __init__(self) -> None:
        self.kept: queue.Queue[bytes] = queue.Queue()
        put = grpc.stream_unary_rpc_method_handler(self.put)
        take = grpc.unary_stream_rpc_method_handler(self.take)
        self.server = grpc.server(ThreadPoolExecutor(8), options=GRPC_OPTIONS)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("bare", {"Put": put, "Take": take}),)
        )
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def put(self, requests: Iterator[bytes], context: Any) -> bytes:
        for request in requests:
            self.kept.put(request)
        return b""

    def take(self, count: bytes, context: Any) -> Iterator[bytes]:
        for _ in range(int(count)):
            yield self.kept.get(timeout=SECONDS)

    def place(self) -> tuple[str, int]:
        return f"127.0.0.1:{self.port}", os.getpid()


class ClientProcess:
    """A producer or the consumer. places: address of each service, file of each SQLite database.

    `produce` and `consume` return the CPU seconds that they took.
    """

    def __init__(self, places: dict[str, str], samples: int, tokens: int) -> None:
        self.places = places
        self.group = [fields(index, tokens) for index in range(samples)]
        self.lists = [as_lists(sample) for sample in self.group]
        self.clients: dict[str, BufferClient] = {}
        self.databases: dict[str, sqlite3.Connection] = {}
        self.channel: grpc.Channel | None = None

    def bare(self) -> grpc.Channel:
        if self.channel is None:
            self.channel = grpc.insecure_channel(self.places[GRPC], GRPC_OPTIONS)
        return self.channel

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

    def produce(self, way: str, groups: int, batch: int, consumer: Any) -> float:
        started = time.process_time()
        taken = []
        while groups:
            batch = min(batch, groups)
            if way in BUFFERS:
                batch = self.complete(self.client(way), batch)
            elif way.startswith("Ray"):
                group = self.lists if way.endswith("lists") else self.group
                # In a list, so that the consumer and not Ray gets what the reference names.
                taken += [consumer.take.remote([ray.put(group)]) for _ in range(batch)]
            elif way == GRPC:
                message = MessagePieces([], 0)
                for _ in range(batch):
                    samples = [Sample(prompt="1 + 12", **values) for values in self.group]
                    message.add_list(buffer_pb2.ReadStepResponse, "samples", map(sample_pieces, samples))
                self.bare().unary_unary("/bare/Put")(message.join(), timeout=SECONDS)
            else:
                connection = self.database(way)
                connection.execute("BEGIN IMMEDIATE")
                for _ in range(batch):
                    encoded = [(encode_sample(Sample(prompt="1 + 12", **values)),) for values in self.group]
                    connection.executemany("INSERT INTO samples (sample) VALUES (?)", encoded)
                connection.execute("COMMIT")
            groups -= batch
        ray.get(taken, timeout=SECONDS)
        return time.process_time() - started

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

    def consume(self, way: str, first_step: int, groups: int, calls: int) -> float:
        """calls: number of the producers' calls."""
        started = time.process_time()
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
        elif way == GRPC:
            taken = 0
            for encoded in self.bare().unary_stream("/bare/Take")(str(calls).encode(), timeout=SECONDS):
                taken += len([sample_from_proto(s) for s in buffer_pb2.ReadStepResponse.FromString(encoded).samples])
            assert taken == groups * len(self.group)
        return time.process_time() - started


def make_database(path: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, sample BLOB NOT NULL)")


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    options: argparse.Namespace, tokens: int, directory: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Returns samples a second of each way, by repeat, and microseconds of CPU time a sample."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from stores import buffer

    per_second: dict[str, list[float]] = {way: [] for way in WAYS}
    cpu_times: dict[str, list[float]] = {way: [] for way in WAYS if not way.startswith("Ray")}
    steps = options.groups // GROUPS_OF_STEP
    with ExitStack() as stack:
        places, opened, services = {}, {}, {}
        for way in BUFFERS:
            durability = way.split()[-1]
            place = str(directory / f"{durability}-{tokens}")
            client, services[way] = stack.enter_context(buffer(["--buffer-dir", place], options.samples, durability))
            places[way], opened[way] = client.address, client
        for way in SQLITE:
            places[way] = str(directory / f"{way.split()[-1]}-{tokens}.sqlite")
            make_database(places[way])
        bare = ray.remote(num_cpus=0)(BareService).remote()
        places[GRPC], services[GRPC] = ray.get(bare.place.remote(), timeout=SECONDS)
        make = ray.remote(num_cpus=0)(ClientProcess).remote
        consumer, *producers = [make(places, options.samples, tokens) for _ in range(options.producers + 1)]
        shares = [options.groups // options.producers] * options.producers
        shares[0] += options.groups % options.producers
        num_calls = sum(-(-share // options.batch) for share in shares)
        # The first repeat opens connections and files.
        for repeat in range(options.repeats + 1):
            for way, speeds in per_second.items():
                if way in opened:
                    opened[way].add_prompts([f"{repeat}-{number}" for number in range(options.groups)])
                service_started = cpu_seconds(services[way]) if way in services else 0.0
                started = time.perf_counter()
                calls = [consumer.consume.remote(way, repeat * steps, options.groups, num_calls)]
                calls += [
                    each.produce.remote(way, n, options.batch, consumer)
                    for each, n in zip(producers, shares, strict=True)
                ]
                of_clients = sum(ray.get(calls, timeout=2 * SECONDS))
                if repeat:
                    count = options.groups * options.samples
                    speeds.append(count / (time.perf_counter() - started))
                    if way in cpu_times:
                        of_service = cpu_seconds(services[way]) - service_started if way in services else 0.0
                        cpu_times[way].append(1e6 * (of_clients + of_service) / count)
        for actor in (consumer, *producers, bare):
            ray.kill(actor)
    return per_second, cpu_times


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
                per_second, cpu_times = measure(options, tokens, Path(directory))
                report[str(tokens)] = {
                    "samples_per_s": {way: statistics.median(speeds) for way, speeds in per_second.items()},
                    "ratios": ratios(per_second),
                    "cpu_us": {way: min(times) for way, times in cpu_times.items()},
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
    print("\nCPU time of a sample, µs")
    for way in next(iter(report.values()))["cpu_us"]:
        print(f"{way:34}" + "".join(f"{each['cpu_us'][way]:14.0f}" for each in report.values()))
    print()
    for pair in next(iter(report.values()))["ratios"]:
        print(f"{pair:34}" + "".join(f"{each['ratios'][pair]:13.2f}x" for each in report.values()))


if __name__ == "__main__":
    main()
