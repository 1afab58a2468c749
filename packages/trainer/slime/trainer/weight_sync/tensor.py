"""Transport `tensor`: safetensors buckets over HTTP, for embedded engines.

POST {engine}/update_weights_from_tensor?weight_version=N&last=true|false, application/octet-stream. The engine serves
version N after the bucket with last=true. No more than two buckets are in memory: the one that engines load, and the
next, which is made meanwhile. Engines on this machine read them from there: the body is empty, and file=PATH in the
query names the bucket, as does the answer of an engine that read it. Where one does not, because it is in a container
of its own or knows no files, buckets are sent.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any
from urllib.parse import urlencode

from safetensors.torch import save

from slime.trainer.weight_sync.base import Weights, WeightTransport, buckets, describe
from slime.trainer.weight_sync.bucket_file import BucketFile, may_read_files
from slime.trainer.weight_sync.requests import EngineRequests, wait_for
from slime.types.clients import Engine
from slime.types.errors import DeadlineExceeded, EngineError

log = logging.getLogger(__name__)

# Larger bodies are slower: both sides would fault in fresh memory for each. 513 MiB to an embedded engine took 3.7 s in
# buckets of 512 MiB, 1.4 s in 64, 0.9 s in 16.
LARGEST_BODY = 16 << 20
# An engine answers so if it cannot read a file, or is older than files.
REFUSED = "400"


class TensorTransport(WeightTransport):
    """Posts weights to engines. bucket_bytes: largest bucket, at most LARGEST_BODY."""

    name = "tensor"

    def __init__(self, bucket_bytes: int, timeout_seconds: float) -> None:
        self._bucket_bytes = min(bucket_bytes, LARGEST_BODY)
        self._requests = EngineRequests(timeout_seconds)
        self._files: list[BucketFile] = []
        # URLs of engines, and whether they read those files.
        self._reads: dict[str, bool] = {}

    def send(self, engines: Sequence[Engine], version: int, weights: Weights, *, in_place: bool = False) -> int:
        self.check_engines(engines)
        files = self._files_for(engines, version)
        sent, under_way, read = 0, list[Future[Any]](), None
        try:
            for number, (bucket, last) in enumerate(buckets(weights, self._bucket_bytes)):
                what = describe(number, bucket, version)
                # Engines may still read the other one.
                file = files[number % 2] if files else None
                if file is None:
                    body = save(bucket)
                    sent += len(body)
                else:
                    body = b""
                    sent += file.write(bucket)
                bucket.clear()
                self._wait_for(engines, under_way, read)
                under_way, read = self._requests.start_each(engines, _path(version, last, file), body, what), file
            self._wait_for(engines, under_way, read)
        except BaseException:
            # No bucket of an update that fails may arrive in the next one, and an engine that did not answer in time
            # may read a file still.
            wait(under_way)
            self._close_files()
            raise
        return sent

    def _files_for(self, engines: Sequence[Engine], version: int) -> list[BucketFile]:
        """Returns two files in which all engines read buckets, or none. An engine is tried with an empty bucket."""
        if not may_read_files(engines):
            return []
        while len(self._files) < 2:
            self._files.append(BucketFile())
        unknown = [engine for engine in engines if engine.url not in self._reads]
        self._files[0].write({})
        tried = self._requests.start_each(unknown, _path(version, False, self._files[0]), b"", "an empty bucket")
        wait(tried)
        for engine, answer in zip(unknown, tried, strict=True):
            error = answer.exception()
            if isinstance(error, DeadlineExceeded):
                self._close_files()
                raise error
            if error is None:
                self._reads[engine.url] = _names(answer.result(), self._files[0])
            elif isinstance(error, EngineError) and error.value == REFUSED:
                self._reads[engine.url] = False
            if self._reads.get(engine.url) is False:
                reason = error or "its answer does not name the file"
                log.info("engine %s does not read weights from this process, so they are sent: %s", engine.name, reason)
        # An engine that failed in another way does so again, with a bucket to name.
        return self._files if all(self._reads.get(engine.url) for engine in engines) else []

    def _wait_for(self, engines: Sequence[Engine], answers: Sequence[Future[Any]], file: BucketFile | None) -> None:
        """Waits until all engines have a bucket, which was in `file` or sent. Raises EngineError for one that has not:
        another may have taken the place of the one that was tried."""
        wait_for(answers)
        for engine, answer in zip(engines, answers, strict=False):
            if file is not None and not _names(answer.result(), file):
                del self._reads[engine.url]
                raise EngineError(
                    f"engine {engine.name} at {engine.url} did not read a bucket from {file.path}", field=engine.name,
                    value=answer.result(), expected="an answer that names the file",
                )  # fmt: skip

    def close(self) -> None:
        self._requests.close()
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            self._files.pop().close()


def _path(version: int, last: bool, file: BucketFile | None) -> str:
    named = {} if file is None else {"file": file.path}
    return f"/update_weights_from_tensor?{urlencode({'weight_version': version, 'last': str(last).lower()} | named)}"


def _names(answer: Any, file: BucketFile) -> bool:
    return isinstance(answer, dict) and answer.get("file") == file.path
