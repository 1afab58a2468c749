"""Reads what a child process writes to its pipe, with a deadline."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any


def read_json_line(descriptor: int, deadline: float) -> dict[str, Any] | None:
    """Returns the object of the next line, {} if the pipe was closed without one, None at the deadline.

    deadline: of time.monotonic. The child writes one line and waits for an answer, or no more at all.
    """
    received = b""
    # Not select.select, which refuses descriptors from 1,024 on, as a service with many connections has them.
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                return None
            chunk = os.read(descriptor, 65536)
            if not chunk:
                return {}
            received += chunk
    found: dict[str, Any] = json.loads(received)
    return found
