"""Help of the commands: coloured on a terminal; for `slime train` only the flags that most runs set, by task."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import IO, Any

from slime.types.programs import PrintHelp
from slime.types.settings import Parser

# Settings that most runs set, by task; `--help-all` describes the others.
FIRST: Mapping[str, tuple[str, ...]] = {
    "Model, data and reward": (
        "hf_checkpoint", "prompt_data", "input_key", "label_key", "apply_chat_template", "rm_type", "custom_rm_path",
    ),
    "Recipe": (
        "preset", "num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len", "lr",
        "lora_rank",
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


class PrintColouredHelp(PrintHelp):
    """Prints a text, coloured on a terminal, and exits."""

    def show(self, text: str) -> None:
        print_coloured(text)


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
