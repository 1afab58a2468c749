"""--update-weight-mode delta: engines that hold the last version get what changed since, the others all weights.

An engine gets all weights in the first update, after a restart, and if it has another version. An engine that verifies
a delta and finds that its own weights are not the delta's base refuses it, and gets all weights in the same update.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import logging
import time
import uuid
from collections.abc import Iterator, Sequence

from slime.trainer.weight_sync.base import Weights, WeightTransport
from slime.trainer.weight_sync.deltas.snapshot import Snapshot
from slime.types.clients import Engine
from slime.types.errors import EngineError
from slime.types.weight_deltas.buckets import TENSOR_BYTES, VersionDelta, write_buckets

log = logging.getLogger(__name__)

# (bucket, whether it is the last)
Buckets = Iterator[tuple[bytes, bool]]


class DeltaCarrier(abc.ABC):
    """Carries deltas, and whole weights, to engines. lineage: as in VersionDelta. tensor_bytes: most bytes of the
    tensors in a bucket of a delta."""

    name: str
    tensor_bytes = TENSOR_BYTES

    @abc.abstractmethod
    def check(self, engines: Sequence[Engine]) -> None:
        """Raises ConfigError for an engine that takes no deltas this way."""

    @abc.abstractmethod
    def send_delta(
        self, engines: Sequence[Engine], about: VersionDelta, buckets: Buckets
    ) -> tuple[int, dict[str, EngineError]]:
        """Takes all of `buckets`; returns the bytes sent, and the errors of engines, by name, that refused a delta."""

    @abc.abstractmethod
    def send_whole(self, engines: Sequence[Engine], version: int, lineage: str, weights: Weights) -> int:
        """Returns the bytes sent."""

    @abc.abstractmethod
    def close(self) -> None: ...


class DeltaTransport(WeightTransport):
    on_device = True

    def __init__(self, carrier: DeltaCarrier, encoding: str, checksum: str, bucket_bytes: int) -> None:
        self.name = carrier.name  # type: ignore[misc]
        self._carrier = carrier
        self._encoding = encoding
        self._checksum = checksum
        self._bucket_bytes = bucket_bytes
        self._snapshot = Snapshot()
        process = uuid.uuid4().hex
        self._lineages = (f"{process}.{number}" for number in itertools.count())
        self._lineage = next(self._lineages)
        self._metrics: dict[str, float] = {}

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        self._carrier.check(engines)
        if not engines:
            return 0
        sent, refused, base = 0, dict[str, EngineError](), self._snapshot.version
        # A version that is sent again may have different weights, so its number does not tell who holds them.
        holders = [engine for engine in engines if engine.weight_version == base != version]
        if holders and base is not None:
            about = VersionDelta(version, base, self._lineage, self._encoding, self._checksum)
            # Closed, so that no thread still changes the snapshot when a failed update is tried again.
            with contextlib.closing(self._snapshot.deltas(about, weights)) as changes:
                buckets = write_buckets(about, changes, self._bucket_bytes, self._carrier.tensor_bytes)
                sent, refused = self._carrier.send_delta(holders, about, buckets)
            self._metrics["perf/update_weights_changed"] = self._snapshot.changed / max(1, self._snapshot.elements)
        else:
            self._metrics.pop("perf/update_weights_changed", None)
            if not self._snapshot.take(version, weights):
                # Within a lineage, a version has one content: new content begins a lineage, also after a failure.
                self._lineage = next(self._lineages)
        for error in refused.values():
            log.warning("all weights are sent in place of a delta: %s", error)
        whole_receivers = [engine for engine in engines if engine not in holders or engine.name in refused]
        if whole_receivers:
            started = time.perf_counter()
            sent += self._carrier.send_whole(whole_receivers, version, self._lineage, self._snapshot.weights())
            self._metrics["perf/update_weights_whole_time"] = time.perf_counter() - started
        self._metrics["perf/update_weights_whole_bytes"] = float(self._snapshot.nbytes)
        self._metrics["perf/update_weights_whole_engines"] = float(len(whole_receivers))
        return sent

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self._metrics)

    def close(self) -> None:
        self._carrier.close()
