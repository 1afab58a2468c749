"""The `slime-convert` command."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from slime.converters.megatron.flags import MegatronSettings, table
from slime.converters.settings import (
    GgufToHfSettings,
    HfToGgufSettings,
    HfToTorchDistSettings,
    InspectSettings,
    ModelArgsSettings,
    ToHfSettings,
    TorchDistToHfSettings,
    VerifySettings,
)
from slime.types.errors import ConfigError, InvalidSetting, SlimeError, UnknownFlag, counted, errors_name
from slime.types.programs import command_list, run_printing, wrong_command
from slime.types.settings import Parser, add_flags, build

COMMANDS = {
    "hf-to-torch-dist": "Convert a Hugging Face directory into a torch_dist checkpoint of Megatron",
    "torch-dist-to-hf": "Convert a torch_dist checkpoint into a Hugging Face directory",
    "to-hf": "Convert any checkpoint of a training run into a Hugging Face directory",
    "gguf-to-hf": "Convert a GGUF file into a Hugging Face directory",
    "hf-to-gguf": "Convert a Hugging Face directory into a GGUF file",
    "model-args": "Write Megatron's flags of a model, or compare a file of them with the model",
    "inspect": "Print names, shapes and types of the tensors in a directory or file",
    "verify": "Compare the tensors of two directories or files",
}
USAGE = f"""usage: slime-convert COMMAND ...

{command_list(COMMANDS)}

`slime-convert COMMAND --help` describes a command.
"""


def main(argv: Sequence[str] | None = None, *, training: Parser | None = None) -> int:
    """Returns the exit code: 0 done, 1 failed or different, 2 wrong arguments or files, 130 Ctrl-C, 141 reader left.

    training: whose flags `to-hf` accepts beside its own and Megatron's; those of the installed packages by default.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run_printing("slime-convert", partial(_run, words, training))
    except OSError as error:
        print(f"slime-convert: error: {error.filename or 'cannot write'}: {error.strerror}", file=sys.stderr)
        return 1


def _run(words: list[str], training: Parser | None) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if words else 2
    commands: dict[str, Callable[[list[str]], int]] = {
        "hf-to-torch-dist": _hf_to_torch_dist,
        "torch-dist-to-hf": _torch_dist_to_hf,
        "to-hf": partial(_to_hf, training=training),
        "gguf-to-hf": _gguf_to_hf,
        "hf-to-gguf": _hf_to_gguf,
        "model-args": _model_args,
        "inspect": _inspect,
        "verify": _verify,
    }
    if words[0] not in commands:
        print(f"slime-convert: error: {wrong_command(words, commands)}", file=sys.stderr)
        return 2
    try:
        return commands[words[0]](words[1:])
    except KeyboardInterrupt:
        return 130
    except SlimeError as error:
        print(f"slime-convert: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _parse(argv: list[str], command: str, settings: type, *positionals: str) -> tuple[Any, dict[str, Any]]:
    parser = Parser(prog=f"slime-convert {command}", description=settings.__doc__)
    for name in positionals:
        parser.add_argument(
            name, metavar=name.upper(), help="Hugging Face directory, safetensors file or torch_dist checkpoint"
        )
    add_flags(parser, settings)
    values = vars(parser.parse_strict(argv))
    return build(settings, values), values


def _gguf_to_hf(argv: list[str]) -> int:
    settings, _ = _parse(argv, "gguf-to-hf", GgufToHfSettings)
    from slime.converters.convert.gguf_to_hf import convert

    convert(settings.gguf, settings.output_dir, dtype=settings.dtype, progress=_progress())
    return 0


def _hf_to_gguf(argv: list[str]) -> int:
    settings, _ = _parse(argv, "hf-to-gguf", HfToGgufSettings)
    from slime.converters.convert.hf_to_gguf import convert

    if threading.current_thread() is threading.main_thread():
        # SIGTERM ends the conversion as Ctrl-C does, so that no unfinished file stays.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    convert(settings.hf_checkpoint, settings.output, progress=_progress())
    return 0


def _progress() -> Callable[[str], None]:
    """Returns a function that prints progress on rank 0 alone."""
    start = time.monotonic()

    def show(text: str) -> None:
        if os.environ.get("RANK", "0") == "0":
            print(f"[{time.monotonic() - start:5.1f} s] {text}", file=sys.stderr, flush=True)

    return show


def _parse_with_megatron(
    argv: list[str], command: str, settings: type
) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Returns the values of the command's own flags, Megatron's arguments, and the other words."""
    from slime.converters.megatron.args import parse_model_args

    parser = Parser(prog=f"slime-convert {command}", description=settings.__doc__)
    add_flags(parser, settings)
    namespace, rest = parser.parse_known_args(argv)
    megatron, rest = parse_model_args(rest)
    return vars(namespace), megatron, rest


def _refuse(words: list[str], settings: type, also: Iterable[str] = ()) -> None:
    """Raises UnknownFlag or InvalidSetting for the first of `words`, which no parser has taken."""
    if words:
        parser = Parser()
        add_flags(parser, settings)
        flag, known = words[0].split("=", 1)[0], [*parser.flag_names(), *(row.flag for row in table()), *also]
        if flag in known:
            raise InvalidSetting(
                f"{flag} belongs to training and has no effect here", field=flag, expected="flags of the model"
            )
        if flag.startswith(("-", "–", "—")):
            add_flags(parser, MegatronSettings)
            raise UnknownFlag.unknown("option", flag, parser.flag_names())
        raise InvalidSetting(f"unexpected argument {words[0]!r}", value=words[0])


def _hf_to_torch_dist(argv: list[str]) -> int:
    values, megatron, rest = _parse_with_megatron(argv, "hf-to-torch-dist", HfToTorchDistSettings)
    # Misspelt flags are reported before missing ones.
    _refuse(rest, HfToTorchDistSettings)
    settings = build(HfToTorchDistSettings, values)
    if settings.model_type is not None:
        from slime.converters.megatron.args import model_args
        from slime.converters.megatron.model_scripts import model_config

        megatron = model_args(model_config(settings.model_type), megatron)
    from slime.converters.convert.hf_to_torch_dist import convert

    convert(
        settings.hf_checkpoint,
        settings.save,
        megatron_args=megatron,
        model_name=settings.model_name,
        dtype=settings.dtype,
        num_workers=settings.num_workers,
        overwrite=settings.overwrite,
        progress=_progress(),
    )
    return 0


def _torch_dist_to_hf(argv: list[str]) -> int:
    settings, _ = _parse(argv, "torch-dist-to-hf", TorchDistToHfSettings)
    from slime.converters.convert.torch_dist_to_hf import convert
    from slime.converters.torch_dist.directory import iteration_directory

    with errors_name("--input-dir"):
        iteration_directory(Path(settings.input_dir))
    convert(settings.input_dir, settings.output_dir, **_hf_options(settings))
    return 0


def _to_hf(argv: list[str], training: Parser | None) -> int:
    values, megatron, rest = _parse_with_megatron(argv, "to-hf", ToHfSettings)
    known: list[str] = []
    for parser in [training] if training is not None else _training_parsers():
        _, rest = parser.parse_known_args(rest)
        known += parser.flag_names()
    _refuse(rest, ToHfSettings, known)
    settings = build(ToHfSettings, values)
    from slime.converters.convert.to_hf import convert

    convert(
        settings.load,
        settings.output_dir,
        megatron_args=megatron,
        fallback_hf_dir=settings.hf_checkpoint,
        **_hf_options(settings),
    )
    return 0


def _training_parsers() -> Iterator[Parser]:
    """Yields the parsers of packages that declare flags of training, so that its command line can be used as it is."""
    for entry in entry_points(group="slime.training_flags"):
        yield entry.load()()


def _hf_options(settings: Any) -> dict[str, Any]:
    from slime.converters.files.hf_writer import parse_size

    return dict(
        origin_hf_dir=settings.origin_hf_dir,
        model_name=settings.model_name,
        vocab_size=settings.vocab_size,
        dtype=settings.dtype,
        max_shard_bytes=None if settings.max_shard_size is None else parse_size(settings.max_shard_size),
        num_workers=settings.num_workers,
        overwrite=settings.overwrite,
        progress=_progress(),
    )


def _model_args(argv: list[str]) -> int:
    settings, _ = _parse(argv, "model-args", ModelArgsSettings)
    from slime.converters.megatron.model_scripts import run

    return run(settings)


def _inspect(argv: list[str]) -> int:
    settings, paths = _parse(argv, "inspect", InspectSettings, "path")
    from slime.converters.inspection.summary import as_text, summarize

    summary = summarize(paths["path"], containing=settings.containing, finite=settings.finite)
    if settings.containing and not summary["tensors"]:
        # A check of no tensor would pass.
        raise InvalidSetting(
            f"--containing {settings.containing!r}: no tensor of {paths['path']} has this text in its name",
            field="--containing", value=settings.containing, expected="text in the name of a tensor",
        )  # fmt: skip
    print(json.dumps(summary) if settings.json else as_text(summary))
    return 1 if summary.get("num_nonfinite") else 0


def _verify(argv: list[str]) -> int:
    settings, paths = _parse(argv, "verify", VerifySettings, "a", "b")
    from slime.converters.inspection.verify import compare
    from slime.converters.inspection.weights import open_two

    count = 0
    for difference in compare(paths["a"], paths["b"], atol=settings.atol):
        count += 1
        if count <= settings.max_shown:
            print(difference)
    if count:
        print(
            counted(count, "tensor differs", "tensors differ")
            + (f", the first {settings.max_shown} shown" if count > settings.max_shown else "")
        )
        return 1
    print(f"equal: {counted(len(open_two(paths['a'], paths['b'])[0].tensors), 'tensor')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
