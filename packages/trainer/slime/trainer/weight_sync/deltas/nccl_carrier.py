"""Carries deltas to SGLang engines on GPUs of their own, over the NCCL broadcasts that carry full updates.

A plug-in in the engines' processes applies them: `slime.rollout.engines.sglang.broadcast_deltas`. An engine that gets
all weights for the first time also gets a delta of no tensor, so that a missing plug-in is found before anything is
trained.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from slime.trainer.weight_sync.base import Weights
from slime.trainer.weight_sync.broadcasts import Broadcaster, Message
from slime.trainer.weight_sync.deltas.carriers import check_carrier, describe_delta
from slime.trainer.weight_sync.deltas.transport import Buckets, DeltaCarrier
from slime.trainer.weight_sync.nccl import NcclTransport
from slime.types.clients import Engine
from slime.types.errors import EngineError, NotAvailable
from slime.types.weight_deltas import BROADCAST, REFUSED
from slime.types.weight_deltas.buckets import VersionDelta, write_buckets
from slime.types.weight_deltas.checksums import CHECKSUMS
from slime.types.weight_deltas.encoding import OPERATIONS


class NcclCarrier(DeltaCarrier):
    name = "nccl"

    def __init__(self, broadcaster: Broadcaster, bucket_bytes: int) -> None:
        """bucket_bytes: most bytes of the tensors in a bucket, of a full update as of a delta."""
        self._broadcaster = broadcaster
        # SGLang takes some 30 ms to answer a request, and goes through all modules of a model twice for each.
        self.tensor_bytes = bucket_bytes
        # Engines that have taken a delta, by name and URL.
        self._known: set[tuple[str, str]] = set()
        self._whole = NcclTransport(broadcaster, bucket_bytes)

    def check(self, engines: Sequence[Engine]) -> None:
        self._whole.check_engines(engines)
        check_carrier(engines, self.name)

    def send_delta(
        self, engines: Sequence[Engine], about: VersionDelta, buckets: Buckets
    ) -> tuple[int, dict[str, EngineError]]:
        refused = dict[str, EngineError]()

        def refusal(engine: Engine, error: EngineError) -> bool:
            # SGLang by itself fails with the name of the type, which it does not know.
            if BROADCAST in error.message:
                raise NotAvailable.unavailable(
                    "--update-weight-mode delta with --update-weight-transport nccl",
                    f"engine {engine.name} has no plug-in of slime-rollout that applies deltas: install slime-rollout "
                    "where SGLang runs, and see the engine's log if it does not know this SGLang",
                    "--update-weight-transport disk",
                ) from error  # fmt: skip
            if REFUSED not in error.message:
                return False
            # The engine takes part in the broadcasts that remain.
            refused.setdefault(engine.name, error)
            return True

        return self._broadcaster.send(engines, self._messages(about, buckets), refusal), refused

    def _messages(self, about: VersionDelta, buckets: Buckets) -> Iterator[Message]:
        for number, (bucket, last) in enumerate(buckets):
            body = {"names": [BROADCAST], "dtypes": [BROADCAST], "shapes": [[len(bucket)]], "load_format": BROADCAST}
            if last:
                body["weight_version"] = str(about.version)  # type: ignore[assignment]
            content = torch.frombuffer(bytearray(bucket), dtype=torch.uint8).to(self._broadcaster.device)
            yield Message(f"delta bucket {number} of {describe_delta(about)}", body, content)

    def send_whole(self, engines: Sequence[Engine], version: int, lineage: str, weights: Weights) -> int:
        on_device = ((name, tensor.to(self._broadcaster.device)) for name, tensor in weights)
        sent = self._whole.send(engines, version, on_device)
        members = {(engine.name, engine.url) for engine in engines}
        if not members <= self._known:
            about = VersionDelta(version, version, lineage, OPERATIONS[0], CHECKSUMS[0])
            self.send_delta(engines, about, write_buckets(about, (), 1))
            self._known |= members
        return sent

    def close(self) -> None:
        self._whole.close()
