"""The flags `--sglang-NAME [value]`: all flags of SGLang's server, prefixed, collected in the setting `sglang_args`.

    parser = Parser(...); add_flags(parser, RolloutSettings); SGLANG_FLAGS.add_flags(parser)
    parser.parse_strict(["--sglang-mem-fraction-static", "0.7", "--sglang-disable-cuda-graph"])
    # Namespace(sglang_args={"mem_fraction_static": 0.7, "disable_cuda_graph": True})

Flags with this prefix that a program declares itself (`--sglang-server-concurrency`) take precedence.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from slime.rollout.engines.sglang.installed import server_flags
from slime.rollout.engines.sglang.read_flags import ServerFlag
from slime.rollout.engines.sglang.reserved import RESERVED, RESERVED_IN_FILE, refuse_reserved
from slime.types.errors import InvalidSetting, UnknownFlag, nearest

PREFIX = "sglang-"
TYPES: dict[str, Any] = {"int": int, "float": float, "str": str}
KINDS = {"int": "an integer", "float": "a number", "str": "text", "bool": "true or false"}


class SGLangFlags:
    """The `FlagFamily` of SGLang's flags. setting: the name of the setting that holds the values."""

    setting = "sglang_args"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Adds one flag per flag of the server, hidden in --help."""
        known = {name for action in parser._actions for name in action.option_strings}
        flags = server_flags().by_name
        for name, flag in flags.items():
            self._add(parser, name, flag, known)
            if flag.negated:
                self._add(parser, f"no-{name}", flag, known)
        group = parser.add_argument_group("SGLang")
        group.description = (
            "--sglang-NAME [VALUE] gives --NAME [VALUE] to the engines; "
            "python -m sglang.launch_server --help lists the names"
        )

    def _add(self, parser: argparse.ArgumentParser, name: str, flag: ServerFlag, known: set[str]) -> None:
        if f"--{PREFIX}{name}" in known:
            return
        common: dict[str, Any] = {"dest": self.setting, "default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        if flag.nargs != 0:
            common |= {"metavar": "VALUE", "nargs": flag.nargs, "type": _reader(flag.type)}
        else:
            common |= {"nargs": 0}
        common |= {"action": _Collect, "key": name.replace("-", "_"), "refused": flag.name in RESERVED}
        parser.add_argument(f"--{PREFIX}{name}", **common)

    def read_key(self, key: str, value: Any) -> dict[str, Any] | None:
        """Reads `sglang_NAME: value` of a configuration file. Returns None for keys without the prefix."""
        prefix = PREFIX.replace("-", "_")
        if not key.startswith(prefix):
            return None
        return check({key.removeprefix(prefix): value})


SGLANG_FLAGS = SGLangFlags()


class _Collect(argparse.Action):
    def __init__(self, *args: Any, key: str, refused: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.key = key
        self.refused = refused

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        values_by_name = dict(getattr(namespace, self.dest, None) or {})
        values_by_name |= check({self.key: True if self.nargs == 0 else values})
        setattr(namespace, self.dest, values_by_name)


def check(args: Mapping[str, Any], place: str = "") -> dict[str, Any]:
    """Returns `args` with checked values, by the names of the flags that they set (aliases resolved, with underscores).

    place: of a mapping in a file, whose keys errors name in place of flags: `PLACE.mem_fraction_static`.
    Raises UnknownFlag with the nearest name, InvalidSetting for an invalid value or a flag that the run sets itself.
    """
    flags = server_flags().by_name
    checked: dict[str, Any] = {}
    for key, value in args.items():
        name = str(key).replace("_", "-")
        flag = flags.get(name) or _negated(name, flags)
        if flag is None:
            raise _unknown_key(name, flags, place) if place else _unknown(name, flags)
        spelling = f"{place}.{key}" if place else f"--{PREFIX}{name}"
        refuse_reserved(flag.name, spelling, value, RESERVED_IN_FILE if place else RESERVED)
        if name.startswith("no-") and name not in flags:
            value = not _value(spelling, flag, value)
        checked[flag.name.replace("-", "_")] = _value(spelling, flag, value)
    return checked


def command_line(args: Mapping[str, Any]) -> list[str]:
    """Returns `args` as command-line arguments of SGLang's server; a switch that is False is left out, or negated if
    the flag has a negation."""
    flags = server_flags().by_name
    words: list[str] = []
    for key, value in check(args).items():
        flag = flags[key.replace("_", "-")]
        if flag.nargs == 0:
            words += [f"--{flag.name}"] if value else [f"--no-{flag.name}"] if flag.negated else []
        elif flag.nargs is None:
            # uvicorn accepts the names of log levels in lower case only.
            text = str(value).lower() if flag.name.startswith("log-level") else str(value)
            words.append(f"--{flag.name}={text}")
        else:
            words += [f"--{flag.name}", *(str(item) for item in ([] if value is None else value))]
    return words


def _negated(name: str, flags: Mapping[str, ServerFlag]) -> ServerFlag | None:
    flag = flags.get(name.removeprefix("no-")) if name.startswith("no-") else None
    return flag if flag is not None and flag.negated else None


def _unknown(name: str, flags: Mapping[str, ServerFlag]) -> UnknownFlag:
    refused = [f"--{PREFIX}{known}" for known, flag in flags.items() if flag.name in RESERVED]
    known = [f"--{PREFIX}{known}" for known in flags]
    return UnknownFlag.unknown(_option(), f"--{PREFIX}{name}", known, refused=refused)


def _unknown_key(name: str, flags: Mapping[str, ServerFlag], place: str) -> UnknownFlag:
    known = [known.replace("-", "_") for known, flag in flags.items() if flag.name not in RESERVED]
    key = name.replace("-", "_")
    if nearest(key, known):
        return UnknownFlag.unknown(_option(), key, known, field=place)
    # SGLang has hundreds.
    listed = "one that `python -m sglang.launch_server --help` lists"
    return UnknownFlag.unknown(_option(), key, known, instead=listed).at(place)


def _option() -> str:
    version = server_flags().version
    return f"option of SGLang {version}" if version else "option of SGLang"


def _value(spelling: str, flag: ServerFlag, value: Any) -> Any:
    if flag.nargs in (None, 0):
        return _one(spelling, flag, value)
    if flag.nargs == "?":
        return [] if value in (None, []) else [_one(spelling, flag, value[0] if isinstance(value, list) else value)]
    items = value if isinstance(value, (list, tuple)) else [value]
    if not items and flag.nargs == "+":
        raise InvalidSetting.requires(spelling, "one value or more")
    return [_one(spelling, flag, item) for item in items]


def _one(spelling: str, flag: ServerFlag, value: Any) -> Any:
    right: tuple[type, ...] = {"int": (int,), "float": (float, int), "bool": (bool,)}.get(
        flag.type, (str, int, float, bool)
    )
    if not isinstance(value, right) or (isinstance(value, bool) and flag.type in ("int", "float")):
        raise InvalidSetting.must_be(spelling, KINDS[flag.type], got=value)
    if flag.choices is not None and value not in flag.choices:
        raise InvalidSetting.one_of(spelling, flag.choices, got=value)
    return value


def _reader(kind: str) -> Any:
    def read(text: str) -> Any:
        try:
            return TYPES[kind](text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {KINDS[kind]}, got {text!r}") from None

    return read
