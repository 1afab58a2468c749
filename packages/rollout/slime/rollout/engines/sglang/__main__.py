"""The parent process of one SGLang server: reserves a port, announces when it serves, and ends it with its own parent.

    python -m slime.rollout.engines.sglang --announce-fd N --parent-fd M --host HOST -- COMMAND ARGUMENT ...

The server is in the process group of this process, and gets `--host` and `--port`, with `--bootstrap` also a port at
which engines that decode reach one that does prefill. When it has generated a token, one JSON line `{"port": N}` is
written to `announce-fd`. SGLang does not watch its parent, so this process ends the group at the end of file of the
pipe `parent-fd`.

SGLang reads its API key from an argument, which every user of the machine could read, or from a file of arguments. The
key in the environment of this process is passed in such a file, which only this user can read and which is removed when
the server serves.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence

from slime.rollout.engines.keys import bearer, take_key

GRACE_SECONDS = 30.0
PROBE_SECONDS = 60.0
BETWEEN_PROBES = 0.5
ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the server; 128 plus the signal's number if a signal ended it."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--")
    parser = argparse.ArgumentParser(prog="python -m slime.rollout.engines.sglang")
    parser.add_argument("--announce-fd", type=int, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--bootstrap", action="store_true")
    options = parser.parse_args(words[:split])

    api_key = take_key(None, "")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserve_port(options.host)).getsockname()[1]
        more = stack.enter_context(key_file(api_key))
        if options.bootstrap:
            bootstrap = stack.enter_context(reserve_port(options.host)).getsockname()[1]
            more = [*more, "--disaggregation-bootstrap-port", str(bootstrap)]
        server = subprocess.Popen([*words[split + 1 :], *more, "--host", options.host, "--port", str(port)])
        # A signal to the process group reaches the server directly; one to this process alone is passed on.
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        threading.Thread(target=end_with_parent, args=(options.parent_fd,), name="parent", daemon=True).start()
        ready = serves(server, ANY_ADDRESS.get(options.host, options.host), port, api_key)
    if ready:
        os.write(options.announce_fd, (json.dumps({"port": port}) + "\n").encode())
    os.close(options.announce_fd)
    code = server.wait()
    return code if code >= 0 else 128 - code


def reserve_port(host: str) -> socket.socket:
    """Returns a bound socket that does not listen: the system gives its port to nobody else, and with SO_REUSEADDR the
    server can still bind it.

    SGLang binds its port only after loading the model, minutes later, when a port found free now may be taken.
    """
    reserved = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((host, 0))
    except OSError:
        reserved.close()
        raise
    return reserved


@contextlib.contextmanager
def key_file(api_key: str | None) -> Iterator[list[str]]:
    """Yields arguments that name a file with SGLang's API key, present until the block ends; none without a key."""
    if api_key is None:
        yield []
        return
    # Only this user can read a temporary file. A key holds no character that needs escaping in YAML.
    with tempfile.NamedTemporaryFile("w", prefix="slime-sglang-", suffix=".yaml") as file:
        file.write(f'api-key: "{api_key}"\n')
        file.flush()
        yield ["--config", file.name]


def serves(server: subprocess.Popen[bytes], host: str, port: int, api_key: str | None = None) -> bool:
    """Waits until the server has generated a token. Returns False if it ends before. The parent sets the deadline."""
    while server.poll() is None:
        if makes_a_token(host, port, api_key):
            return True
        time.sleep(BETWEEN_PROBES)
    return False


def makes_a_token(host: str, port: int, api_key: str | None = None) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_SECONDS)
    try:
        connection.request("GET", "/health_generate", headers=bearer(api_key))
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def end_with_parent(descriptor: int) -> None:
    """Ends the process group with the parent. Nobody writes to this pipe, so reading ends when the parent is gone, for
    whatever reason. Never returns."""
    while os.read(descriptor, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
