"""Steps whose large tensors reach their readers through a blob store.

A sample is detached once, however many ranks read it, and kept until its step is acknowledged, when every rank has read
it. A step that is read again later is detached again, into the same bytes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slime.buffer.groups.steps import Steps, StepSample, chunks
from slime.types.blobs import BlobWriter, detach
from slime.types.errors import counted
from slime.v1 import sample_pb2

log = logging.getLogger(__name__)

# Blobs of one chunk are stored, requested and read together: large chunks need fewer calls, small ones let the reader
# begin sooner.
CHUNK_BYTES = 16 << 20


@dataclass
class _Step:
    """Encoded samples of a step without their blobs, by group and position. size: bytes of the blobs."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    samples: dict[tuple[int, int], bytes] = field(default_factory=dict)
    size: int = 0
    released: bool = False


class DetachedSteps:
    """Steps whose large tensors lie in a blob store. Thread-safe."""

    def __init__(self, steps: Steps, blobs: BlobWriter) -> None:
        self.blobs = blobs
        self._sealed = steps
        self._lock = threading.Lock()
        self._steps: dict[int, _Step] = {}

    def read(self, step: int, positions: Sequence[int]) -> Iterator[list[bytes]]:
        """Reads samples as `Steps.read` does, with large tensors as references. Raises what `BlobWriter.put` raises."""
        places = self._sealed.places(step, positions)
        with self._lock:
            known = self._steps.setdefault(step, _Step())
        return (self._chunk(step, known, chunk) for chunk in chunks(places, CHUNK_BYTES))

    def _chunk(self, step: int, known: _Step, places: Sequence[StepSample]) -> list[bytes]:
        with known.lock:
            if known.released:
                # Nobody would release blobs that are stored now.
                return self._sealed.encoded(places)
            missing = {_key(place): place for place in places if _key(place) not in known.samples}
            samples = [sample_pb2.Sample.FromString(data) for data in self._sealed.encoded(list(missing.values()))]
            known.size += detach(samples, self.blobs, step)
            for key, sample in zip(missing, samples, strict=True):
                known.samples[key] = sample.SerializeToString()
            return [known.samples[_key(place)] for place in places]

    def release(self, upto: int | None = None) -> None:
        """Forgets the steps up to and including `upto`, or all."""
        with self._lock:
            ended = [step for step in self._steps if upto is None or step <= upto]
            steps = {step: self._steps.pop(step) for step in ended}
        for step, known in steps.items():
            with known.lock:
                known.released = True
                self.blobs.release(step)
            log.info("step %d: %d bytes of %s went as blobs", step, known.size, counted(len(known.samples), "sample"))


def _key(place: StepSample) -> tuple[int, int]:
    return place.group.group_index, place.position
