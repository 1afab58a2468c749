"""`slime export RUN`: writes the trained model as a Hugging Face directory or a GGUF file, or its LoRA adapter; can
upload it."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from slime.converters.files.adapter import (
    ADAPTER_DIR,
    CONFIG_FILE,
    WEIGHTS_FILE,
    copy_adapter,
    has_adapter,
    read_adapter,
)
from slime.converters.files.finished import WRITER, fingerprint
from slime.launcher.cli.recorded_run import is_run, no_run_or_model, read_run
from slime.launcher.config.help import CommandParser
from slime.launcher.run_directory.checkpoints import held
from slime.types.directories import check_replaceable, path_errors, read_mark, whole_directory
from slime.types.errors import ConfigError, InvalidSetting, NotAvailable, SlimeError, Unavailable, errors_name
from slime.types.scratch import ScratchDirectory
from slime.types.setting_values import named_path

FORMATS = ("hf", "gguf", "adapter")
SUFFIXES = {"gguf": ".gguf", "adapter": "-adapter"}
DIRECTORY = Path("exports")


def parser(command: str) -> CommandParser:
    reader = CommandParser(
        prog="slime export",
        description="Writes the trained model of a run, or with --step the model of a checkpoint, as a Hugging Face "
        "directory or as a GGUF file for llama.cpp. Where LoRA trained, the model is merged, and the directory has the "
        "adapter in adapter/; --format adapter writes the adapter alone.",
    )
    reader.add_argument("run", metavar="RUN|MODEL", help="Output directory of a run, model directory, or ORG/NAME")
    reader.add_argument(
        "--format",
        choices=FORMATS,
        default="hf",
        help="Format to write: hf, a Hugging Face directory; gguf, a single file; adapter, the LoRA adapter alone, as "
        "a directory for peft, vLLM and SGLang",
    )
    reader.add_argument(
        "--output",
        type=named_path,
        metavar="PATH",
        help="Directory or file to write (default: exports/NAME[-step-N][.gguf|-adapter])",
    )  # fmt: skip
    reader.add_argument("--step", type=int, metavar="N", help="Export the checkpoint of iteration N")
    reader.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="Also upload it to this Hub repository, created if it does not exist",
    )
    reader.add_argument("--private", action="store_true", help="Make the repository of --push private")
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    try:
        options = parser(command).parse_strict(argv)
        if options.private and not options.push:
            raise InvalidSetting.requires("--private", "--push ORG/NAME")
        hub = _hub(options.push) if options.push else None
        from slime.launcher.hub.fetch import local_model

        run = Path(local_model(options.run, "RUN"))
        name = Path(options.run.partition("@")[0]).name if run != Path(options.run) else name_of(run, options.step)
        output = options.output or DIRECTORY / f"{name}{SUFFIXES.get(options.format, '')}"
        print(f"wrote {export(run, output, options.format, options.step)}")
        if hub is not None:
            print(f"pushed to {push(hub, output, options.push, private=options.private)}")
    except KeyboardInterrupt:
        return 130
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def export(run: Path, output: Path, form: str, step: int | None = None) -> Path:
    """Writes the model of a run, or of a Hugging Face directory, to `output`.

    Raises MissingFile if there is no such model, and the errors of the converters.
    """
    if form == "adapter":
        return _export_adapter(run, output, step)
    from slime.converters.convert import hf_to_gguf, to_hf
    from slime.launcher.hub.fetch import local_model

    _, began_with = model_of(run, step)
    with ExitStack() as opened:
        source = opened.enter_context(held(lambda: model_of(run, step)[0]))
        tokenizer = local_model(began_with, "hf_checkpoint") if began_with and to_hf.needs_origin(source) else None
        with path_errors(output, "--output"):
            output.parent.mkdir(parents=True, exist_ok=True)
        if form == "hf":
            with _errors_of_output():
                return to_hf.convert(source, output, fallback_hf_dir=tokenizer)
        if not (source / "config.json").is_file():
            with path_errors(output, "--output"):
                between = ScratchDirectory(".export-", str(output.parent))
            opened.callback(between.close)
            source = to_hf.convert(source, between.path / "hf", fallback_hf_dir=tokenizer)
        return hf_to_gguf.convert(source, output, argument=f"RUN|MODEL {run}")


def _export_adapter(run: Path, output: Path, step: int | None) -> Path:
    """Copies the LoRA adapter of a run, of a merged model, or of a directory that holds nothing else.

    Raises InvalidSetting where there is none; MissingFile or InvalidFile where a file of it is missing or damaged.
    """
    target = output.absolute()
    with held(lambda: _adapter_of(run, step)) as source:
        files = [source / CONFIG_FILE, source / WEIGHTS_FILE]
        if not any(file.is_file() for file in files):
            raise _no_adapter(source)
        with errors_name(f"RUN|MODEL {run}"):
            read_adapter(source)
        if Path(os.path.realpath(source)) in Path(os.path.realpath(target)).parents:
            raise InvalidSetting.must_be(
                "--output", f"outside of {source}", got=str(output), reason="the adapter is read from there"
            )
        mark, size = fingerprint(files, {}), sum(file.stat().st_size for file in files)
        check_replaceable(target, field="--output")
        if target.is_dir() and any(target.iterdir()):
            if (read_mark(target) or {}).get("source") == mark:
                return target
            raise InvalidSetting.must_be("--output", "a new or empty directory", got=str(output))
        with whole_directory(target, WRITER, field="--output", need_bytes=size, alone=True, source=mark) as partial:
            copy_adapter(files, partial)
    return target


def _adapter_of(run: Path, step: int | None) -> Path:
    """Returns the directory in which an adapter should be."""
    if is_run(run):
        found = read_run(run).adapter(step)
    elif not run.is_dir():
        raise no_run_or_model(run)
    elif step is not None:
        raise InvalidSetting.requires(f"--step {step}", "a run", f"{run} is no run")
    else:
        found = run if has_adapter(run) else run / ADAPTER_DIR
    if found.name == ADAPTER_DIR and not found.is_dir():
        raise _no_adapter(found.parent)
    return found


def _no_adapter(path: Path) -> InvalidSetting:
    return InvalidSetting.requires(
        "--format adapter", "a model that was trained with --lora-rank", f"{path} has no LoRA adapter"
    )


@contextmanager
def _errors_of_output() -> Iterator[None]:
    """Names --output in errors of the converters, whose own flag is --output-dir."""
    try:
        yield
    except SlimeError as error:
        if error.field != "--output-dir":
            raise
        message = error.message.replace("--output-dir", "--output")
        raise type(error).restore(message, field="--output", value=error.value, expected=error.expected) from error


def name_of(path: Path, step: int | None = None) -> str:
    """Returns a name for the exported files: the run's, also for the directory `model` inside it, and the step."""
    # Path.resolve() raises a RuntimeError on a link that leads to itself, which `model_of` refuses by name.
    path = Path(os.path.realpath(path))
    run = path.parent if path.name == "model" and is_run(path.parent) else path
    return run.name if step is None else f"{run.name}-step-{step}"


def model_of(path: Path, step: int | None = None, name: str = "RUN|MODEL") -> tuple[Path, str | None]:
    """Returns the model of a run, and the model that the run started from, which may be a name on the Hub.

    A directory without a run is a model itself. name: the argument that errors name.
    Raises MissingFile, and InvalidSetting for a step of a model directory.
    """
    if not is_run(path):
        if not (path / "config.json").is_file():
            raise no_run_or_model(path, name)
        if step is not None:
            raise InvalidSetting.requires(f"--step {step}", "a run", f"{path} is a model directory")
        return path, None
    run = read_run(path)
    return run.model(step), run.began_with()


def _hub(name: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError:
        raise NotAvailable.requires(
            f"--push {name}", "the package huggingface_hub", "pip install huggingface_hub"
        ) from None


def push(hub: Any, path: Path, name: str, *, private: bool = False) -> str:
    """Uploads a directory or a file; returns its address. Raises Unavailable if the upload fails."""
    try:
        api = hub.HfApi()
        address = api.create_repo(name, private=private, exist_ok=True)
        if path.is_dir():
            api.upload_folder(repo_id=name, folder_path=path, ignore_patterns=["slime-files.json"])
        else:
            api.upload_file(repo_id=name, path_or_fileobj=path, path_in_repo=path.name)
    except Exception as error:  # the library also raises errors of its HTTP client
        reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
        raise Unavailable(
            f"--push {name}: the upload failed: {reason}. It needs a network and a token that may write "
            f"(HF_TOKEN, or `hf auth login`); {path} is complete, and --push can be repeated",
            field="--push", value=name,
        ) from error  # fmt: skip
    return str(address)
