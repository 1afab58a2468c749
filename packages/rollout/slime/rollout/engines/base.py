"""Interface of a running engine, whoever started it."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class RunningEngine(Protocol):
    """A server of SGLang's HTTP protocol. `EngineProcess` is one of ours, `HostedEngine` one that another process of
    this run has started, `RemoteEngine` one of someone else's."""

    name: str
    kind: str
    """The name of its `EngineKind`."""
    api_key: str | None
    """The key that calls must carry as `Authorization: Bearer`; None: none."""

    @property
    def url(self) -> str:
        """`http://host:port`, without a trailing slash."""
        ...

    def raise_if_dead(self) -> None:
        """Raises EngineError, naming the engine, its exit code and its last lines, if its process has ended."""
        ...

    def stop(self, grace_seconds: float | None = None) -> None:
        """Ends the engine if it is ours to end, by force after so long (None: as long as its kind needs); harmless when
        called again."""
        ...


class RemoteEngine:
    """An engine that somebody else has started and will end."""

    def __init__(self, name: str, url: str, kind: str = "sglang", api_key: str | None = None) -> None:
        self.name = name
        self.api_key = api_key
        self.kind = kind
        self.url = url.rstrip("/")

    def raise_if_dead(self) -> None:
        return None

    def stop(self, grace_seconds: float | None = None) -> None:
        return None


class HostedEngine(RemoteEngine):
    """An engine of this run, which the host of engines on its node watches and ends."""
