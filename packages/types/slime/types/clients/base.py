"""Base of all clients: a channel and a writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from slime.types.errors import SlimeError
from slime.types.rpc import RpcSettings, connect
from slime.v1 import buffer_pb2


@dataclass(frozen=True)
class Writer:
    """A run and its incarnation, which grows by one with each start. next_step: the step that the buffer seals next."""

    run_id: str
    incarnation: int
    next_step: int = 0

    def to_proto(self) -> buffer_pb2.Writer:
        return buffer_pb2.Writer(run_id=self.run_id, incarnation=self.incarnation)


class Client:
    """A connection to the service at `address`; safe to use from several threads."""

    stub: Callable[[Any], Any]

    def __init__(self, address: str, writer: Writer | None = None, settings: RpcSettings | None = None) -> None:
        self.address = address
        self.writer = writer
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
