"""The `slime doctor` command."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from slime.launcher.config.help import CommandParser
from slime.launcher.doctor.cluster import check_ray
from slime.launcher.doctor.data import check_data
from slime.launcher.doctor.disk import check_disk
from slime.launcher.doctor.finding import FAIL, OK, WARN, Check, Finding, Subject, exit_code, fail, run_checks
from slime.launcher.doctor.gpus import check_gpus
from slime.launcher.doctor.limits import check_limits
from slime.launcher.doctor.model import check_model
from slime.launcher.doctor.plugins import check_each_plugin
from slime.launcher.doctor.ports import check_ports
from slime.launcher.doctor.run import check_run
from slime.launcher.doctor.versions import check_versions
from slime.types.errors import ConfigError, InvalidSetting, SlimeError, UnknownFlag, nearest
from slime.types.settings import Parser

CHECKS: Mapping[str, Check] = {
    "versions": check_versions,
    "limits": check_limits,
    "gpus": check_gpus,
    "ports": check_ports,
    "ray": check_ray,
    "disk": check_disk,
    "model": check_model,
    "data": check_data,
    "plugins": check_each_plugin,
    "run": check_run,
}

# Words before the flags, in case the user pastes a whole command.
PASTED = ("slime", "train", "train-async")

COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}

DESCRIPTION = """Checks this machine before a run costs money. It changes nothing.

Without flags it checks the machine: versions of Python and of libraries, memory, /dev/shm, open files, GPUs, ports,
Ray, disk. With flags of `slime train` (a whole command line, or some of them) it also checks the model directory, data
sets, plug-ins and addresses that they name, and the memory and disk space that the run needs.

Each line has a status (`ok`, `warn` or `FAIL`), the observation, and after `->` the remedy."""

EPILOG = """examples:
  slime doctor
  slime doctor --hf-checkpoint ~/models/Qwen3-4B --prompt-data train.jsonl --input-key prompt
  slime doctor --json $(cat my-run.flags)

exit code: 0 if nothing FAILed, 1 if something did, 2 for a wrong flag of `slime doctor` itself"""


def parser(command: str) -> Parser:
    reader = CommandParser(
        prog="slime doctor",
        usage="slime doctor [--json] [--timeout SECONDS] [CONFIG.yaml] [flags of slime train]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reader.add_argument(
        "--json", action="store_true", help="Print one JSON object: {ok, findings: [{check, status, what, todo}]}"
    )
    reader.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="Deadline of each check (default: 60)"
    )
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    """Runs the command. Returns 0 if nothing failed, 1 if something did, 2 for a wrong flag, 130 for Ctrl-C."""
    reader = parser(command)
    try:
        options, words = reader.parse_known_args(list(argv))
        if not options.timeout > 0:
            raise InvalidSetting.must_be("--timeout", "greater than 0", got=options.timeout)
        _refuse_slips(words, reader.flag_names())
    except ConfigError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2
    while words and words[0] in PASTED:
        del words[0]
    # Loading a plug-in must not leave a compiled file beside it, and its output must not mix with ours.
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    output = sys.stdout
    try:
        with contextlib.redirect_stdout(sys.stderr):
            findings = []
            for finding in examine(words, options.timeout):
                findings.append(finding)
                if not options.json:
                    show_finding(finding, output)
    except KeyboardInterrupt:
        print("slime: interrupted", file=sys.stderr)
        return 130
    finally:
        sys.dont_write_bytecode = before
    code = exit_code(findings)
    if options.json:
        print(json.dumps({"ok": code == 0, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
    return code


def show_finding(finding: Finding, output: TextIO) -> None:
    """Prints a finding as a line; on a terminal its status is coloured, unless NO_COLOR is set."""
    line = Text(finding.line())
    line.stylize(COLOURS[finding.status], 0, len(finding.status))
    Console(file=output, highlight=False, soft_wrap=True).print(line)
    output.flush()


def _refuse_slips(words: Sequence[str], doctor_flags: list[str]) -> None:
    """Raises UnknownFlag for a flag that is not of `slime train` and resembles one of the doctor's own."""
    from slime.launcher.config.catalogue import training_parser

    flags = [word.split("=", 1)[0] for word in words if word.startswith("--")]
    known = training_parser().flag_names() if flags else []
    for flag in flags:
        if flag not in known and nearest(flag, [*doctor_flags, *known]) in doctor_flags:
            raise UnknownFlag.unknown("option", flag, doctor_flags)


def examine(words: Sequence[str], seconds: float, checks: Mapping[str, Check] = CHECKS) -> Iterator[Finding]:
    """Yields the findings of `checks` about this machine and the run whose flags are `words`."""
    subject, problems = read_flags(words)
    yield from problems
    yield from run_checks(checks, subject, seconds)


def read_flags(words: Sequence[str]) -> tuple[Subject, list[Finding]]:
    """Reads flags of `slime train`. Returns the settings that are valid, and the errors of the others."""
    from slime.launcher.config import run_config
    from slime.launcher.config.catalogue import declared, training_parser

    if not words:
        return Subject(), []
    problems: list[Finding] = []
    config = None
    try:
        config = run_config.parse(words, check=False)
    except ConfigError as error:
        problems.append(_about_flags(error))
    try:
        parsed, _ = training_parser().parse_known_args(list(words))
        values = {name: value for name, value in vars(parsed).items() if name != "config"}
    except SlimeError:
        values = {}  # the same error that parse raised
    if config is not None:
        settings = declared()
        changed = {n for n, v in config.flat.items() if n in settings and v != settings[n].default}
        return Subject(config.flat, frozenset(values) | changed, config), problems
    defaults = {flag.name: flag.default for flag in declared().values() if flag.default is not dataclasses.MISSING}
    return Subject(defaults | values, frozenset(values)), problems


def _about_flags(error: ConfigError) -> Finding:
    if "is required" in error.message:
        return Finding(
            "warn",
            f"these flags do not make a complete run: {error}",
            "give all flags of the run to have memory and disk checked",
            "flags",
        )
    return dataclasses.replace(fail(str(error), "fix the flag: slime train would refuse it too"), check="flags")
