"""Settings: dataclasses from which flags, `--config` keys, validation and the table of flags are derived.

    @dataclass(kw_only=True)
    class BufferSettings:
        prompt_data: str | None = setting(None, "Training prompts, a jsonl or parquet file", metavar="PATH")
        lease_seconds: float = setting(600.0, "Seconds that a lease lasts without renewal", above=0)

A field `lease_seconds` is the flag `--lease-seconds` and the key `lease_seconds` of a `--config` file. A `bool` that
defaults to False is a switch, one that defaults to True is turned off by `--no-NAME` (or by the name in `off_flag`).
Later sources win: default, file, flag.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from slime.types.config_files import read_config, unknown_key
from slime.types.errors import InvalidSetting, UnknownFlag
from slime.types.programs import add_help_flags
from slime.types.setting_values import NUMBERS, argparse_error, check, check_text, flag_name, value_type

REQUIRED: Any = dataclasses.MISSING


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    refused: Sequence[str] = (),
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    metavar: str | None = None,
    aliases: Sequence[str] = (),
    off_flag: str | None = None,
    off_help: str | None = None,
    parse: Callable[[str], Any] | None = None,
    append: bool = False,
    flags: Sequence[str] = (),
    switch: bool | None = None,
    hidden: bool = False,
    flag: bool = True,
) -> Any:
    """Declares a dataclass field with its flag.

    default: a value, a zero-argument callable for a mutable one, or REQUIRED.
    refused: known values that are not choices: an error of their own names the reason.
    minimum, maximum: inclusive bounds; above: an exclusive lower one. None passes where the default is None.
    aliases: other flag names (with dashes, without the leading `--`).
    parse: converts text to a value, if the annotation is not enough (JSON objects).
    off_help: help of the flag that turns off a switch that is on by default.
    append: the flag may be repeated, each time with one value, or with several if the annotation is a list of lists.
    flags: names of the flag in place of the field's (with dashes, without the leading `--`).
    switch: for a `bool | None`, the value that the flag sets; the flag takes no value then.
    hidden: the flag is left out of `--help`.
    flag: False for a setting that only a family of flags or a `--config` file sets.
    """
    metadata = dict(
        help=help, choices=tuple(choices) if choices else None, refused=tuple(refused),
        minimum=minimum, above=above, maximum=maximum, metavar=metavar,
        aliases=tuple(aliases), off_flag=off_flag, off_help=off_help, parse=parse, append=append,
        flags=tuple(flags), switch=switch, hidden=hidden, flag=flag,
    )  # fmt: skip
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def like(cls: type, name: str, **changed: Any) -> Any:
    """Declares a setting as `cls` does, with the same help, range and default; `default=...` replaces the default."""
    (known,) = (field for field in dataclasses.fields(cls) if field.name == name)
    kept = dict(default=known.default, default_factory=known.default_factory)
    return dataclasses.field(**(changed or kept), metadata=known.metadata)  # type: ignore[call-overload]


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"expected a JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


class _Store(argparse._StoreAction):
    """Takes the last value of a flag that is repeated, and refuses two names of one setting that disagree."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        spelled: dict[str, tuple[str, Any]] = getattr(parser, "spelled", {})
        other, value = spelled.get(self.dest, (option_string, values))
        if other != option_string and value != values:
            raise InvalidSetting.conflict(
                f"{option_string} {values}", f"{other} {value}", "they are two names of one setting"
            )
        spelled[self.dest] = (str(option_string), values)
        setattr(namespace, self.dest, values)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults unless they are empty; required flags come first in the usage line and without brackets.

    The usage line of a command with many flags names only those and the arguments: the list below it has the others.
    """

    def _format_usage(self, usage: Any, actions: Iterable[argparse.Action], groups: Any, prefix: Any) -> str:
        required: list[argparse.Action] = []
        others: list[argparse.Action] = []
        for action in actions:
            if getattr(action, "needs_value", False):
                # The value may come from a file, so argparse must not require the flag itself, only this copy.
                action = copy.copy(action)
                action.required = True
            (required if action.required and action.option_strings else others).append(action)
        positional = [action for action in others if not action.option_strings]
        if len(others) - len(positional) > 8:
            others = [argparse.Action([], argparse.SUPPRESS, metavar="[flags]"), *positional]
        return super()._format_usage(usage, [*required, *others], groups, prefix)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if _is_uninformative(action.default) else super()._get_help_string(action)


def _is_uninformative(default: object) -> bool:
    return default is None or isinstance(default, bool) or default in ([], {}, "")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigErrors, names the nearest flag, and takes no abbreviations.

    spelled: setting -> (name of its flag, value), as in the last command line that was parsed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _HelpFormatter)
        super().__init__(*args, **kwargs)
        self.spelled: dict[str, tuple[str, Any]] = {}
        self.register("action", None, _Store)
        self.register("action", "store", _Store)
        # By default argparse takes -1e-6 and -inf for flags.
        self._negative_number_matcher = re.compile(r"^-(\d|\.\d|inf$)")

    def error(self, message: str) -> NoReturn:
        names = ((name, a.help) for a in self._actions for name in (*a.option_strings, a.metavar or a.dest))
        raise argparse_error(message, dict(names))

    def parse_strict(self, argv: Sequence[str] | None = None) -> argparse.Namespace:
        self.spelled = {}
        try:
            namespace, unknown = self.parse_known_args(argv)
        except InvalidSetting:
            # A flag that is not known is the likelier mistake than an argument that is missing.
            self._refuse_unknown([word for word in argv or () if word.startswith("--") and word != "--"])
            raise
        for action in self._actions:
            # No command line holds one, but a program in Python that calls the main of a command may.
            name = (action.option_strings or [str(action.metavar or action.dest)])[0]
            check_text(name, getattr(namespace, action.dest, None))
        self._refuse_unknown(unknown)
        if unknown:
            raise InvalidSetting(f"unexpected argument {unknown[0]!r}", value=unknown[0])
        return namespace

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        """Raises UnknownFlag for the first word that looks like a flag and is none of this parser's."""
        for word in words:
            # A single dash, or the long ones that word processors make of two.
            name = word.split("=", 1)[0]
            if word.startswith(("-", "–", "—")) and not self._negative_number_matcher.match(word):
                if name not in self._option_string_actions:
                    raise UnknownFlag.unknown("option", name, self.flag_names(), refused=self.refused_flags())

    def flag_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def refused_flags(self) -> list[str]:
        """Lists flags that are known only to be refused with a reason: their actions have `refused`."""
        return [name for action in self._actions if getattr(action, "refused", "") for name in action.option_strings]


def flag_names(field: dataclasses.Field[Any]) -> list[str]:
    """Returns the flags of a setting, its own name first; for a switch that is on, the flag that turns it off."""
    meta = field.metadata
    if _default(field) is True:
        return [flag_name(meta["off_flag"]) if meta["off_flag"] else negated(flag_name(field.name))]
    return [flag_name(name) for name in (*(meta["flags"] or (field.name,)), *meta["aliases"])]


def negated(flag: str) -> str:
    """Spells the flag that turns a switch off, as `argparse.BooleanOptionalAction` does."""
    return f"--no-{flag.removeprefix('--')}"


def spelled(settings: Any, name: str) -> str:
    """Spells a setting as a user types it, with its value: `--save-interval 5`; of a switch the flag alone."""
    field = next(f for f in dataclasses.fields(settings) if f.name == name)
    value, flag = getattr(settings, name), flag_names(field)[0]
    if value is None or isinstance(value, bool):
        return flag
    return f"{flag} {' '.join(map(str, value)) if isinstance(value, (list, tuple)) else value}"


def flag_help(field: dataclasses.Field[Any]) -> str:
    """Returns the help of a setting's flag."""
    return str(field.metadata["off_help"] or field.metadata["help"])


def add_flags(parser: argparse.ArgumentParser, *settings: type, show_hidden: bool = False) -> None:
    """Adds a flag for every field. A flag that is not given stays out of the namespace, so that a file's value applies.

    Classes that share a field share its flag, which the first of them declares.
    show_hidden: describe also the settings that `--help` leaves out.
    """
    for cls in settings:
        title = (cls.__doc__ or cls.__name__).splitlines()[0].rstrip(".")
        # The flags of a command that is described above them need no title.
        group: Any = parser if (parser.description or "").startswith(title) else parser.add_argument_group(title)
        hints = typing.get_type_hints(cls)
        declared = {action.dest for action in parser._actions}
        for field in dataclasses.fields(cls):
            if field.name not in declared and field.metadata["flag"]:
                _add_flag(group, field, hints[field.name], show_hidden)


def _add_flag(group: Any, field: dataclasses.Field[Any], hint: Any, show_hidden: bool) -> None:
    meta = field.metadata
    names = flag_names(field)
    default = _default(field)
    default_note = " (required)" if default is REQUIRED else f" (default: {default_text(default)})"
    text = flag_help(field).replace("%", "%%") + ("" if _is_uninformative(default) else default_note)
    common: dict[str, Any] = dict(
        dest=field.name,
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS if meta["hidden"] and not show_hidden else text,
    )
    base, many = value_type(hint)
    if base is bool:
        if default is True:
            group.add_argument(*names, action="store_false", **common)
        elif meta["switch"] is not None:
            group.add_argument(*names, action="store_const", const=meta["switch"], **common)
        elif default is None:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
        else:
            group.add_argument(*names, action="store_true", **common)
        return
    parse = meta["parse"] or (str if base is list else base)
    common.update(type=_named(parse), metavar=meta["metavar"] or _metavar(base, meta["choices"]))
    if meta["append"]:
        group.add_argument(*names, action="append", **(common | ({"nargs": "+"} if base is list else {})))
    elif many:
        group.add_argument(*names, nargs="+", **common)
    else:
        action = group.add_argument(*names, **common)
        action.needs_value = default is REQUIRED


def default_text(default: Any) -> str:
    """Spells a default as it is typed."""
    return " ".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)


def _named(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    # argparse would name the function in its message instead of the value and the expectation.
    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            kind = NUMBERS.get(getattr(parse, "__name__", ""), str(error).removeprefix("expected "))
            raise argparse.ArgumentTypeError(f"must be {kind}, got {text!r}") from None

    return convert


def _metavar(base: type, choices: Sequence[str] | None) -> str:
    return "{" + ",".join(choices) + "}" if choices else {int: "N", float: "X", str: "TEXT"}.get(base, "VALUE")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """Creates an instance of `cls` from the values of its fields, each checked.

    Raises InvalidSetting, which names the flag, the value and what was expected.
    """
    hints = typing.get_type_hints(cls)
    chosen = {}
    for field in dataclasses.fields(cls):
        if field.name in values:
            chosen[field.name] = check(field, hints[field.name], values[field.name])
        elif _default(field) is REQUIRED:
            raise InvalidSetting.required(flag_names(field)[0], field.metadata["help"])
    return cls(**chosen)


class FlagFamily(typing.Protocol):
    """Flags `--PREFIX-NAME` of another program, as one setting that holds their values by name."""

    setting: str

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        """Adds the flags that `parser` does not have yet; they fill the dictionary `setting` of the namespace."""
        ...

    def read_key(self, key: str, value: Any) -> dict[str, Any] | None:
        """Returns the values that a key of a `--config` file sets; None for a key outside of the family."""
        ...


def parse(
    argv: Sequence[str] | None, *settings: type, prog: str, description: str, families: Sequence[FlagFamily] = (),
    first: Mapping[str, Sequence[str]] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """Reads `argv` (and the `--config` file it names) into one instance of each of `settings`.

    families: flags of other programs to accept, too. first: names of settings by title: `--help` describes only these,
    and `--help-all` every flag. Raises ConfigError, which names the flag or the key.
    """
    parser = Parser(prog=prog, description=description, add_help=not first)
    if first:
        add_help_flags(parser, first)
    parser.add_argument(
        "--config", metavar="FILE.yaml", default=argparse.SUPPRESS, help="YAML file of settings; flags win over it"
    )
    add_flags(parser, *settings)
    for family in families:
        family.add_flags(parser)
    explicit = vars(parser.parse_strict(argv))
    values: dict[str, Any] = {}
    if "config" in explicit:
        known = _keys(settings)
        config_file = explicit.pop("config")
        for key, value in read_config(config_file).items():
            if key in known:
                merge(values, known[key], value, families)
                continue
            for family in families:
                found = family.read_key(key, value)
                if found is not None:
                    merge(values, family.setting, found, families)
                    break
            else:
                raise unknown_key(key, known, f"{prog} --help{'-all' if first else ''}").at(f"--config {config_file}")
    for name, value in explicit.items():
        merge(values, name, value, families)
    return tuple(build(cls, values) for cls in settings)


def merge(values: dict[str, Any], name: str, value: Any, families: Sequence[FlagFamily]) -> None:
    """Sets `values[name]`; the setting of a family keeps its entries that `value` does not have."""
    known = values.get(name)
    if isinstance(known, dict) and isinstance(value, Mapping) and any(family.setting == name for family in families):
        value = known | dict(value)
    values[name] = value


def _keys(settings: Iterable[type]) -> dict[str, str]:
    """Returns the field that each key of a `--config` file sets: by its own name, or an alias of its flag."""
    fields = [f for cls in settings for f in dataclasses.fields(cls)]
    aliases = {
        alias.replace("-", "_"): f.name
        for f in fields
        for alias in (*f.metadata["aliases"], *(f.metadata["flags"] if f.metadata["switch"] is not False else ()))
    }
    return aliases | {f.name: f.name for f in fields}


def markdown_table(*settings: type) -> str:
    """Returns the flags of `settings` as a Markdown table."""
    parser = Parser(add_help=False)
    add_flags(parser, *settings)
    defaults = {f.name: _default(f) for cls in settings for f in dataclasses.fields(cls)}
    rows = ["| flag | default | what it is |", "|---|---|---|"]
    for action in parser._actions:
        default = defaults[action.dest]
        default_cell = (
            "required"
            if default is REQUIRED
            else ""
            if default in (None, "", []) or default is False
            else f"`{default_text(default)}`"
        )
        text = re.sub(r" \((default: .*|required)\)$", "", (action.help or "").replace("%%", "%")).replace("|", "\\|")
        rows.append(f"| `{', '.join(action.option_strings)}` | {default_cell} | {text} |")
    return "\n".join(rows)
