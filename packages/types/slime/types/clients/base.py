"""Base of all clients: a channel and a writer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar, cast

from google.protobuf.descriptor import FieldDescriptor

from slime.types.errors import DeadlineExceeded, InvalidField, SlimeError
from slime.types.rpc import RpcSettings, connect
from slime.v1 import buffer_pb2

P = ParamSpec("P")
M = TypeVar("M")
# For a call that may last as long as a run; gRPC needs some deadline.
NO_DEADLINE = 10.0 * 365 * 86400


def build(kind: Callable[P, M], *_: P.args, **fields: P.kwargs) -> M:
    """Returns a message of `kind` with these fields. Raises InvalidField naming one that cannot hold its value."""
    make: Any = kind
    try:
        return cast(M, make(**fields))
    except (TypeError, ValueError):
        for name, value in fields.items():
            try:
                make(**{name: value})
            except (TypeError, ValueError) as error:
                raise InvalidField(name, repr(value), f"{_kind_of(kind, name)} ({error})") from None
        raise


def _kind_of(message: Any, field: str) -> str:
    """Words what a field of a message takes."""
    found = message.DESCRIPTOR.fields_by_name.get(field)
    kind = None if found is None else found.cpp_type
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32):
        return "an integer of 32 bits"
    if kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64):
        return "an integer of 64 bits"
    if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return "a number"
    return "text that UTF-8 can hold" if kind == FieldDescriptor.CPPTYPE_STRING else "another value"


@dataclass(frozen=True)
class Writer:
    """A run and its incarnation, which grows by one with each start. next_step: the step that the buffer seals next."""

    run_id: str
    incarnation: int
    next_step: int = 0

    def to_proto(self) -> buffer_pb2.Writer:
        return build(buffer_pb2.Writer, run_id=self.run_id, incarnation=self.incarnation)


class Client:
    """A connection to the service at `address`; safe to use from several threads."""

    stub: Callable[[Any], Any]

    def __init__(self, address: str, writer: Writer | None = None, settings: RpcSettings | None = None) -> None:
        self.address = address
        self.writer = writer
        settings = settings or RpcSettings()
        self._longest_silence = settings.call_timeout_seconds
        self._channel = connect(address, settings)
        self._stub = type(self).stub(self._channel)

    def close(self) -> None:
        self._channel.close()

    def is_serving(self, timeout: float) -> bool:
        """Returns whether the service answers its health check within `timeout` seconds."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        try:
            answer = health_pb2_grpc.HealthStub(self._channel).Check(health_pb2.HealthCheckRequest(), timeout=timeout)
        except SlimeError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _writer(self) -> buffer_pb2.Writer:
        return self.writer.to_proto() if self.writer is not None else buffer_pb2.Writer()

    def _call(self, name: str, request: Any, timeout: float | None = None) -> Any:
        return getattr(self._stub, name)(request, timeout=timeout)

    def _stream(self, name: str, request: Any, timeout: float | None = None) -> Iterator[Any]:
        """Yields the messages of a server stream; closing the iterator cancels the call."""
        call = getattr(self._stub, name)(request, timeout=timeout)
        try:
            yield from call
        finally:
            call.cancel()

    def _long_stream(self, name: str, request: Any) -> Iterator[Any]:
        """Yields the messages of a server stream that may take any time, if each comes within the deadline of a call.

        Raises DeadlineExceeded.
        """
        call = getattr(self._stub, name)(request, timeout=NO_DEADLINE)
        patience = _Patience(call.cancel, self._longest_silence)
        try:
            while True:
                with patience:
                    message = next(call, None)
                if message is None:
                    return
                yield message
        except SlimeError:
            if not patience.lost:
                raise
            raise DeadlineExceeded(
                f"{self.address}/{name}: no answer within {self._longest_silence:g} s", field=self.address
            ) from None
        finally:
            patience.end()
            call.cancel()


class _Patience:
    """Calls `give_up` in another thread if a `with` block takes longer than `seconds`; the blocks may be many."""

    def __init__(self, give_up: Callable[[], object], seconds: float) -> None:
        self.lost = False
        self._give_up = give_up
        self._seconds = seconds
        self._since: float | None = None
        self._over = threading.Event()
        # One thread for all blocks: to start one for each message would cost more than the message.
        threading.Thread(target=self._watch, name="patience", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._since = None

    def end(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        left = self._seconds
        while not self._over.wait(left):
            since = self._since
            left = self._seconds if since is None else since + self._seconds - time.monotonic()
            if left <= 0:
                self.lost = True
                self._give_up()
                return
