"""The process: loads, announces its port, serves until it is told to stop or its parent is gone."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.types.errors import ConfigError, InvalidSetting, PortInUse, SlimeError
from slime.types.settings import parse

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 2 for wrong flags, files or a port in use."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    announce_fd: int | None = None
    try:
        (options,) = parse(
            argv, EmbeddedOptions, prog="python -m slime.rollout.engines.embedded",
            description="A generation server with SGLang's HTTP protocol, over transformers.",
        )  # fmt: skip
        announce_fd = options.announce_fd
        serve(options)
        return 0
    except SlimeError as error:
        print(f"embedded engine: error: {error}", file=sys.stderr)
        _announce(announce_fd, {"error": _as_dict(error)})
        return 2 if isinstance(error, (ConfigError, PortInUse)) else 1


def serve(options: EmbeddedOptions) -> None:
    """Returns after SIGTERM or SIGINT."""
    if options.parent_fd is not None:
        threading.Thread(target=_end_with_parent, args=(options.parent_fd,), name="parent", daemon=True).start()
    from slime.rollout.engines.embedded.loading import check_directory

    check_directory(options.model_path)
    listener = _listen(options.host, options.port)
    _serve_model(options, listener)


def _serve_model(options: EmbeddedOptions, listener: socket.socket) -> None:
    import torch
    from aiohttp import web
    from transformers.utils import logging as transformers_logging

    from slime.rollout.engines.embedded.loading import load
    from slime.rollout.engines.embedded.scheduler import Scheduler
    from slime.rollout.engines.embedded.server import EngineServer

    transformers_logging.disable_progress_bar()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    loaded = load(options)
    scheduler = Scheduler(loaded, options)
    server = EngineServer(loaded, scheduler, options)

    async def announce(application: web.Application) -> None:
        port = listener.getsockname()[1]
        log.info("%s is served at http://%s:%d", server.name, options.host, port)
        _announce(options.announce_fd, {"port": port})

    application = server.application()
    application.on_startup.append(announce)
    # The listener has been listening since before the model was loaded: a client that comes early waits.
    # handler_cancellation: a client that goes away takes its sequences with it.
    web.run_app(
        application, sock=listener, print=None, access_log=None, shutdown_timeout=1.0, handler_cancellation=True
    )


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Connections of an engine that has just ended do not keep its port from the next one.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        message = f"cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(message, field="--port", value=port, expected="a free port") from error
        raise InvalidSetting(message, field="--host", value=host, expected="an address of this machine") from error
    return listener


def _end_with_parent(descriptor: int) -> None:
    # Nobody writes to this pipe: reading ends when its last write end is closed, however the parent went.
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # A step of a large model, or loading one, may keep the main thread from the signal.
    threading.Event().wait(5.0)
    os._exit(1)


def _announce(descriptor: int | None, message: dict[str, Any]) -> None:
    if descriptor is not None:
        os.write(descriptor, (json.dumps(message) + "\n").encode())
        os.close(descriptor)


def _as_dict(error: SlimeError) -> dict[str, str]:
    return {
        "type": type(error).__name__, "message": error.message, "field": error.field, "value": error.value,
        "expected": error.expected,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
