"""The flags of `slime train`: one for each setting of each package; packages that share a name share the flag."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from dataclasses import dataclass
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.converters.megatron.flags import MegatronSettings
from slime.launcher.config.help import FIRST, FIRST_ASYNC, PrintColouredHelp
from slime.launcher.config.settings import LauncherSettings
from slime.rollout.engines.sglang.flags import SGLANG_FLAGS
from slime.rollout.settings.rollout import RolloutSettings
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.programs import short_help
from slime.types.setting_values import value_type
from slime.types.settings import FlagFamily, Parser, add_flags, flag_names, negated

SETTINGS: dict[str, type] = {
    "launcher": LauncherSettings,
    "buffer": BufferSettings,
    "rollout": RolloutSettings,
    "trainer": TrainerSettings,
    "megatron": MegatronSettings,
}

# Flags that other programs define, passed on under a prefix.
FAMILIES: tuple[FlagFamily, ...] = (SGLANG_FLAGS,)

# No flags: the launcher sets these to the addresses of the services that it starts.
WIRED = frozenset({"buffer_address", "rollout_address"})


@dataclass(frozen=True)
class Flag:
    """A setting: the packages that have it, and its field as the first of them declares it."""

    packages: tuple[str, ...]
    field: dataclasses.Field[Any]
    hint: Any

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def default(self) -> Any:
        """The default value, or dataclasses.MISSING for a required setting."""
        factory = self.field.default_factory
        return self.field.default if factory is dataclasses.MISSING else factory()

    @property
    def spelling(self) -> str:
        """The flag as it is typed: `--NAME`, or for a switch that is on by default the flag that turns it off."""
        return flag_names(self.field)[0]

    @property
    def negations(self) -> list[str]:
        """Flags that turn off a switch whose default is neither on nor off."""
        switch = value_type(self.hint)[0] is bool and self.field.metadata["switch"] is None
        return [negated(name) for name in flag_names(self.field)] if switch and self.default is None else []

    @property
    def turns_off(self) -> bool:
        """Returns whether the flag sets False."""
        return self.default is True or self.field.metadata["switch"] is False


def declared_by(package: str, cls: type) -> list[Flag]:
    hints = typing.get_type_hints(cls)
    return [Flag((package,), f, hints[f.name]) for f in dataclasses.fields(cls) if f.name not in WIRED]


def declared() -> dict[str, Flag]:
    """Returns all flags by field name, in the order of SETTINGS."""
    flags: dict[str, Flag] = {}
    for package, cls in SETTINGS.items():
        for flag in declared_by(package, cls):
            known = flags.get(flag.name)
            flags[flag.name] = dataclasses.replace(known, packages=(*known.packages, package)) if known else flag
    return flags


@functools.cache
def _declared() -> dict[str, Flag]:
    return declared()


def as_typed(name: str, value: Any) -> str:
    """Spells a setting with its value as a user types it: `--save-interval 5`, `--colocate`, `--no-offload-train`."""
    spelling = _declared()[name].spelling
    if value is True or (value is False and _declared()[name].turns_off):
        return spelling
    return negated(spelling) if value is False else f"{spelling} {value}"


def _megatron_help(_: argparse.ArgumentParser) -> str:
    parser = Parser(prog="slime train", usage="slime train --train-backend megatron ... [Megatron's flags]")
    add_flags(parser, MegatronSettings, show_hidden=True)
    return parser.format_help()


def _short_help(parser: argparse.ArgumentParser) -> str:
    first = FIRST_ASYNC if parser.prog == "slime train-async" else FIRST
    return short_help(parser, first, ", and so does docs/flags.md", ["--help-megatron"])


ABOUT = {
    "train": "Train a language model by reinforcement learning: prompts in, weights out. Engines and trainer "
    "take turns; with `slime train-async` they work at the same time.",
    "train-async": "Train a language model by reinforcement learning, and generate the next rollout while the trainer "
    "works on this one. Samples are then generated with weights that are a few updates old. Engines and trainer need "
    "GPUs of their own, so --colocate, --offload-rollout and --true-on-policy-mode are refused.",
}


def build_parser(flags: dict[str, Flag], command: str = "train") -> Parser:
    """Makes the parser of `slime COMMAND`: a group for each package, and one for settings that several share.

    Megatron's flags are left out of its help. command: train or train-async.
    """
    parser = Parser(
        prog=f"slime {command}",
        description=ABOUT[command],
        usage=f"slime {command} --hf-checkpoint DIR --prompt-data FILE --rm-type NAME\n"
        f"{' ' * len(f'usage: slime {command} ')}--n-samples-per-prompt N --num-rollout N [flags]\n"
        f"       slime {command} CONFIG.yaml [flags]",
        epilog="docs/flags.md lists every flag with its range, and the names that are known but not supported yet.",
        add_help=False,
    )
    for names, text, about in (
        (("-h", "--help"), _short_help, "Show the flags that most runs set, and exit"),
        (("--help-all",), argparse.ArgumentParser.format_help, "Show this help of every flag, and exit"),
        (("--help-megatron",), _megatron_help, "Show Megatron's own flags, for --train-backend megatron, and exit"),
    ):
        parser.add_argument(*names, action=PrintColouredHelp, const=text, help=about)
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        default=argparse.SUPPRESS,
        help="Flat YAML file of these settings; variables SLIME_NAME=VALUE win over it, flags over both",
    )
    titles = {package: (cls.__doc__ or package).splitlines()[0].rstrip(".") for package, cls in SETTINGS.items()}
    groups: dict[str, list[Flag]] = {"Shared by several packages": [f for f in flags.values() if len(f.packages) > 1]}
    for package, title in titles.items():
        groups[title] = [flag for flag in flags.values() if flag.packages == (package,)]
    for title, members in groups.items():
        if members:
            add_flags(parser, _as_settings(title, members))
    return parser


def training_parser(command: str = "train") -> Parser:
    """Makes a parser of every flag of a run, also for other tools (entry point `slime.training_flags`).

    command: train or train-async, which the help describes.
    """
    parser = build_parser(declared(), command)
    for family in FAMILIES:
        family.add_flags(parser)
    return parser


def type_name(hint: Any) -> str:
    """Spells an annotation as a user reads it; `X | None` is X."""
    arguments = [a for a in typing.get_args(hint) if a is not type(None)]
    origin = typing.get_origin(hint)
    if origin in (list, dict):
        return "JSON" if origin is dict else f"list of {type_name(arguments[0])}"
    if arguments:
        return type_name(arguments[0])
    return "JSON" if hint in (dict, typing.Any) else getattr(hint, "__name__", str(hint))


def _as_settings(title: str, flags: list[Flag]) -> type:
    fields = []
    for flag in flags:
        field = dataclasses.field(
            default=flag.field.default, default_factory=flag.field.default_factory, metadata=flag.field.metadata
        )  # type: ignore[call-overload]
        fields.append((flag.name, flag.hint, field))
    return dataclasses.make_dataclass("Group", fields, kw_only=True, namespace={"__doc__": title})
