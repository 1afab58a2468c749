"""Help of the commands: coloured on a terminal; for `slime train` only the flags that most runs set, by task."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from typing import IO, Any

from slime.types.settings import Parser, add_flags

# Settings that most runs set, by task; `--help-all` describes the others.
FIRST: Mapping[str, tuple[str, ...]] = {
    "Model, data and reward": (
        "hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template", "rm_type", "custom_rm_path",
    ),
    "Recipe": (
        "preset", "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "lr",
    ),
    "GPUs": ("colocate", "actor_num_gpus_per_node"),
    "Evaluation": ("eval_prompt_data",),
    "Output": ("output_dir", "save_interval", "load", "dry_run"),
}  # fmt: skip
# `slime train-async` gives engines and trainer GPUs of their own, so --colocate is not among its flags.
FIRST_ASYNC: Mapping[str, tuple[str, ...]] = {
    **FIRST,
    "GPUs": ("actor_num_gpus_per_node", "rollout_num_gpus"),
    "Asynchrony": (
        "async_buffer_size", "update_weights_interval", "fully_async", "max_staleness", "staleness_policy",
    ),
}  # fmt: skip


class CommandParser(Parser):
    """A Parser whose help has colours on a terminal."""

    def print_help(self, file: Any = None) -> None:
        print_coloured(self.format_help(), file)


class PrintHelp(argparse.Action):
    """Prints a text and exits. const: a function of the parser that makes the text when it is needed."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        self._text = options["const"]
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, help=options["help"])

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print_coloured(self._text(parser))
        parser.exit()


def print_coloured(text: str, file: IO[str] | None = None) -> None:
    """Prints help; on a terminal headings and flags are coloured, unless NO_COLOR is set."""
    file = sys.stdout if file is None else file
    if not file.isatty():
        file.write(text)
        return
    from rich.console import Console
    from rich.text import Text

    styled = Text(text)
    styled.highlight_regex(r"(?m)^\S.*:$", "bold")
    styled.highlight_regex(r"(?m)^\s+(?P<flag>--?[a-zA-Z][\w-]*(?:, --?[\w-]+)*)", "cyan")
    # The text is wrapped already.
    Console(file=file, highlight=False, markup=False, soft_wrap=True).print(styled, end="")


def short_help(
    parser: argparse.ArgumentParser,
    flags: Mapping[str, tuple[Any, dataclasses.Field[Any]]],
    first: Mapping[str, tuple[str, ...]],
) -> str:
    """Returns the help of a training command with some flags only.

    flags: (type, field) of each setting by its name. first: names of the settings to describe, by title of their group.
    """
    short = Parser(
        prog=parser.prog, usage=parser.usage, description=parser.description, add_help=False,
        epilog=f"`{parser.prog} --help-all` describes every flag, and so does docs/flags.md.",
    )  # fmt: skip
    for title, names in first.items():
        fields = []
        for name in names:
            hint, known = flags[name]
            field = dataclasses.field(
                default=known.default, default_factory=known.default_factory, metadata=known.metadata
            )  # type: ignore[call-overload]
            fields.append((name, hint, field))
        add_flags(short, dataclasses.make_dataclass("Group", fields, kw_only=True, namespace={"__doc__": title}))
    more = short.add_argument_group("More")
    more.add_argument("--config", metavar="FILE.yaml", help="Flat YAML file of these settings; flags win over it")
    more.add_argument("--help-all", action="store_true", help="Describe every flag")
    more.add_argument("--help-megatron", action="store_true", help="Describe Megatron's own flags")
    return short.format_help()
