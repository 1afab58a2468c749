"""The supervisor's records of service processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from slime.launcher.services.watch import HealthProbe, WatchedProcess
from slime.types.errors import SlimeError
from slime.types.rpc import RpcSettings


class Repeats(Protocol):
    """Decides which failed calls are repeated: `slime.launcher.faults.repairs.Repairs`."""

    def wait_until_whole(self) -> int: ...
    def explain(self, error: SlimeError, count: int) -> bool: ...
    def stop(self) -> None: ...


@dataclass
class Start:
    """The arguments of a service's start, to start it again."""

    module: str
    settings: Any
    rpc: RpcSettings
    options: dict[str, Any]


@dataclass
class Process:
    name: str
    actor: Any
    watch: Any
    host: str
    # Options of Ray.
    options: dict[str, Any] = field(default_factory=dict)
    # True once the service has answered a call.
    answered: bool = False
    start: Start | None = None
    address: str = ""
    watched: WatchedProcess | None = None
    probe: HealthProbe | None = None
