"""The parent process of one SGLang server: finds a port, announces when it serves, and ends it with its own parent.

    python -m slime.rollout.engines.sglang --announce-fd N --parent-fd M --host HOST -- COMMAND ARGUMENT ...

The server is in our process group. It gets `--host` and `--port`; into `announce-fd` goes one JSON line, `{"port": N}`,
when it has made a token. SGLang does not watch its parent: `parent-fd` is a pipe whose end of file ends the group.

SGLang takes its API key as an argument, which every user of the machine could read, or from a file of arguments: the
key in our environment reaches it by such a file, which only this user can read and which goes when the server serves.
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
    """Returns the exit code of the server; 128 and the signal's number where one ended it."""
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--")
    parser = argparse.ArgumentParser(prog="python -m slime.rollout.engines.sglang")
    parser.add_argument("--announce-fd", type=int, required=True)
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--host", required=True)
    options = parser.parse_args(words[:split])

    api_key = take_key(None, "")
    with reserve_port(options.host) as reserved, key_file(api_key) as more:
        port = reserved.getsockname()[1]
        server = subprocess.Popen([*words[split + 1 :], *more, "--host", options.host, "--port", str(port)])
        # A signal to the process group reaches the server by itself; one to this process is passed on.
        signal.signal(signal.SIGTERM, lambda *_: server.terminate())
        threading.Thread(target=end_with_parent, args=(options.parent_fd,), name="parent", daemon=True).start()
        ready = serves(server, ANY_ADDRESS.get(options.host, options.host), port, api_key)
    if ready:
        os.write(options.announce_fd, (json.dumps({"port": port}) + "\n").encode())
    os.close(options.announce_fd)
    code = server.wait()
    return code if code >= 0 else 128 - code


def reserve_port(host: str) -> socket.socket:
    """Binds a socket that does not listen: nobody is given its port, and with SO_REUSEADDR a server may take it.

    SGLang binds its port only after the model is loaded, minutes after one would have been found free.
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
    """Returns arguments that tell SGLang its API key without holding it; none without a key."""
    if api_key is None:
        yield []
        return
    # Only for this user, as mkstemp makes it; a key has no character that YAML reads otherwise.
    with tempfile.NamedTemporaryFile("w", prefix="slime-sglang-", suffix=".yaml") as file:
        file.write(f'api-key: "{api_key}"\n')
        file.flush()
        yield ["--config", file.name]


def serves(server: subprocess.Popen[bytes], host: str, port: int, api_key: str | None = None) -> bool:
    """Returns True once it has made a token, False when it has ended. How long that may take is the parent's to say."""
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
    """Never returns: nobody writes to this pipe, so reading ends when the parent is gone, however it went."""
    while os.read(descriptor, 1):
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
