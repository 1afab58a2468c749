"""What every transport of weights shares: the stream of tensors, the buckets, the engines, one request."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import urllib3
from torch import Tensor

from slime.types.clients import Engine
from slime.types.errors import DeadlineExceeded, EngineError

# One stream of (Hugging Face name, whole tensor), in an order that repeats.
Weights = Iterator[tuple[str, Tensor]]


class WeightTransport(abc.ABC):
    """Sends one version of the policy to engines that a transaction has paused."""

    @abc.abstractmethod
    def send(self, engines: Sequence[Engine], version: int, weights: Weights) -> int:
        """Bytes sent. Takes tensors from `weights` one at a time. Raises EngineError naming engine and bucket."""


def as_dtype(weights: Weights, dtype: torch.dtype) -> Weights:
    """Floating-point tensors in `dtype` on the CPU; others as they are."""
    for name, tensor in weights:
        yield name, tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype).contiguous()


def buckets(weights: Weights, max_bytes: int) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """(tensors of at most `max_bytes`, whether it is the last). A larger tensor is alone in its bucket."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > max_bytes:
            yield bucket, False
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    yield bucket, True


class EngineRequests:
    """POST requests to several engines at once, with a deadline, without retries: a bucket must not arrive twice."""

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._http = urllib3.PoolManager(retries=False, timeout=urllib3.Timeout(timeout_seconds))

    def post(self, engines: Sequence[Engine], path: str, body: bytes, content_type: str, what: str) -> None:
        """`what` names the content in errors. Raises EngineError or DeadlineExceeded of the first engine to fail."""
        with ThreadPoolExecutor(max_workers=max(1, len(engines)), thread_name_prefix="weights") as pool:
            for outcome in [pool.submit(self._post, engine, path, body, content_type, what) for engine in engines]:
                outcome.result()

    def _post(self, engine: Engine, path: str, body: bytes, content_type: str, what: str) -> None:
        where = f"engine {engine.name} at {engine.url}{path.split('?')[0]}, {what}"
        try:
            answer = self._http.request(
                "POST", engine.url.rstrip("/") + path, body=body, headers={"Content-Type": content_type}
            )
        except urllib3.exceptions.NewConnectionError as error:
            # urllib3 counts a refused connection among the time-outs.
            raise EngineError(f"{where}: {error}", field=engine.name) from error
        except urllib3.exceptions.TimeoutError as error:
            raise DeadlineExceeded(f"{where}: no answer within {self._timeout:g} s", field=engine.name) from error
        except urllib3.exceptions.HTTPError as error:
            raise EngineError(f"{where}: {error}", field=engine.name) from error
        text = answer.data.decode(errors="replace")
        if answer.status != 200 or not _succeeded(text):
            raise EngineError(
                f"{where}: status {answer.status}: {text[:500]}", field=engine.name, value=answer.status, expected="200"
            )

    def close(self) -> None:
        self._http.clear()


def _succeeded(text: str) -> bool:
    # SGLang answers 200 with success=false where it could not load what it was given.
    try:
        answer: Any = json.loads(text)
    except ValueError:
        return True
    return not (isinstance(answer, dict) and answer.get("success") is False)
