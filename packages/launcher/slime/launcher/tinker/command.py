"""`slime tinker`: serves a model to the `tinker` SDK, which trains and samples with it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.launcher.config.help import CommandParser
from slime.launcher.platform.signals import Terminated, terminate_as_interrupt
from slime.rollout.engines.keys import read_key
from slime.types.directories import path_errors
from slime.types.errors import ConfigError, InvalidSetting, PortInUse, SlimeError
from slime.types.rpc.token_files import LOCALHOST, publish, retract
from slime.types.scratch import ScratchDirectory
from slime.types.setting_values import named_path
from slime.types.settings import build

if TYPE_CHECKING:
    from slime.launcher.tinker.service import Served
    from slime.rollout.engines.base import RunningEngine

log = logging.getLogger(__name__)

# The SDK accepts only keys with this prefix.
PREFIX = "tml-"
VARIABLE = "TINKER_API_KEY"


def parser(command: str) -> CommandParser:
    reader = CommandParser(
        prog="slime tinker",
        description="Serves a model to the tinker SDK on this machine: training runs, optimizer steps, samples and "
        "checkpoints. LoRA adapters train, or all weights with --full-weights. Ctrl-C ends it.",
    )
    reader.add_argument(
        "--hf-checkpoint", required=True, metavar="MODEL", help="Hugging Face directory, or ORG/NAME on the Hub"
    )
    reader.add_argument(
        "--model-name", metavar="NAME",
        help="Another name by which clients may ask for the model (default: the directory alone)",
    )  # fmt: skip
    reader.add_argument("--port", type=int, default=8791, metavar="N", help="Port on the loopback; 0 takes a free one")
    reader.add_argument(
        "--output-dir", type=named_path, default=Path("runs/tinker"), metavar="DIR",
        help="Directory of the checkpoints",
    )  # fmt: skip
    reader.add_argument(
        "--api-key-file", metavar="FILE",
        help=f"File with the API key, which begins with {PREFIX} (default: ${VARIABLE}, else a new key in a file that "
        "only this user can read)",
    )  # fmt: skip
    reader.add_argument("--max-models", type=int, default=2, metavar="N", help="Maximum number of models in training")
    reader.add_argument(
        "--keep-snapshots", type=int, default=4, metavar="N",
        help="Unnamed snapshots of a model that can be sampled from: the newest N",
    )  # fmt: skip
    reader.add_argument(
        "--full-weights", action="store_true",
        help="Train all weights of a model in place of a LoRA adapter; the rank and seed that clients ask for have no "
        "effect then",
    )  # fmt: skip
    reader.add_argument("--bf16", action="store_true", help="Compute in bfloat16; what trains stays float32")
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    try:
        options = parser(command).parse_strict(argv)
        for flag, minimum in (("port", 0), ("max_models", 1), ("keep_snapshots", 1)):
            if getattr(options, flag) < minimum:
                raise InvalidSetting.must_be(
                    f"--{flag.replace('_', '-')}", f"at least {minimum}", got=getattr(options, flag)
                )
        if options.port > 65535:
            raise InvalidSetting.must_be("--port", "at most 65535", got=options.port)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        with terminate_as_interrupt():
            serve(options)
    except Terminated as error:
        return 128 + error.signum
    except KeyboardInterrupt:
        return 130
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def serve(options: Any) -> None:
    """Serves until a signal. Raises ConfigError for a wrong flag, key or model, and what the engine's start raises."""
    from slime.launcher.cli.chat import model_directory
    from slime.rollout.doors import listen
    from slime.rollout.engines.gpus import visible_gpus
    from slime.rollout.engines.process import stop_all
    from slime.rollout.launch import start_engines
    from slime.rollout.settings.rollout import RolloutSettings

    user_key = api_key(options.api_key_file)
    directory = Path(model_directory(options.hf_checkpoint, "--hf-checkpoint")).resolve()
    try:
        listener = listen(LOCALHOST, options.port)
    except OSError as error:
        raise PortInUse(
            f"--port {options.port}: cannot listen on {LOCALHOST}: {error.strerror}; --port 0 takes a free port",
            field="--port", value=options.port,
        ) from None  # fmt: skip
    values: dict[str, Any] = {
        "hf_checkpoint": str(directory), "rollout_engine": "embedded",
        "rollout_engine_dtype": "bfloat16" if options.bf16 else "float32",
    }  # fmt: skip
    if visible_gpus():
        values["rollout_num_gpus"] = 1
    with contextlib.ExitStack() as stack:
        stack.callback(listener.close)
        # Imports torch, which takes seconds; wrong flags are refused before.
        from slime.launcher.tinker.paths import CheckpointStore
        from slime.launcher.tinker.service import FULL_WEIGHTS, Served

        with path_errors(options.output_dir, "--output-dir"):
            options.output_dir.mkdir(parents=True, exist_ok=True)
            scratch = ScratchDirectory(".snapshots-", str(options.output_dir))
        stack.callback(scratch.close)
        engines = start_engines(build(RolloutSettings, values))
        stack.callback(stop_all, engines)
        names = [options.hf_checkpoint, str(directory), *([options.model_name] if options.model_name else [])]
        served = Served(
            directory, tuple(dict.fromkeys(names)), 0, CheckpointStore(options.output_dir.resolve()), scratch.path,
            bf16=options.bf16, keep=options.keep_snapshots, full_weights=options.full_weights,
        )  # fmt: skip
        if options.full_weights:
            log.warning(FULL_WEIGHTS)
        asyncio.run(_serve(served, engines[0], listener, user_key, options.max_models))


def api_key(path: str | None) -> str | None:
    """Returns the key of a file, else that of the environment, else None. Raises InvalidSetting for another prefix."""
    found = read_key(path, "--api-key-file").strip() if path is not None else os.environ.get(VARIABLE) or None
    if found is not None and not found.startswith(PREFIX):
        where = "--api-key-file" if path is not None else VARIABLE
        raise InvalidSetting(f"{where}: the key must begin with {PREFIX}: the SDK accepts no other", field=where)
    return found


async def _serve(
    served: Served, engine: RunningEngine, listener: socket.socket, user_key: str | None, most_models: int
) -> None:
    from slime.launcher.tinker.models import Models
    from slime.launcher.tinker.sampling import Sampler, SamplerWeights
    from slime.launcher.tinker.server import TinkerServer
    from slime.launcher.tinker.service import Service
    from slime.rollout.engines.client import EngineClient

    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with EngineClient(engine.url, engine.name, api_key=engine.api_key) as client:
        length = (await client.server_info())["context_length"]
        served = dataclasses.replace(served, context_length=length)
        models = Models(most_models)
        sampler = Sampler(client, SamplerWeights(served.directory, "base"))
        key = user_key or PREFIX + secrets.token_urlsafe(32)
        server = TinkerServer(Service(served, models, sampler), LOCALHOST, key)
        runner = server.connections.runner(server.application())
        await runner.setup()
        await server.connections.serve(runner, listener)
        address = f"{LOCALHOST}:{listener.getsockname()[1]}"
        print(f"export TINKER_BASE_URL=http://{address}")
        path = publish(address, key) if user_key is None else None
        print(
            f"export {VARIABLE}=$(cat {shlex.quote(str(path))})"
            if path is not None
            else f"# {VARIABLE}: as it was given"
        )
        print(f"# base_model={json.dumps(served.names[0])}; checkpoints are below {served.store.root}", flush=True)
        try:
            await stopped.wait()
        finally:
            await runner.cleanup()
            if path is not None:
                retract(path, key)
