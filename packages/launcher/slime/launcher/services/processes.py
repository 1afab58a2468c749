"""The supervisor's records of service processes, and the last lines of their logs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slime.launcher.services.watch import HealthProbe, WatchedProcess
from slime.types.errors import SlimeError
from slime.types.rpc import RpcSettings

# The most of a log that is read: it may be larger than the memory.
TAIL_BYTES = 64 << 10


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


def last_lines(log: Path, count: int) -> str:
    """Returns the last lines of a log, each on a line of its own that begins with "|"; "" if there are none."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()[-count:]
    return "".join(f"\n    | {line}" for line in [f"last lines of {log}:", *lines]) if lines else ""
