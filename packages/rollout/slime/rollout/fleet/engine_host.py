"""Hosts the engines of one node where a run has engines on several nodes; the rollout service calls them over HTTP.

Where one engine spans several nodes, each host runs a part of it, and the part on the first node serves.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from slime.rollout.engines.base import HostedEngine, RunningEngine
from slime.rollout.engines.kind import EngineNode
from slime.rollout.engines.process import ANY_ADDRESS, stop_all
from slime.rollout.launch import start_engines
from slime.rollout.prompts.tokenizer import check_directory
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import EngineError
from slime.types.rpc import RpcSettings

POLL_SECONDS = 0.1


class EngineHost:
    """Holds started engines until `stop`.

    address: the address of this node, under which others reach its engines. serving: False for a part of an engine that
    another node serves. engines: handles by which the rollout service reaches the engines, in order.
    """

    def __init__(self, started: Sequence[RunningEngine], address: str, *, serving: bool = True) -> None:
        self.address = address
        self.engines = [
            HostedEngine(engine.name, reached_at(engine.url, address), engine.kind, engine.api_key)
            for engine in (started if serving else ())
        ]
        self._started = list(started)
        self._stopping = threading.Event()

    def watch(self) -> None:
        """Returns once the engines are stopped. Raises EngineError with an engine's last lines as soon as it dies."""
        while not self._stopping.wait(POLL_SECONDS):
            for engine in self._started:
                try:
                    engine.raise_if_dead()
                except EngineError as error:
                    raise EngineError(
                        f"on {self.address}: {error.message}",
                        field=error.field, value=error.value, expected=error.expected,
                    ) from error  # fmt: skip

    def stop(self, grace_seconds: float = 5.0) -> None:
        """Stops all engines at the same time, each within the time that its kind needs. Safe to call twice.

        grace_seconds: ignored, because a host serves no calls that could still be running.
        """
        self._stopping.set()
        stop_all(self._started)


def reached_at(url: str, host: str) -> str:
    """Returns the URL by which other nodes reach the engine at `url`. host: the address of this node.

    The URL of an engine that listens on all addresses names the loopback; `host` replaces it.
    """
    parts = urlsplit(url)
    if parts.hostname not in ANY_ADDRESS.values():
        return url
    return f"http://{f'[{host}]' if ':' in host else host}:{parts.port}"


def serve(
    settings: RolloutSettings,
    rpc: RpcSettings,
    *,
    first: Mapping[str, int] | None = None,
    node: EngineNode | None = None,
) -> EngineHost:
    """Starts the engines of this node, and returns when they are ready.

    settings: with this node's share of GPUs and engines. first, node: see `start_engines`.
    Raises the errors of `start_engines`; then no engine is left running.
    """
    check_directory(settings.hf_checkpoint)
    return EngineHost(start_engines(settings, first, node), rpc.host, serving=node is None or node.rank == 0)
