"""Facts that are written in more than one place agree."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

import set_version

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = {path.parent.name: tomllib.loads(path.read_text()) for path in ROOT.glob("packages/*/pyproject.toml")}


# Extras whose packages no test installs.
UNTESTED = {"memray", "mlflow", "nixl", "nvidia-cudnn-frontend", "swanlab", "trackio", "wandb"}


def requirements(project: dict[str, Any]) -> list[str]:
    """Returns the requirements of a project, those of its extras included."""
    return [
        *project["dependencies"],
        *(each for extra in project.get("optional-dependencies", {}).values() for each in extra),
    ]


def lines(path: Path) -> list[str]:
    stripped = [line.strip() for line in path.read_text().splitlines()]
    return [line for line in stripped if line and not line.startswith("#")]


def test_ruff() -> None:
    pants = tomllib.loads((ROOT / "pants.toml").read_text())["ruff"]["version"]
    hook = re.search(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert hook is not None
    assert pants == f"ruff=={hook[1]}"


def test_the_packages_have_one_version() -> None:
    assert len(PROJECTS) == 7
    versions = {name: project["project"]["version"] for name, project in PROJECTS.items()}
    assert len(set(versions.values())) == 1, versions
    (version,) = set(versions.values())
    for path in (path for pattern in set_version.FILES for path in ROOT.glob(pattern)):
        text = path.read_text()
        assert set_version.replaced(text, version) == text, f"{path}: run scripts/set_version.py {version}"


def test_one_command_sets_the_version_everywhere(tmp_path: Path) -> None:
    for pattern in set_version.FILES:
        for path in ROOT.glob(pattern):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    set_version.main("2.5.1", tmp_path)
    for path in tmp_path.glob("packages/*/pyproject.toml"):
        project = tomllib.loads(path.read_text())["project"]
        assert project["version"] == "2.5.1"
        for requirement in requirements(project):
            if requirement.startswith("slime-"):
                assert requirement.endswith((">=2.5,<3", "==2.5.1")), requirement
    assert 'version="2.5.1"' in (tmp_path / "pants-macros/packages.py").read_text()
    with pytest.raises(SystemExit, match="MAJOR.MINOR.PATCH"):
        set_version.main("2.5", tmp_path)


def test_slime_all_passes_every_extra_of_the_launcher_on() -> None:
    extras = {name: PROJECTS[name]["project"]["optional-dependencies"] for name in ("all", "launcher")}
    assert extras["all"].keys() == extras["launcher"].keys()
    assert all(each[0].startswith(f"slime-launcher[{name}]==") for name, each in extras["all"].items())


def test_the_projects_say_the_same_of_themselves() -> None:
    for field in ("license", "license-files", "authors", "requires-python", "keywords", "classifiers"):
        values = {name: repr(project["project"][field]) for name, project in PROJECTS.items()}
        assert len(set(values.values())) == 1, (field, values)
    for name in PROJECTS:
        # A wheel holds only what lies in its project's directory.
        assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    pythons = [c.rsplit(" ", 1)[1] for c in PROJECTS["types"]["project"]["classifiers"] if " :: 3." in c]
    assert PROJECTS["types"]["project"]["requires-python"] == f">={pythons[0]}"
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["target-version"]
    assert ruff == f"py{pythons[0].replace('.', '')}"


def test_every_requirement_has_a_version_that_fits() -> None:
    pinned = {line.split("==")[0] for line in lines(ROOT / "constraints.txt")}
    tested = {line.partition("[")[0] for line in lines(ROOT / "3rdparty/python/requirements.txt")}
    assert tested <= pinned
    for name, project in PROJECTS.items():
        named = [re.split(r"[\[<>=!~ ]", line)[0] for line in requirements(project["project"])]
        missing = {requirement for requirement in named if not requirement.startswith("slime-")} - pinned - UNTESTED
        assert not missing, f"slime-{name}: {missing}"


def test_a_test_that_hangs_is_named_before_any_time_limit_of_its_files() -> None:
    pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert (
        0
        < pytest_options["faulthandler_timeout"]
        < tomllib.loads((ROOT / "pants.toml").read_text())["test"]["timeout_default"]
    )
