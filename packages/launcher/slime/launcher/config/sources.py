"""Reads settings from YAML files and environment variables.

`SLIME_ROLLOUT_BATCH_SIZE=16` is `--rollout-batch-size 16`; a switch takes true, false, 1 or 0, and a flag of several
values takes them as a shell would split them.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slime.launcher.config.catalogue import FAMILIES, Flag
from slime.launcher.config.known_flags import ELSEWHERE, why_not
from slime.types.config_files import read_config, unknown_key
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, NotAvailable, UnknownFlag
from slime.types.setting_values import check, flag_name
from slime.types.settings import Parser, flag_names, merge

PREFIX = "SLIME_"
# Variables that begin like settings but are not: whole names and prefixes.
OTHER = ("SLIME_MEGATRON_FLAGS", "SLIME_PANTS_", "SLIME_TEST_", "SLIME_DIR")
# The similarity from which a variable counts as a misspelled flag.
SLIP = 0.85
# A flag in a hint, with the name of its value: `--lr X`.
_AS_TYPED = re.compile(r"(--[a-z][\w-]*)(?: [A-Z][\w.:]*)?")
SWITCH = {"true": True, "1": True, "false": False, "0": False}


class Sources:
    """Reads files and variables with the parser of the command line.

    flags: every setting by name. parser: the parser of the command line. available: the flags that may be used, with
    dashes.
    """

    def __init__(self, flags: Mapping[str, Flag], parser: Parser, available: Sequence[str]) -> None:
        self.flags = flags
        self.parser = parser
        self.available = available
        # The variable of each setting that `environment` has read.
        self.variables: dict[str, str] = {}
        self._by_key = {key: flag for flag in flags.values() for key in _keys(flag)}
        self._actions = {name: action for action in parser._actions for name in action.option_strings}

    def file(self, path: str, flag: str, *, keep_unknown: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns (settings, other keys) of a YAML file; a key is a setting's name, or its flag with underscores.

        flag: the flag that names the file. Raises UnknownFlag or NotAvailable for any other key; with `keep_unknown`
        unknown keys are returned.
        """
        if not isinstance(path, str):
            raise InvalidSetting.must_be(flag, "the path of a file", got=path)
        return self._settings(read_config(path, flag), f"{flag} {path}", keep_unknown=keep_unknown)

    def environment(self, variables: Mapping[str, str]) -> dict[str, Any]:
        """Returns the settings of SLIME_* variables. Raises the error of the flag, with the name of the variable."""
        values: dict[str, Any] = {}
        for variable in sorted(variables):
            if not variable.startswith(PREFIX) or variable.startswith(OTHER):
                continue
            key = variable.removeprefix(PREFIX).lower()
            try:
                found = self._variable(key, variables[variable])
            except UnknownFlag:
                raise
            except ConfigError as error:
                raise error.at(variable) from None
            for name, value in found.items():
                merge(values, name, value, FAMILIES)
                self.variables[name] = variable
        return values

    def _variable(self, key: str, text: str) -> dict[str, Any]:
        name = flag_name(key)
        if key in self._by_key and _is_switch(self._by_key[key]):
            if text.lower() not in SWITCH:
                raise InvalidSetting.must_be(name, "true, false, 1 or 0", got=text)
            return self._settings({key: SWITCH[text.lower()]}, PREFIX + key.upper())[0]
        if key in self._by_key:
            flag = self._by_key[key]
            name = name if name in self._actions else flag.spelling
        action = self._actions.get(name)
        if name not in self.available or action is None:
            self._refuse(name)
            return {}
        if action.nargs == 0:
            if text.lower() not in SWITCH:
                raise InvalidSetting.must_be(name, "true, false, 1 or 0", got=text)
            words = [name] if SWITCH[text.lower()] else []
        elif action.nargs is None:
            words = [f"{name}={text}"]
        else:
            words = [name, *shlex.split(text)]
        return vars(self.parser.parse_strict(words))

    def _refuse(self, name: str) -> None:
        """Raises NotAvailable for a known flag, UnknownFlag for a likely misspelling; other variables are not ours."""
        reason = why_not(name[2:])
        if reason is not None:
            raise NotAvailable.unavailable(name, reason)
        near = difflib.get_close_matches(name, self.available, n=1, cutoff=SLIP)
        if near:
            variable = PREFIX + _key(near[0]).upper()
            instead = "one that `slime train --help-all` lists" if near[0] in self.parser.refused_flags() else None
            typed = PREFIX + _key(name).upper()
            raise UnknownFlag.unknown("variable", typed, [variable], instead=instead)

    def _settings(
        self, keys: Mapping[str, Any], source: str, *, keep_unknown: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        values: dict[str, Any] = {}
        other: dict[str, Any] = {}
        spelled: dict[str, str] = {}
        for key, value in keys.items():
            if isinstance(value, str) and "\0" in value:
                raise InvalidSetting.must_be(f"{source}: {key}", "text without NUL characters", got=value)
            flag = self._by_key.get(key)
            if flag is None:
                key_values = self._other(key, value, source, other if keep_unknown else None)
            elif not _turns_off(key, flag):
                key_values = {flag.name: _checked(flag, value, source)}
            elif not isinstance(value, bool):
                raise InvalidSetting.must_be(f"{source}: {key}", "true or false", got=value)
            else:
                key_values = {flag.name: not value}
            for name, new in key_values.items():
                if flag is not None and name in values and values[name] != new:
                    raise InvalidSetting.conflict(key, spelled[name], "both set the same setting").at(source)
                spelled[name] = key
                merge(values, name, new, FAMILIES)
        return values, other

    def _other(self, key: str, value: Any, source: str, unknown: dict[str, Any] | None) -> dict[str, Any]:
        """Returns the settings of a key of a flag family. Puts another key into `unknown`, or raises without it."""
        name = flag_name(key).removeprefix("--")
        if why_not(name) is None:
            found = next(_of_families(key, value), None)
            if found is not None:
                return found
            if unknown is not None:
                if not key.isidentifier() or key.startswith("__"):
                    raise InvalidFile(f"{source}: {key!r} cannot be the name of a setting or an attribute", field=key)
                unknown[key] = value
                return {}
        if name in ELSEWHERE or why_not(name) is None:
            raise self._unknown_key(key, value).at(source)
        try:
            self.refuse_names([name])
        except ConfigError as error:
            raise error.at(f"{source}: {key}") from None
        raise self._unknown_key(key, value).at(source)

    def refuse_names(self, names: Sequence[str]) -> None:
        """Raises NotAvailable or UnknownFlag for the first of `names` (flags without dashes) that is not available."""
        for name in names:
            flag = f"--{name}"
            if not name or flag in self.available:
                continue
            here = ELSEWHERE.get(name)
            if here is not None:
                raise UnknownFlag.unknown("option", flag, self.available, instead=here)
            reason = why_not(name)
            if reason is not None:
                raise NotAvailable.unavailable(flag, reason)
            raise self._unknown(flag)

    def _unknown_key(self, key: str, value: Any) -> UnknownFlag:
        if isinstance(value, Mapping):
            flat = "its keys without this section: the file is one flat mapping"
            return UnknownFlag.unknown("key", key, [], instead=flat)
        instead = ELSEWHERE.get(flag_name(key).removeprefix("--"))
        if instead is not None:
            return UnknownFlag.unknown("key", key, [], instead=_AS_TYPED.sub(lambda flag: _key(flag[1]), instead))
        known = dict.fromkeys([*self._by_key, *map(_key, self.available)])
        return unknown_key(key, known, "slime train --help-all", refused=map(_key, self.parser.refused_flags()))

    def _unknown(self, flag: str) -> UnknownFlag:
        return UnknownFlag.unknown("option", flag, self.available, refused=self.parser.refused_flags())


def _of_families(key: str, value: Any) -> Iterator[dict[str, Any]]:
    """Yields the settings that a key stands for, from each family of flags that knows it."""
    for family in FAMILIES:
        read = family.read_key(key, value)
        if read is not None:
            yield {family.setting: read}


def _keys(flag: Flag) -> list[str]:
    return [*_own_keys(flag), *map(_key, flag.negations)]


def _own_keys(flag: Flag) -> list[str]:
    return [flag.name, *map(_key, flag_names(flag.field))]


def _key(name: str) -> str:
    """Spells the key of a flag: `--lease-seconds` -> `lease_seconds`."""
    return name.removeprefix("--").replace("-", "_")


def _checked(flag: Flag, value: Any, source: str) -> Any:
    """Returns `value`; raises the error of its setting with the name of the file."""
    if value is not None:
        try:
            check(flag.field, flag.hint, value)
        except ConfigError as error:
            raise error.at(source) from None
    return value


def _turns_off(key: str, flag: Flag) -> bool:
    """Returns whether `key: true` sets False."""
    return key != flag.name and (flag.turns_off or key not in _own_keys(flag))


def _is_switch(flag: Flag) -> bool:
    hints = (flag.hint, *getattr(flag.hint, "__args__", ()))
    return bool in hints
