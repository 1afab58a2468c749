"""Checks that plug-ins exist, load, and take the arguments that they will be called with."""

from __future__ import annotations

from collections.abc import Iterator

from slime.launcher.config.catalogue import declared
from slime.launcher.config.checks.plugins import check_plugins
from slime.launcher.doctor.finding import Finding, Subject, fail, ok
from slime.types.errors import ConfigError
from slime.types.plugin_contracts import CONTRACTS
from slime.types.setting_values import flag_name


def check_each_plugin(subject: Subject) -> Iterator[Finding]:
    settings = declared()
    paths = [name for name in settings if flag_name(name) in CONTRACTS]
    without = {name: flag.default for name, flag in settings.items()}
    # Some plug-ins are configured by keys of --custom-config-path and of --sglang-NAME.
    extra_args = {name: value for name, value in subject.args.items() if name not in settings}
    extra_args["sglang_args"] = subject.flag("sglang_args") or {}
    for name in ("rm_type", "eval_overrides", *paths):
        value = subject.flag(name)
        if not value or value == settings[name].default:
            continue
        flag = "--eval-config" if name == "eval_overrides" else flag_name(name)
        try:
            # Checked one at a time, so that the first faulty plug-in does not hide the others.
            check_plugins(without | extra_args | {name: value})
        except ConfigError as error:
            yield fail(str(error), "correct the path or the function; the message says what is expected")
        else:
            named = " ".join(map(str, value)) if isinstance(value, list | dict) else value
            yield ok(f"{flag} {named} loads" + (" and takes its arguments" if flag in CONTRACTS else ""))
