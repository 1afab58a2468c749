"""The process of an embedded engine: loads the model, announces its port, and serves until it or its parent ends."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.doors import check_exposure, listen
from slime.rollout.engines.embedded.kind import Embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.keys import take_key
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable, PortInUse, SlimeError
from slime.types.rpc.garbage import spare_long_lived
from slime.types.settings import parse

if TYPE_CHECKING:
    from slime.rollout.engines.embedded.endpoints.server import EngineServer

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 2 for wrong flags or files or a port in use, 1 for other errors."""
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
    """Serves until SIGTERM or SIGINT."""
    if options.parent_fd is not None:
        threading.Thread(target=_end_with_parent, args=(options.parent_fd,), name="parent", daemon=True).start()
    missing = Embedded().missing()
    if missing:
        raise NotAvailable.not_installed("the embedded engine", missing[0], "slime-rollout[embedded]")
    from slime.rollout.engines.embedded.model.loading import check_directory

    api_key = take_key(options.api_key_file, "--api-key-file")
    check_exposure(options.host, api_key, "--host", "--api-key-file")
    check_directory(options.model_path)
    listener = _listen(options.host, options.port)
    _serve_model(options, listener, api_key)


def _serve_model(options: EmbeddedOptions, listener: socket.socket, api_key: str | None) -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    from slime.rollout.engines.embedded.endpoints.server import EngineServer
    from slime.rollout.engines.embedded.model.loading import load
    from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler

    transformers_logging.disable_progress_bar()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.deterministic:
        torch.use_deterministic_algorithms(True)
    loaded = load(options)
    scheduler = Scheduler(loaded, options)
    server = EngineServer(loaded, scheduler, options, api_key)
    spare_long_lived()
    asyncio.run(_serve_until_signal(server, options, listener))


async def _serve_until_signal(server: EngineServer, options: EmbeddedOptions, listener: socket.socket) -> None:
    stop_requested = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_requested.set)
    runner = server.connections.runner(server.application())
    await runner.setup()
    # The socket has been listening since before the model was loaded, so that early clients wait.
    await server.connections.serve(runner, listener)
    port = listener.getsockname()[1]
    log.info("%s is served at http://%s:%d", server.name, options.host, port)
    _announce(options.announce_fd, {"port": port})
    try:
        await stop_requested.wait()
    finally:
        await runner.cleanup()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except OSError as error:
        message = f"cannot listen on {host}:{port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(message, field="--port", value=port, expected="a free port") from error
        raise InvalidSetting(message, field="--host", value=host, expected="an address of this machine") from error


def _end_with_parent(descriptor: int) -> None:
    # Nobody writes to this pipe: reading ends when its last write end is closed, in whatever way the parent ended.
    while os.read(descriptor, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    # A step of a large model, or loading one, may keep the main thread from handling the signal.
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
