"""Samples a second, encoded and decoded on one core: the codec beside pickle.

    python benchmarks/types/codec.py [--json] [--samples 256] [--tokens 4096] [--repeats 20]

A sample has `--tokens` int32 token ids and, for every one, a float32 log-prob and a uint8 mask. The peers run in the
same process, in turns, on the same data:

    bytes           slime.types.codec: protobuf whose arrays are bytes
    pickle numpy    pickled dicts of numpy arrays: memory copies and little more, the honest limit
    pickle lists    pickled dicts of lists of Python numbers

Every peer ends with what it began with, arrays that may be written to included. The best of the repeats counts:
what disturbs a run only slows it.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from slime.types import Sample
from slime.types.codec import decode_sample, encode_sample

ARRAYS = ("tokens", "loss_mask", "rollout_log_probs")
FIELDS = ("group_index", "index", "prompt", "response", "response_length", "reward", "status")


def make_samples(count: int, tokens: int) -> list[Sample]:
    random = np.random.default_rng(0)
    return [
        Sample(
            group_index=index // 8,
            index=index,
            prompt="What is 7 + 6? Answer with just the number.",
            tokens=random.integers(0, 150_000, tokens, dtype=np.int32),
            response="The answer is 13. " * 10,
            response_length=tokens,
            reward=float(index % 2),
            loss_mask=np.ones(tokens, np.uint8),
            rollout_log_probs=-random.exponential(size=tokens).astype(np.float32),
            status=Sample.Status.COMPLETED,
        )
        for index in range(count)
    ]


def as_dict(sample: Sample, convert: Callable[[Any], Any]) -> dict[str, Any]:
    values = {name: getattr(sample, name) for name in FIELDS} | {"status": sample.status.value}
    return values | {name: convert(sample.array(name)) for name in ARRAYS}


def pickled(value: Any) -> bytes:
    return pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)


def seconds(items: list[Any], encode: Callable[[Any], bytes], decode: Callable[[bytes], Any]) -> tuple[float, float]:
    """Seconds to encode and to decode `items`; the whole batch is held, as a trainer holds it."""
    started = time.perf_counter()
    encoded = [encode(item) for item in items]
    between = time.perf_counter()
    decoded = [decode(data) for data in encoded]
    ended = time.perf_counter()
    assert len(decoded) == len(items)
    return between - started, ended - between


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="Print one JSON object in place of the table")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()

    samples = make_samples(args.samples, args.tokens)
    assert all(decode_sample(encode_sample(sample)) == sample for sample in samples)
    peers: dict[str, tuple[list[Any], Callable[[Any], bytes], Callable[[bytes], Any]]] = {
        "bytes": (samples, encode_sample, decode_sample),
        "pickle_numpy": ([as_dict(s, lambda array: array) for s in samples], pickled, pickle.loads),
        "pickle_lists": ([as_dict(s, np.ndarray.tolist) for s in samples], pickled, pickle.loads),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for repeat in range(args.repeats):
        for name, peer in peers.items():
            # The lists take twenty times as long; a third of the repeats tells as much.
            if name != "pickle_lists" or repeat % 3 == 0:
                times[name].append(seconds(*peer))
    report: dict[str, float] = {}
    for name, pairs in times.items():
        encode, decode = min(pairs, key=sum)
        report[f"{name}_samples_per_s"] = args.samples / (encode + decode)
        report[f"{name}_encode_us"] = encode / args.samples * 1e6
        report[f"{name}_decode_us"] = decode / args.samples * 1e6
    report["ratio_vs_pickle_lists"] = report["bytes_samples_per_s"] / report["pickle_lists_samples_per_s"]
    report["ratio_vs_pickle_numpy"] = report["bytes_samples_per_s"] / report["pickle_numpy_samples_per_s"]
    report |= {"samples": args.samples, "tokens": args.tokens, "repeats": args.repeats}
    report["bytes_per_sample"] = len(encode_sample(samples[0]))

    if args.json:
        print(json.dumps({key: round(value, 3) for key, value in report.items()}))
        return
    print(f"{args.samples} samples of {args.tokens} tokens, {report['bytes_per_sample']} bytes each\n")
    print(f"{'':14}{'samples/s':>12}{'encode µs':>12}{'decode µs':>12}{'speed-up':>12}")
    for name in peers:
        ratio = report["bytes_samples_per_s"] / report[f"{name}_samples_per_s"]
        columns = (report[f"{name}_samples_per_s"], report[f"{name}_encode_us"], report[f"{name}_decode_us"])
        print(f"{name.replace('_', ' '):14}{columns[0]:12,.0f}{columns[1]:12.1f}{columns[2]:12.1f}{ratio:11.2f}x")


if __name__ == "__main__":
    main()
