"""Seconds to read a step with large tensors from the buffer: `--rollout-data-transport` grpc beside a store.

    python benchmarks/launcher/data_transport.py [--store object-store|nixl] [--json] [--samples 256] [--kib 1024]
        [--repeats 3] [--same-in-group]

Each sample carries routed experts of `--kib` KiB; with `--same-in-group` the eight samples of a group carry the same,
as those do that look at one image. Buffer and readers are processes of their own on one node, as in a
run, and read the same step, for which the buffer puts nothing in the store before it is asked:

    one reader      a trainer of one rank
    two replicas    two ranks that read a half each
    one replica     two ranks that need the same samples: with grpc one reads, and the other has them from it

Every reader ends with arrays of its own. Minimum, median and maximum of the repeats, which take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray

from slime.buffer.settings import BufferSettings
from slime.launcher.blob_stores.base import KeeperReader
from slime.launcher.blob_stores.nixl import NixlReader, NixlWriter
from slime.launcher.blob_stores.object_store import ObjectStoreReader, ObjectStoreWriter
from slime.launcher.platform.ray_cluster import ray_cluster
from slime.launcher.services.supervisor import Supervisor
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings

GROUP, LAYERS, TOP_K = 8, 32, 8
TRANSPORTS = ("grpc", "store")
CASES = ("one reader", "two replicas", "one replica")
SECONDS = 300.0


class Reader:
    """A trainer's rank, as far as it reads."""

    def __init__(self, rank: int, master: str, address: str, token_file: str, blobs: KeeperReader) -> None:
        from slime.trainer.process.collective import Ranks

        self.ranks = Ranks(rank, 2, f"file://{master}", SECONDS / 60)
        settings = RpcSettings(call_timeout_seconds=SECONDS, token_file=token_file)
        self.clients = {
            "grpc": BufferClient(address, settings=settings),
            "store": BufferClient(address, settings=settings, blobs=blobs),
        }

    def read(self, transport: str, positions: Sequence[int], shared: bool) -> int:
        """Returns the number of samples it then has."""
        from slime.trainer.step.sharing import share

        from_other = shared and transport == "grpc"
        samples = [] if from_other and self.ranks.rank else list(self.clients[transport].read_step(0, positions))
        if from_other:
            assert self.ranks.control is not None
            samples = share(samples, self.ranks, 0, self.ranks.control)
        return sum(sample.rollout_routed_experts is not None for sample in samples)


def fill(client: BufferClient, samples: int, rows: int, same: bool) -> None:
    """Completes groups of GROUP samples, and seals them as step 0."""
    random = np.random.default_rng(0)
    client.open_run("benchmark")
    client.add_prompts([f"prompt {number}" for number in range(samples // GROUP)])
    for lease in client.lease_groups(samples // GROUP, wait_seconds=10):
        experts = random.integers(0, 128, (rows, LAYERS, TOP_K), dtype=np.int32)
        for shift, sample in enumerate(lease.group.samples):
            sample.tokens = random.integers(0, 150_000, rows + 1, dtype=np.int32)
            sample.response_length = rows
            sample.reward = 1.0
            sample.loss_mask = np.ones(rows, np.uint8)
            sample.rollout_log_probs = np.zeros(rows, np.float32)
            sample.rollout_routed_experts = experts if same else np.roll(experts, shift, axis=1)
            sample.status = Sample.Status.COMPLETED
        client.complete_group(lease.token, lease.group.samples)
    client.seal_step(0, samples // GROUP)


def measure(client: BufferClient, readers: list[Any], transport: str, case: str, samples: int) -> float:
    # A run that is opened again forgets what was put.
    client.open_run("benchmark")
    whole = range(samples)
    shares = {"one reader": [whole], "two replicas": [whole[::2], whole[1::2]], "one replica": [whole, whole]}[case]
    started = time.perf_counter()
    calls = [
        reader.read.remote(transport, list(part), case == "one replica")
        for reader, part in zip(readers, shares, strict=False)
    ]
    found = ray.get(calls, timeout=SECONDS)
    seconds = time.perf_counter() - started
    assert found == [len(part) for part in shares]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=("object-store", "nixl"), default="object-store")
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--kib", type=int, default=1024, help="Size of routed experts in a sample, in KiB")
    parser.add_argument("--same-in-group", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    seconds: dict[tuple[str, str], list[float]] = {(case, name): [] for case in CASES for name in TRANSPORTS}
    with tempfile.TemporaryDirectory(prefix="slime-") as directory, ray_cluster(None, object_store_bytes=None):
        supervisor = Supervisor(Path(directory, "logs"), start_seconds=SECONDS, stop_seconds=20)
        try:
            process = supervisor.spawn("buffer", {"num_cpus": 0})
            settings = BufferSettings(n_samples_per_prompt=GROUP, rollout_global_dataset=False)
            writer = (
                NixlWriter(alone=True, inline_bytes=1 << 10)
                if args.store == "nixl"
                else ObjectStoreWriter(inline_bytes=1 << 10)
            )
            address = supervisor.start(process, "slime.buffer.service", settings, RpcSettings(), blobs=writer)
            blobs: KeeperReader = (
                NixlReader(process.actor, SECONDS, alone=True)
                if args.store == "nixl"
                else ObjectStoreReader(process.actor, SECONDS)
            )
            make = ray.remote(num_cpus=0)(Reader).remote
            access = Path(directory, "access")
            supervisor.authority.write(access, {"buffer": address})
            token = str(access / "train.token")
            readers = [make(rank, f"{directory}/rendezvous", address, token, blobs) for rank in range(2)]
            settings_of_all = replace(supervisor.client_settings, call_timeout_seconds=SECONDS)
            with BufferClient(address, settings=settings_of_all) as client:
                fill(client, args.samples, args.kib * 1024 // (LAYERS * TOP_K * 4), args.same_in_group)
                for repeat in range(args.repeats + 1):
                    for case, name in seconds:
                        took = measure(client, readers, name, case, args.samples)
                        if repeat:  # the first is to warm up
                            seconds[case, name].append(took)
        finally:
            supervisor.stop()

    report: dict[str, Any] = {"samples": args.samples, "kib": args.kib, "repeats": args.repeats}
    report |= {"store": args.store, "same_in_group": args.same_in_group}
    print_table = not args.json
    if print_table:
        print(f"{args.samples} samples of {args.kib} KiB, seconds: minimum - median - maximum of {args.repeats}\n")
        print(f"{'':14}{'grpc':>24}{args.store:>24}{'grpc / ' + args.store:>22}")
    for case in CASES:
        columns = []
        for name in TRANSPORTS:
            found = seconds[case, name]
            three = min(found), statistics.median(found), max(found)
            report[f"{case} {name}"] = [round(value, 3) for value in three]
            columns.append(" - ".join(f"{value:.2f}" for value in three))
        ratio = statistics.median(seconds[case, "grpc"]) / statistics.median(seconds[case, "store"])
        report[f"{case} ratio"] = round(ratio, 2)
        if print_table:
            print(f"{case:14}{columns[0]:>24}{columns[1]:>24}{ratio:>21.2f}x")
    if args.json:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
