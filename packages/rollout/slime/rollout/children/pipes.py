"""Reads what a child process writes to its pipe, with a deadline."""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any


def read_json_line(descriptor: int, deadline: float) -> dict[str, Any] | None:
    """Returns the object of the next line, {} if the pipe was closed without one, None at the deadline.

    deadline: of time.monotonic. The child writes one line and waits for an answer, or no more at all.
    """
    received = b""
    while not received.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        chunk = os.read(descriptor, 65536)
        if not chunk:
            return {}
        received += chunk
    found: dict[str, Any] = json.loads(received)
    return found
