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
        sent, under_way = 0, list[Future[Any]]()
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
                wait_for(under_way)
                under_way = self._requests.start_each(engines, _path(version, last, file), body, what)
            wait_for(under_way)
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
            error: BaseException | str | None = answer.exception()
            if isinstance(error, DeadlineExceeded):
                self._close_files()
                raise error
            if error is None:
                content = answer.result()
                self._reads[engine.url] = isinstance(content, dict) and content.get("file") == self._files[0].path
                error = "its answer does not name the file"
            elif isinstance(error, EngineError) and error.value == REFUSED:
                self._reads[engine.url] = False
            if self._reads.get(engine.url) is False:
                name = engine.name
                log.info("weights are sent to engine %s, which does not read them from this process: %s", name, error)
        # An engine that failed in another way does so again, with a bucket to name.
        return self._files if all(self._reads.get(engine.url) for engine in engines) else []

    def close(self) -> None:
        self._requests.close()
        self._close_files()

    def _close_files(self) -> None:
        while self._files:
            self._files.pop().close()


def _path(version: int, last: bool, file: BucketFile | None) -> str:
    named = {} if file is None else {"file": file.path}
    return f"/update_weights_from_tensor?{urlencode({'weight_version': version, 'last': str(last).lower()} | named)}"
