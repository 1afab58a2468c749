"""Reads what a child process writes to its pipe, with a deadline."""

from __future__ import annotations

import json
import os
import selectors
import time
from typing import Any


def read_json_line(descriptor: int, deadline: float) -> dict[str, Any] | None:
    """Returns the JSON object of the next line, {} if the pipe was closed before its end, None at the deadline.

    descriptor: the pipe's end to read from. deadline: of time.monotonic. The child must write nothing after this line
    before it is answered, if at all: what follows in the same read would be taken as part of the line.
    """
    received = b""
    # Not select.select: it refuses descriptors of 1,024 and above, which a service with many connections has.
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
