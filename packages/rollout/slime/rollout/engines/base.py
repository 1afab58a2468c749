"""Interface of running engines, and the engines that this process did not start itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class RunningEngine(Protocol):
    """A server of SGLang's HTTP protocol: an `EngineProcess` that this process started, a `HostedEngine` that another
    process of this run started, or a `RemoteEngine` from outside the run."""

    name: str
    kind: str
    """The name of its `EngineKind`."""
    api_key: str | None
    """The key that calls must carry as `Authorization: Bearer`; None where no key is required."""

    @property
    def url(self) -> str:
        """`http://host:port`, without a trailing slash."""
        ...

    def raise_if_dead(self) -> None:
        """Raises EngineError, naming the engine, its exit code and its last lines, if its process has ended."""
        ...

    def stop(self, grace_seconds: float | None = None) -> None:
        """Stops the engine if this process started it, by force after `grace_seconds` (None: the default of its kind).
        Safe to call twice."""
        ...


class RemoteEngine:
    """An engine that was started outside this process, which therefore does not stop it."""

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
    """An engine of this run on another node, whose `EngineHost` watches and stops it."""
