"""Groups a second through the buffer's stores: SQLite, PostgreSQL and an object store, side by side.

    python benchmarks/buffer/stores.py [--json] [--groups 200] [--samples 8] [--tokens 1024] [--prompt 10]
        [--workers 4] [--repeats 5] [--durability process|power] [--postgresql URL] [--s3 URL]

Every group goes from its prompt to a commit: `--workers` threads lease groups one at a time and complete them, then a
trainer seals a step of all of them, reads it, acknowledges and commits it, which deletes its samples. Each buffer is a
process of its own on this machine, and all are used in turns. The ratio is that of a turn's throughput to SQLite's of
the same repeat; the table shows medians.

Without `--postgresql` the script starts Debian's PostgreSQL, with fsync on, in a temporary directory. Without `--s3` it
starts moto's server: a stand-in in Python, so what these rows show is the path to an object store and not its speed.
With `--s3` the environment has the store's endpoint and keys, as for all clients of AWS.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings

STORES = ("sqlite", "postgresql", "sqlite + s3", "postgresql + s3")
SETTINGS = RpcSettings(call_timeout_seconds=300.0)


@contextmanager
def local_s3() -> Iterator[str]:
    """Starts moto's server and returns the URL of a bucket in it; the environment then leads there."""
    command = [sys.executable, "-c", SERVE_S3]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        os.environ |= {
            "AWS_ENDPOINT_URL_S3": process.stdout.readline().strip(), "AWS_ACCESS_KEY_ID": "benchmark",
            "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_DEFAULT_REGION": "us-east-1",
        }  # fmt: skip
        import boto3

        boto3.client("s3").create_bucket(Bucket="samples")
        yield "s3://samples"
    finally:
        process.kill()
        process.wait()


SERVE_S3 = """
import logging, signal
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
signal.pause()
"""


@contextmanager
def local_postgresql() -> Iterator[str]:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "packages" / "buffer" / "tests" / "support"))
    import postgres_server

    if reason := postgres_server.missing():
        sys.exit(f"--postgresql is required: {reason}")
    with postgres_server.postgres_server() as server:
        yield server.new_store()


@contextmanager
def schema(url: str) -> Iterator[str]:
    """Makes an empty schema in the database of `url`, returns its URL, and drops it at the end."""
    import psycopg

    name = f"benchmark_{secrets.token_hex(4)}"
    place, _, query = url.partition("?")
    words = [word for word in query.split("&") if word and not word.startswith("options=")]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}")
        yield f"{place}?{'&'.join([*words, f'options=-csearch_path%3D{name}'])}"
        connection.execute(f"DROP SCHEMA {name} CASCADE")


@contextmanager
def buffer(flags: list[str], samples: int, durability: str) -> Iterator[tuple[BufferClient, int]]:
    """Starts a buffer; yields a client that has opened its run, and the id of its process."""
    words = ["--release-committed", "--buffer-durability", durability, "--n-samples-per-prompt", str(samples)]
    command = [sys.executable, "-m", "slime.buffer.cli", "serve", *flags, *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        started = process.stdout.readline().split()
        if not started:
            sys.exit(f"slime-buffer serve {' '.join(flags)} did not start")
        with BufferClient(started[2], settings=SETTINGS) as client:
            client.open_run("benchmark")
            yield client, process.pid
    finally:
        process.terminate()
        process.wait()


def finish(samples: list[Sample], tokens: int) -> list[Sample]:
    for sample in samples:
        random = np.random.default_rng(sample.index)
        sample.tokens = random.integers(0, 150_000, tokens, dtype=np.int32)
        sample.response, sample.response_length = "The answer is 13. " * 10, tokens - 1
        sample.loss_mask = np.ones(tokens - 1, np.uint8)
        sample.rollout_log_probs = -random.exponential(size=tokens - 1).astype(np.float32)
        sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
    return samples


@contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - started)


def turn(client: BufferClient, step: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns groups a second, and milliseconds: of a lease and of a completion, medians; of training, per group."""
    prompts = [f"{step}-{number} ".ljust(options.prompt, "x") for number in range(options.groups)]
    client.add_prompts(prompts, key=str(step))
    left = iter(range(options.groups))
    lock = threading.Lock()
    seconds: dict[str, list[float]] = {"lease": [], "complete": []}
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    if next(left, None) is None:
                        return
                with timed(seconds["lease"]):
                    (lease,) = client.lease_groups(1, wait_seconds=60)
                samples = finish(lease.group.samples, options.tokens)
                with timed(seconds["complete"]):
                    client.complete_group(lease.token, samples)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(options.workers)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    trained = time.perf_counter()
    sealed = client.seal_step(step, options.groups, wait_seconds=60)
    assert sum(1 for _ in client.read_step(step, range(len(sealed)))) == options.groups * options.samples
    client.acknowledge_step(step)
    client.commit_steps(step)
    ended = time.perf_counter()
    return {
        "groups_per_s": options.groups / (ended - started),
        "lease_ms": statistics.median(seconds["lease"]) * 1e3,
        "complete_ms": statistics.median(seconds["complete"]) * 1e3,
        "train_ms": (ended - trained) / options.groups * 1e3,
    }


def measure(options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgresql = options.postgresql or stack.enter_context(local_postgresql())
        s3 = options.s3 or stack.enter_context(local_s3())
        clients = {}
        for name in STORES:
            flags = []
            if name.startswith("postgresql"):
                flags += ["--buffer-store", stack.enter_context(schema(postgresql))]
            if name != "postgresql + s3":
                flags += ["--buffer-dir", str(directory / name.replace(" ", ""))]
            if name.endswith("s3"):
                flags += ["--buffer-payloads", f"{s3}/benchmark-{secrets.token_hex(4)}"]
            clients[name], _ = stack.enter_context(buffer(flags, options.samples, options.durability))
        turns: dict[str, list[dict[str, float]]] = {name: [] for name in STORES}
        # The first turn opens connections and files.
        for step in range(options.repeats + 1):
            for name, client in clients.items():
                numbers = turn(client, step, options)
                if step:
                    turns[name].append(numbers)
        return turns


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--groups", type=int, default=200, help="Groups of a turn (default: 200)")
    parser.add_argument("--samples", type=int, default=8, help="Samples of a group (default: 8)")
    parser.add_argument("--tokens", type=int, default=1024, help="Tokens of a sample (default: 1024)")
    parser.add_argument("--prompt", type=int, default=10, help="Characters of a prompt, at least (default: 10)")
    parser.add_argument("--workers", type=int, default=4, help="Threads that lease and complete (default: 4)")
    parser.add_argument("--repeats", type=int, default=5, help="Turns of each store (default: 5)")
    parser.add_argument(
        "--durability",
        choices=("process", "power"),
        default="process",
        help="Value of --buffer-durability (default: process)",
    )
    parser.add_argument("--postgresql", metavar="URL", help="Database to make schemas in (default: one started here)")
    parser.add_argument("--s3", metavar="URL", help="Bucket, s3://NAME (default: that of a stand-in started here)")
    options = parser.parse_args()
    turns = measure(options)
    report: dict[str, dict[str, float]] = {}
    for name, numbers in turns.items():
        report[name] = {key: statistics.median(turn[key] for turn in numbers) for key in numbers[0]}
        pairs = zip(numbers, turns["sqlite"], strict=True)
        report[name]["ratio_vs_sqlite"] = statistics.median(a["groups_per_s"] / b["groups_per_s"] for a, b in pairs)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key not in ("json", "postgresql", "s3")}
        print(json.dumps({"stores": report, **settings}))
        return
    print(
        f"{options.groups} groups of {options.samples} samples of {options.tokens} tokens, {options.workers} workers\n"
    )
    print(f"{'':17}{'groups/s':>10}{'lease ms':>10}{'complete ms':>13}{'train ms/group':>16}{'to SQLite':>11}")
    for name, row in report.items():
        columns = f"{row['groups_per_s']:10.1f}{row['lease_ms']:10.1f}{row['complete_ms']:13.1f}{row['train_ms']:16.2f}"
        print(f"{name:17}{columns}{row['ratio_vs_sqlite']:10.2f}x")


if __name__ == "__main__":
    main()
