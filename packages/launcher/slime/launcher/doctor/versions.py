"""Checks the versions of Python and libraries against the table in versions.yaml."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.platform import probes
from slime.rollout.engines.registry import KINDS

TABLE = Path(__file__).with_name("versions.yaml")
OLDEST_PYTHON = "3.11"


@functools.cache
def table() -> dict[str, Any]:
    import yaml

    data = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    assert isinstance(data, dict)
    return data


def check_versions(subject: Subject) -> Iterator[Finding]:
    python = probes.python_version()
    if Version(python) < Version(OLDEST_PYTHON):
        yield fail(f"Python {python}", f"use Python {OLDEST_PYTHON} or 3.12")
    else:
        yield ok(f"Python {python}")
    yield from _namespace()
    packages: Mapping[str, Any] = table()["packages"]
    installed = {name: version for name in packages if (version := probes.package_version(name)) is not None}
    for name, row in packages.items():
        yield from _package(name, row, installed.get(name), subject)
    yield from _rules(installed | {"python": python})
    yield from _nearest(installed, python)


def _namespace() -> Iterator[Finding]:
    spec = importlib.util.find_spec("slime")
    if spec is not None and spec.origin is not None:
        yield fail(
            f"another package named slime is first on the path: {spec.origin}",
            "uninstall it, or take its directory off PYTHONPATH: it hides this one",
        )


def _package(name: str, row: Mapping[str, Any], version: str | None, subject: Subject) -> Iterator[Finding]:
    if version is None:
        if _needed(str(row["needed"]), subject):
            yield fail(f"{name} is not installed, for {row['for']}", f"pip install '{name}{_bounds(row)}'")
        return
    bounds = _bounds(row)
    if bounds and not _is_in(version, bounds):
        found = fail if _needed(str(row["needed"]), subject) else warn
        yield found(f"{name} {version}, for {row['for']}, is not {bounds}", f"pip install '{name}{bounds}'")
    else:
        yield ok(f"{name} {version}")


def _needed(by: str, subject: Subject) -> bool:
    """Returns whether the run needs a package that the table marks `needed: BY`."""
    engine, _, flag = by.partition(" ")
    if engine in KINDS:
        return subject.flag("rollout_engine") == engine and (not flag or bool(subject.flag(flag)))
    if by in ("fsdp", "megatron"):
        return subject.flag("train_backend") == by
    return by == "always"


def _bounds(row: Mapping[str, Any]) -> str:
    words = [f">={row['minimum']}"] if "minimum" in row else []
    return ",".join([*words, *([f"<{row['below']}"] if "below" in row else [])])


def _is_in(version: str, specifiers: str) -> bool:
    """Returns whether a version fits. Pre-releases and local builds (2.13.0+cpu) may; text that is not a version does
    not."""
    try:
        return SpecifierSet(specifiers).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _rules(installed: Mapping[str, str]) -> Iterator[Finding]:
    for rule in table()["rules"]:
        first, then = installed.get(rule["if"]), installed.get(rule["then"])
        if first is None or then is None or not _is_in(first, rule["versions"]):
            continue
        if not _is_in(then, rule["must_be"]):
            yield fail(
                f"{rule['if']} {first} and {rule['then']} {then} do not fit together: {rule['why']}",
                f"install {rule['then']}{rule['must_be']}, or another {rule['if']}",
            )


def _nearest(installed: Mapping[str, str], python: str) -> Iterator[Finding]:
    """Compares the versions of this machine with the most similar combination that was tested."""
    best, gap = None, {}
    for combination in table()["combinations"]:
        wanted = {name: str(version) for name, version in combination["packages"].items()}
        if "sglang" in wanted and "sglang" not in installed:
            continue
        off = {n: v for n, v in wanted.items() if n in installed and not _is_in(installed[n], f"=={v}")}
        if not python.startswith(f"{combination['python']}."):
            off["python"] = str(combination["python"])
        if best is None or len(off) < len(gap):
            best, gap = combination, off
    if best is None:
        return
    if not gap:
        yield ok(f"these versions are tested together ({best['name']}, Python {best['python']})")
        return
    own_versions = dict(installed) | {"python": python}
    yield warn(
        f"these versions were not tested together; the nearest combination is {best['name']}: "
        + ", ".join(f"{name} {version} (here {own_versions[name]})" for name, version in gap.items()),
        "install those if something fails unexpectedly",
    )
