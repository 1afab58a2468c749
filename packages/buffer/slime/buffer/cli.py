"""`slime-buffer serve`: a buffer as a process of its own, until SIGINT or SIGTERM; `slime-buffer token`."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from slime.buffer.settings import BufferSettings
from slime.types.errors import ConfigError, InvalidSetting, SlimeError
from slime.types.rpc import RpcSettings
from slime.types.rpc.auth import read_token
from slime.types.rpc.roles import Role, role_token
from slime.types.settings import REQUIRED, parse, setting

PROG = "slime-buffer"
USAGE = f"""usage: {PROG} serve [--prompt-data PATH] [--buffer-dir DIR] [--port N] ...
       {PROG} token {{{",".join(Role)}}} --token-file FILE

  serve   serve a data buffer over gRPC; serve --help lists all flags
  token   print the token of a role, derived from the service's own in FILE"""


@dataclass(kw_only=True)
class TokenSettings:
    """Token."""

    token_file: str = setting(REQUIRED, "file (mode 0600) with the token of the service", metavar="FILE")


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a clean stop, 2 for wrong settings, 1 for any other error of ours."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    try:
        if words[:1] == ["token"]:
            return print_token(words[1:])
        if words[:1] != ["serve"]:
            raise InvalidSetting(f"got {words[0]!r}, expected serve or token; {USAGE}" if words else USAGE)
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
        if service.token_file is not None:
            print(f"callers need the token in {service.token_file}", flush=True)
        asked.wait()
    return 0


def print_token(words: Sequence[str]) -> int:
    if not words or words[0] not in [*Role]:
        raise InvalidSetting(f"token: expected one of {', '.join(Role)} first; {USAGE}", field="token")
    (settings,) = parse(words[1:], TokenSettings, prog=f"{PROG} token {words[0]}", description="Print a role's token.")
    token = read_token(RpcSettings(token_file=settings.token_file))
    print(role_token(str(token), Role(words[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
