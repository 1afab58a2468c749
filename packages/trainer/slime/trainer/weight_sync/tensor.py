"""Transport `tensor`: safetensors buckets over HTTP, for embedded engines.

POST {engine}/update_weights_from_tensor?weight_version=N&last=true|false, application/octet-stream. The engine serves
version N after the bucket with last=true. No more than two buckets are in memory: the one that engines load, and the
next, which is made meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import urlencode

from safetensors.torch import save

from slime.trainer.weight_sync.base import Weights, WeightTransport, buckets, describe
from slime.trainer.weight_sync.requests import EngineRequests, wait_for
from slime.types.clients import Engine

# Larger bodies are slower: both sides would fault in fresh memory for each. 513 MiB to an embedded engine took 3.7 s in
# buckets of 512 MiB, 1.4 s in 64, 0.9 s in 16.
LARGEST_BODY = 16 << 20


class TensorTransport(WeightTransport):
    """Posts weights to engines. bucket_bytes: largest bucket, at most LARGEST_BODY."""

    name = "tensor"

    def __init__(self, bucket_bytes: int, timeout_seconds: float) -> None:
        self._bucket_bytes = min(bucket_bytes, LARGEST_BODY)
        self._requests = EngineRequests(timeout_seconds)

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        self.check_engines(engines)
        sent, under_way = 0, list[Future[Any]]()
        try:
            for number, (bucket, last) in enumerate(buckets(weights, self._bucket_bytes)):
                query = urlencode({"weight_version": version, "last": str(last).lower()})
                what = describe(number, bucket, version)
                body = save(bucket)
                bucket.clear()
                wait_for(under_way)
                under_way = self._requests.start_each(engines, f"/update_weights_from_tensor?{query}", body, what)
                sent += len(body)
        finally:
            # No bucket of an update that fails may arrive in the next one.
            wait(under_way)
        wait_for(under_way)
        return sent

    def close(self) -> None:
        self._requests.close()
