"""`slime-rollout`: serves rollouts, answers the prompts of a file, shows and changes the engines of a run."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from slime.rollout.engines.sglang.flags import SGLANG_FLAGS
from slime.rollout.fleet import engines_command
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.addresses import parse_address
from slime.types.errors import ConfigError, InvalidSetting, SlimeError
from slime.types.programs import command_list, run_printing, wrong_command
from slime.types.rpc import RpcSettings
from slime.types.rpc.status import place_in_plugin
from slime.types.settings import REQUIRED, parse, setting

if TYPE_CHECKING:
    from slime.rollout.generate.openai_server import OpenAIAddress

COMMANDS = {
    "serve": "Lease prompts from a buffer, generate and score samples, and complete their groups there",
    "generate": "Generate and score samples for the prompts of a file, without a buffer",
    "engines": "List the engines of a run, and let external ones join and leave it",
}
# Settings that most calls of `generate` and `serve` set, by task.
FIRST_OF_GENERATE = {
    "Model and prompts": (
        "hf_checkpoint", "prompts", "input_key", "label_key", "metadata_key", "apply_chat_template",
    ),
    "Responses": (
        "n_samples_per_prompt", "rollout_max_response_len", "rollout_temperature", "rollout_top_p", "rollout_stop",
        "custom_generate_function_path",
    ),
    "Reward": ("rm_type", "custom_rm_path"),
    "Engines": (
        "rollout_external_engine_addrs", "rollout_engine", "rollout_num_gpus_per_engine", "sglang_server_concurrency",
    ),
    "A server in place of engines": ("openai_url", "openai_model", "openai_api_key_file"),
    "Output": ("output", "overwrite"),
}  # fmt: skip
FIRST_OF_SERVE = {
    "Model and buffer": ("hf_checkpoint", "buffer_address", "apply_chat_template"),
    "Responses": (
        "rollout_max_response_len", "rollout_temperature", "rollout_function_path", "custom_generate_function_path",
    ),
    "Reward": ("rm_type", "custom_rm_path", "dynamic_sampling_filter_path"),
    "Engines": FIRST_OF_GENERATE["Engines"],
    "Service": ("host", "port", "token_file", "tls_cert", "tls_key"),
}  # fmt: skip
USAGE = f"""usage: slime-rollout COMMAND ...

{command_list(COMMANDS)}

`slime-rollout COMMAND --help` describes a command."""


@dataclass(kw_only=True)
class ServeSettings:
    """Service."""

    buffer_address: str = setting(REQUIRED, "Address of the buffer service", metavar="HOST:PORT", parse=parse_address)


@dataclass(kw_only=True)
class GenerateSettings:
    """Files."""

    prompts: str = setting(
        REQUIRED,
        "Prompts: a .jsonl, .jsonl.gz, .json, .csv or .parquet file, of which FILE@[a:b] takes rows a to b, or "
        "reasoning_gym:NAME?size=1000&seed=42; a name with another ending is read as JSON lines",
        metavar="FILE",
    )
    output: str = setting(
        REQUIRED,
        "File of samples to write: Parquet if its name ends in .parquet, one JSON object per line if it ends in "
        ".jsonl or has no ending. Until all prompts are answered, FILE.part holds the answers, and the same command "
        "goes on from there",
        metavar="FILE",
    )
    overwrite: bool = setting(
        False, "Replace the --output file if it is not empty, and begin afresh; without it such a file is refused"
    )
    input_key: str = setting("input", "Key of the prompt: text, or a list of chat messages")
    label_key: str = setting("label", "Key of the label")
    metadata_key: str = setting("metadata", "Key of the metadata object")
    openai_url: str | None = setting(
        None,
        "Base URL of a server with OpenAI's protocol, such as http://HOST:PORT/v1, which answers in place of engines; "
        "its samples have no log-probs. --hf-checkpoint then needs no weights",
        metavar="URL",
    )
    openai_model: str | None = setting(None, "Name of the model at --openai-url", metavar="NAME")
    openai_api_key_file: str | None = setting(
        None, "File with the key for --openai-url (default: the variable OPENAI_API_KEY)", metavar="FILE"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 after a clean end, 2 for settings that cannot work, 1 otherwise, 141 if its reader left."""
    return run_printing("slime-rollout", partial(_run, list(sys.argv[1:] if argv is None else argv)))


def _run(words: list[str]) -> int:
    commands = {"serve": _serve, "generate": _generate, "engines": engines_command.main}
    if not words or words[0] not in commands:
        wants_help = bool(words) and words[0] in ("-h", "--help")
        if wants_help:
            print(USAGE)
            return 0
        print(f"slime-rollout: error: {wrong_command(words, commands)}", file=sys.stderr)
        return 2
    # SIGTERM ends a command as Ctrl-C does, so that engines are stopped.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return commands[words[0]](words[1:])
    except ConfigError as error:
        print(f"slime-rollout: error: {error}", file=sys.stderr)
        return 2
    except SlimeError as error:
        print(f"slime-rollout: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        place = place_in_plugin(error)
        if not place:
            raise
        print(f"slime-rollout: {type(error).__name__}: {error}{place}", file=sys.stderr)
        return 1


def _serve(argv: Sequence[str]) -> int:
    settings, rpc, where = parse(
        argv,
        RolloutSettings,
        RpcSettings,
        ServeSettings,
        prog="slime-rollout serve",
        description="Serve rollouts over gRPC: generate and score samples.",
        families=[SGLANG_FLAGS],
        first=FIRST_OF_SERVE,
    )
    from slime.rollout.service import serve

    with serve(settings, rpc, buffer_address=where.buffer_address) as service:
        print(f"listening on {service.address}", flush=True)
        if service.token_file is not None:
            print(f"callers need the token in {service.token_file}", flush=True)
        stop = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stop.set())
        # The system may deliver a signal to another thread, which does not end a wait of this one.
        while not stop.wait(0.5):
            pass
    return 0


def _generate(argv: Sequence[str]) -> int:
    settings, files = parse(
        argv,
        RolloutSettings,
        GenerateSettings,
        prog="slime-rollout generate",
        description="Answers and scores the prompts of a file.",
        families=[SGLANG_FLAGS],
        first=FIRST_OF_GENERATE,
    )
    from slime.rollout.generate.offline import generate_file

    server = _server(files)
    metrics = generate_file(
        settings,
        files.prompts,
        Path(files.output),
        input_key=files.input_key,
        label_key=files.label_key,
        metadata_key=files.metadata_key,
        overwrite=files.overwrite,
        server=server,
    )
    print(f"wrote {files.output}", file=sys.stderr)
    print(json.dumps(metrics, indent=2))
    return 0


def _server(files: GenerateSettings) -> OpenAIAddress | None:
    if files.openai_url is not None and files.openai_model is not None:
        from slime.rollout.generate.openai_server import OpenAIAddress

        return OpenAIAddress(files.openai_url, files.openai_model, files.openai_api_key_file)
    if files.openai_url is not None:
        raise InvalidSetting.requires("--openai-url", "--openai-model NAME")
    for flag, value in (("--openai-model", files.openai_model), ("--openai-api-key-file", files.openai_api_key_file)):
        if value is not None:
            raise InvalidSetting.requires(flag, "--openai-url URL")
    return None


if __name__ == "__main__":
    sys.exit(main())
