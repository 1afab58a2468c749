"""Ports for servers that are started later, or again, with a port that is known before."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# Above those of Ray's workers, 10002 to 19999.
LOWEST = 20_000
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def kept_port() -> int:
    """A free port below those that the system gives out itself: no other process gets it by asking for any port."""
    given_out = int(RANGE.read_text().split()[0]) if RANGE.exists() else 49_152
    candidates = range(LOWEST, given_out) if given_out > LOWEST else range(1024, 65_536)
    for port in random.SystemRandom().sample(candidates, min(len(candidates), 100)):
        with socket.socket() as probe:
            # As servers do: connections that a killed one left in TIME_WAIT hold nobody up.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"none of 100 ports of 127.0.0.1 from {candidates[0]} to {candidates[-1]} was free")
