"""Readers of a sealed step, as ranks of a trainer: clients of their own in the threads of one process.

    python benchmarks/scale/reader.py ADDRESS STEP FIRST READERS OF SAMPLES

Reader number I of OF reads the positions I, I + OF, ... below SAMPLES. The process connects, prints "ready", and reads
when its input has a line; then it prints a JSON list of each reader's seconds.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from slime.types.clients import BufferClient


def main() -> None:
    address, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    step, first, count, of, samples = numbers
    clients = [BufferClient(address) for _ in range(count)]
    for client in clients:
        client.stats()

    def read(number: int) -> float:
        positions = range(first + number, samples, of)
        began = time.perf_counter()
        assert sum(1 for _ in clients[number].read_step(step, positions)) == len(positions)
        return time.perf_counter() - began

    with ThreadPoolExecutor(count) as pool:
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(list(pool.map(read, range(count)))), flush=True)
    for client in clients:
        client.close()


if __name__ == "__main__":
    main()
