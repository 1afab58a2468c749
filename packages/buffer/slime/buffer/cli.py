"""`slime-buffer serve`: a buffer as a process of its own, until SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence

from slime.buffer.settings import BufferSettings
from slime.types.errors import ConfigError, InvalidSetting, SlimeError
from slime.types.rpc import RpcSettings
from slime.types.settings import parse

PROG = "slime-buffer"
USAGE = f"usage: {PROG} serve [--prompt-data PATH] [--buffer-dir DIR] [--port N] ...  (serve --help lists all flags)"


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a clean stop, 2 for wrong settings, 1 for any other error of ours."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        if words[:1] != ["serve"]:
            raise InvalidSetting(f"got {words[0]!r}, expected serve; {USAGE}" if words else USAGE)
        settings, rpc = parse(
            words[1:], BufferSettings, RpcSettings, prog=f"{PROG} serve", description="Serve a data buffer over gRPC."
        )
        return serve_until_signal(settings, rpc)
    except SlimeError as error:
        print(f"{PROG}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def serve_until_signal(settings: BufferSettings, rpc: RpcSettings) -> int:
    from slime.buffer.service import serve

    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    with serve(settings, rpc) as service:
        print(f"listening on {service.address}", flush=True)
        asked.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
