"""Transport `nccl`: rank 0 broadcasts flattened buckets to SGLang engines on GPUs of their own.

Every rank gives its parts to rank 0, the only sender, whatever the trainer's layout. A sender for each pipeline stage
would avoid the detour over rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from slime.trainer.weight_sync.base import Weights, WeightTransport, buckets, describe, flatten
from slime.trainer.weight_sync.broadcasts import Broadcaster, Message
from slime.types.clients import Engine


class NcclTransport(WeightTransport):
    """Broadcasts weights to engines. The tensors are on the device of `broadcaster`."""

    name = "nccl"
    on_device = True

    def __init__(self, broadcaster: Broadcaster, bucket_bytes: int) -> None:
        self._broadcaster = broadcaster
        self._bucket_bytes = bucket_bytes

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        self.check_engines(engines)
        return self._broadcaster.send(engines, self._messages(version, weights)) if engines else 0

    def _messages(self, version: int, weights: Weights) -> Iterator[Message]:
        for number, (bucket, last) in enumerate(buckets(weights, self._bucket_bytes)):
            if bucket:
                what, body = describe(number, bucket, version), _body(bucket, version, last=last)
                yield Message(what, body, flatten(bucket))

    def close(self) -> None:
        self._broadcaster.close()


def _body(bucket: dict[str, torch.Tensor], version: int, *, last: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "names": list(bucket),
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in bucket.values()],
        "shapes": [list(tensor.shape) for tensor in bucket.values()],
        "load_format": "flattened_bucket",
    }
    if last:
        # Engines report the last version that they were sent: send it with the last bucket.
        body["weight_version"] = str(version)
    return body
