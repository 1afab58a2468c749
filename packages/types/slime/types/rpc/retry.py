"""Repeats calls whose server is unavailable, busy or newly started, and no others."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from slime.types.errors import Busy
from slime.types.rpc.details import with_details
from slime.types.rpc.status import METADATA_KEY
from slime.v1 import error_pb2

FIRST_PAUSE = 0.05
LONGEST_PAUSE = 1.0


class TokenSource:
    """A client's token, kept until a service refuses it: reading its file costs as much as a third of a short call."""

    def __init__(self, read: Callable[[], str | None] = lambda: None) -> None:
        self._read = read
        self._token: str | None = None

    def current(self) -> str | None:
        if self._token is None:
            self._token = self._read()
        return self._token

    def renew(self) -> str | None:
        """Reads the token again: a service that restarts generates another one."""
        self._token = self._read()
        return self._token


class Repeatable:
    """An iterable that creates its messages again each time, for client streams that are too large to keep."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class Attempts:
    """Limits the attempts of a call to `seconds` and to its deadline, with exponential backoff and jitter."""

    def __init__(self, seconds: float, details: grpc.ClientCallDetails, token: TokenSource) -> None:
        self._details = details
        self._token = token
        self._token_sent: str | None = None
        self._started = time.monotonic()
        self._limit = seconds if details.timeout is None else min(seconds, details.timeout)
        self._pause = FIRST_PAUSE

    def details(self) -> grpc.ClientCallDetails:
        """Returns the details of the next attempt, whose timeout is the time left to the call."""
        self._token_sent = self._token.current()
        if self._details.timeout is None:
            return self._details
        return with_details(self._details, timeout=max(0.0, self._details.timeout - (time.monotonic() - self._started)))

    def pause_after(self, outcome: Any) -> bool:
        """Returns whether to call again after this outcome, after a pause if so."""
        if outcome.code() is grpc.StatusCode.UNAUTHENTICATED and self._token.renew() != self._token_sent:
            return True  # The service has just started, and generated another token.
        if not _is_transient(outcome):
            return False
        wait = random.uniform(0, self._pause)
        if time.monotonic() - self._started + wait > self._limit:
            return False
        time.sleep(wait)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        return True


def _is_transient(outcome: Any) -> bool:
    """Returns whether the same call may succeed a moment later: the server is unavailable or busy."""
    if outcome.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        details = [value for key, value in outcome.trailing_metadata() or () if key == METADATA_KEY]
        return any(error_pb2.ErrorDetail.FromString(value).name == Busy.__name__ for value in details)
    return outcome.code() is grpc.StatusCode.UNAVAILABLE


class RetryInterceptor(
    grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor, grpc.StreamUnaryClientInterceptor
):
    """Repeats a call on UNAVAILABLE or Busy for up to `seconds`, and when its token was replaced meanwhile.

    A server stream is repeated only before its first message. A client stream is repeated if its messages can be
    iterated over again (a list, `Repeatable`); a caller whose stream must not arrive twice passes an iterator.
    """

    def __init__(self, seconds: float, token: TokenSource) -> None:
        self._seconds = seconds
        self._token = token

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        attempts = Attempts(self._seconds, details, self._token)
        while True:
            call = continuation(attempts.details(), request)
            if not attempts.pause_after(call):
                return call

    def intercept_unary_stream(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        attempts = Attempts(self._seconds, details, self._token)
        return _RetriedStream(attempts, lambda: continuation(attempts.details(), request))

    def intercept_stream_unary(
        self, continuation: Callable[..., Any], details: grpc.ClientCallDetails, request_iterator: Any
    ) -> Any:
        if isinstance(request_iterator, Iterator):
            self._token.renew()  # The call cannot be made again with another one.
            return continuation(details, request_iterator)
        attempts = Attempts(self._seconds, details, self._token)
        while True:
            call = continuation(attempts.details(), iter(request_iterator))
            if not attempts.pause_after(call):
                return call


class _RetriedStream:
    def __init__(self, attempts: Attempts, start: Callable[[], Any]) -> None:
        self._attempts = attempts
        self._start = start
        self._call = start()
        self._begun = False
        self._cancelled = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            try:
                message = next(self._call)
            except grpc.RpcError as error:
                if self._begun or self._cancelled or not self._attempts.pause_after(error):
                    raise
                self._call = self._start()
                if self._cancelled:  # in the pause, when there was only the call that had failed
                    self._call.cancel()
            else:
                self._begun = True
                return message

    def cancel(self) -> bool:
        self._cancelled = True
        return self._call.cancel()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)
