"""Known models by name (`--model-type qwen3-4B`), and the shell files that set MODEL_ARGS and CKPT_ARGS.

`models/NAME.json` holds what matters of the config.json that was published with a model; `scripts/models/NAME.sh` is
made from it.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from slime.converters.megatron.args import PRECISION, check_model_args, parse_model_args, render_flags
from slime.converters.megatron.flags import table
from slime.converters.settings import ModelArgsSettings
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile
from slime.types.files import check_own_file, write_whole

Config = Mapping[str, Any]
READ_ARRAY = 'source "$1" >/dev/null && printf "%s\\0" "${MODEL_ARGS[@]}"'
SECONDS = 30.0
WIDTH = 3


def model_names() -> list[str]:
    """Returns the names that --model-type takes, those of a family by size."""
    names = (file.name.removesuffix(".json") for file in _directory().iterdir() if file.name.endswith(".json"))
    return sorted(names, key=lambda name: [_number_or_text(part) for part in re.split(r"(\d+(?:\.\d+)?)", name)])


def _number_or_text(part: str) -> tuple[float, str]:
    return (float(part), "") if part[:1].isdigit() else (0.0, part.lower())


def _directory() -> Any:
    return resources.files("slime.converters").joinpath("models")


def model_config(name: str) -> dict[str, Any]:
    """Returns the config of a known model; case does not matter. Raises InvalidSetting naming the nearest name."""
    names = {known.lower(): known for known in model_names()}
    known = names.get(name.lower().removesuffix(".sh"))
    if known is None:
        raise InvalidSetting.one_of("--model-type", names.values(), got=name)
    text = _directory().joinpath(f"{known}.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(text)
    return config


def model_flags(config: Config) -> list[str]:
    """Returns the command line, MODEL_ARGS, of a model: what its family says of it, its tokenizer and its precision."""
    from slime.converters.families import find_family

    args = find_family(config).arguments(config)
    words = render_flags({**args, "add_position_embedding": False, "tokenizer_type": "HuggingFaceTokenizer"})
    dtype = str(config.get("torch_dtype", config.get("dtype", ""))).removeprefix("torch.")
    return [*words, *(PRECISION if dtype == "bfloat16" else ())]


def script(config: Config, *, name: str, checkpoint: str) -> str:
    """Returns a shell file that sets MODEL_ARGS and CKPT_ARGS.

    name: what the comment calls the model; checkpoint: its directory, unless HF_CHECKPOINT is set.
    """
    lines = [
        f"# {name}, from its config.json by `slime-convert model-args`.",
        "MODEL_ARGS=(",
        *_one_flag_a_line(model_flags(config)),
        ")",
        "# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.",
        "CKPT_ARGS=(",
        f'{" " * WIDTH}--hf-checkpoint "${{HF_CHECKPOINT:-{checkpoint}}}"',
        f'{" " * WIDTH}${{MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}}',
        ")",
    ]
    return "\n".join(lines) + "\n"


def _one_flag_a_line(words: Sequence[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if word.startswith("--"):
            lines.append(" " * WIDTH + word)
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def known_script(name: str) -> str:
    """Returns the text of scripts/models/NAME.sh."""
    config = model_config(name)
    repository = str(config["_name_or_path"])
    return script(config, name=repository, checkpoint=repository.split("/")[-1])


def read_script(path: str | Path) -> list[str]:
    """Runs a shell file in bash and returns its MODEL_ARGS. Raises MissingFile, InvalidFile."""
    if not Path(path).is_file():
        raise MissingFile(f"no such file {path}", field="--check", value=str(path))
    try:
        done = subprocess.run(
            ["bash", "-c", READ_ARRAY, "bash", str(Path(path).resolve())],
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except FileNotFoundError:
        raise MissingFile("bash is not installed; it reads model scripts", field="--check", value="bash") from None
    except subprocess.TimeoutExpired:
        raise InvalidFile(f"{path}: bash did not end in {SECONDS:g} s", field="--check", value=str(path)) from None
    if done.returncode:
        reason = done.stderr.strip() or f"bash ended with exit code {done.returncode}"
        raise InvalidFile(f"{path}: {reason}", field="--check", value=str(path), expected="a shell file")
    words = done.stdout.split("\0")[:-1]
    if not any(words):
        raise InvalidFile(f"{path} sets no MODEL_ARGS", field="--check", value=str(path), expected="MODEL_ARGS=(...)")
    return words


def check_script(path: str | Path, config: Config, *, source: str) -> None:
    """Compares a shell file with a config. Raises as `read_script` and `check_model_args` do, and InvalidSetting for
    words in MODEL_ARGS that are not flags of Megatron."""
    values, rest = parse_model_args(read_script(path))
    if rest:
        known = [flag for row in table() for flag in row.flags]
        raise InvalidSetting.unknown("flag of Megatron", rest[0], known).at(f"{path}: MODEL_ARGS")
    check_model_args(values, config, source=source)


def run(settings: ModelArgsSettings) -> int:
    """Runs `slime-convert model-args`. Exit code: 0 done, 1 the file contradicts the model."""
    if (settings.hf_checkpoint is None) == (settings.model_type is None):
        raise InvalidSetting.required("--hf-checkpoint or --model-type", "one of them, the model that is described")
    if settings.check is not None and settings.output is not None:
        raise InvalidSetting.conflict("--check", "--output", "--check writes nothing")
    if settings.model_type is not None:
        config = model_config(settings.model_type)
        source, text = f"--model-type {settings.model_type}", known_script(settings.model_type)
    else:
        from slime.converters.families import read_config

        directory = str(settings.hf_checkpoint).rstrip("/")
        config, source = read_config(directory), f"{directory}/config.json"
        name = str(config.get("_name_or_path") or Path(directory).name)
        text = script(config, name=name, checkpoint=directory)
    if settings.check is not None:
        return _report(settings.check, config, source)
    if settings.output is not None:
        check_own_file(Path(settings.output), b"MODEL_ARGS=(", "script of a model", field="--output")
        write_whole(Path(settings.output), text, field="--output")
    else:
        print(text, end="")
    return 0


def _report(path: str, config: Config, source: str) -> int:
    try:
        check_script(path, config, source=source)
    except InvalidSetting as error:
        print(f"{path}: {error}", file=sys.stderr)
        return 1
    print(f"{path}: agrees with {source}")
    return 0
