"""Each wheel alone: what it installs, what it imports, what its metadata says."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from email.parser import Parser
from pathlib import Path

import pytest

from clean_environment import DISTRIBUTIONS, ROOT

# The packages that each needs, and those that must not even be installed with it.
SIBLINGS = {
    "types": set(),
    "buffer": {"types"},
    "rollout": {"types"},
    "converters": {"types"},
    "trainer": {"types", "converters"},
    "launcher": {"types", "buffer", "rollout", "converters", "trainer"},
}
ABSENT = {
    "types": {"torch", "ray", "transformers", "sglang", "megatron-core"},
    "buffer": {
        "torch",
        "ray",
        "transformers",
        "sglang",
        "megatron-core",
        "pyarrow",
        "reasoning-gym",
        "psycopg",
        "boto3",
    },  # fmt: skip
    "rollout": {"torch", "ray", "transformers", "sglang", "megatron-core", "reasoning-gym", "matplotlib", "boto3"},
    "converters": {"ray", "sglang", "megatron-core"},
    "trainer": {"ray", "sglang", "megatron-core"},
    "launcher": {"sglang"},
}
SCRIPTS = {
    "buffer": "slime-buffer",
    "rollout": "slime-rollout",
    "converters": "slime-convert",
    "trainer": "slime-trainer",
    "launcher": "slime",
}
# Heavy: no `import slime.NAME` may bring them in, installed or not.
LAZY = ["torch", "transformers", "ray", "sglang", "megatron", "grpc_tools"]
# Code that an extra is for.
EXTRA_MODULES = {"rollout": "slime.rollout.engines.embedded.", "trainer": "slime.trainer.backends.megatron."}
# The most distributions (itself and its siblings included) and MB that a package may install without extras.
LIMITS = {"types": (10, 130), "buffer": (12, 150), "rollout": (40, 200)}

IMPORT_LIGHTLY = """
import sys, time, json
start = time.perf_counter()
import slime.{name}
seconds = time.perf_counter() - start
print(json.dumps({{"seconds": seconds, "modules": sorted({{m.split(".")[0] for m in sys.modules}})}}))
"""
IMPORT_ALL = """
import importlib, json, pathlib, sys
import slime.{name}
skip, root = {skip!r}, pathlib.Path(slime.{name}.__file__).parents[2]
names = []
for path in sorted((root / "slime").rglob("*.py")):
    parts = path.relative_to(root).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    # Modules for engines on GPUs, where torch and Triton are.
    on_gpus = parts[-1] in ("broadcast_deltas", "one_pass", "repacked")
    if on_gpus or parts[-1] == "__main__" or (skip and (name + ".").startswith(skip) and name + "." != skip):
        continue
    importlib.import_module(name)
    names.append(name)
print(json.dumps({{"names": names, "modules": sorted({{m.split(".")[0] for m in sys.modules}})}}))
"""


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_wheel_works_alone(name: str, make_environment: Callable) -> None:
    environment = make_environment()
    environment.install(f"slime-{name}")

    ours = {d.removeprefix("slime-") for d in environment.installed() if d.startswith("slime-")}
    assert ours == {name} | SIBLINGS[name]
    assert not environment.installed() & ABSENT[name]
    if name in LIMITS:
        distributions, megabytes = LIMITS[name]
        assert len(environment.installed()) <= distributions and environment.megabytes() <= megabytes

    light = [json.loads(environment.run(IMPORT_LIGHTLY.format(name=name))) for _ in range(3)]
    assert not set(light[0]["modules"]) & set(LAZY)
    assert min(reading["seconds"] for reading in light) < 1.0

    everything = json.loads(environment.run(IMPORT_ALL.format(name=name, skip=EXTRA_MODULES.get(name, ""))))
    assert f"slime.{name}" in everything["names"]
    assert not set(everything["modules"]) & {d.removesuffix("-core") for d in ABSENT[name]}

    if name in SCRIPTS:
        assert "usage: " in environment.script(SCRIPTS[name], "--help").lower()


@pytest.mark.parametrize(("version", "names"), [("3.12", list(SIBLINGS)), ("3.13", ["types", "buffer", "rollout"])])
def test_the_wheels_import_on_later_pythons(
    version: str, names: list[str], make_environment: Callable, tmp_path: Path
) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on this machine")
    environment = make_environment(python)
    # The indexes of a machine may have no build of torch for this Python but the largest; nothing here imports it.
    override = tmp_path / "override.txt"
    override.write_text("torch ; python_version < '3'\n")
    # `slime-all` brings the others by itself.
    wanted = ["all"] if names == list(SIBLINGS) else names
    environment.install(*(f"slime-{name}" for name in wanted), options=("--override", override))
    for name in names:
        environment.run(IMPORT_LIGHTLY.format(name=name))
    for name in SCRIPTS.keys() & set(names):
        environment.script(SCRIPTS[name], "--help")


def find_python(version: str) -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for candidate in (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")):
        # A shim of pyenv exists for versions that are not chosen, too.
        if candidate and subprocess.run([candidate, "-c", ""], capture_output=True).returncode == 0:
            return str(candidate)
    return None


# Distributions whose modules have another name.
NAMES = {
    "PIL": "pillow",
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "megatron": "megatron-core",
    "yaml": "pyyaml",
}
# Imported where they happen to be installed, and required by nobody.
OPTIONAL = {"sglang", "transformer-engine", "triton", "uvloop"}


@pytest.mark.parametrize("name", SIBLINGS)
def test_metadata_names_what_the_code_imports(name: str, wheels: Path) -> None:
    required, extras = requirements(wheels, name)
    owners = {module: package for package in SIBLINGS for module in modules(wheels, package)}
    siblings, third_party = set(), set()
    for imported in imports(wheels, name):
        top = imported.split(".")[0]
        if top == "slime":
            siblings.add(owner(imported, owners))
        elif top not in sys.stdlib_module_names:
            third_party.add(NAMES.get(top, top.replace("_", "-").lower()))
    assert {f"slime-{s}" for s in siblings - {name}} <= required
    # Where a package only passes a sibling on (a command, a service it starts), it says so in its requirements alone.
    assert {r for r in required if r.startswith("slime-")} == {f"slime-{s}" for s in SIBLINGS[name]}
    assert third_party - OPTIONAL <= required | extras


def requirements(wheels: Path, name: str) -> tuple[set[str], set[str]]:
    """The names of the distributions that a wheel requires, and of those that its extras do."""
    with wheel_of(wheels, name) as archive:
        path = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
    required, extras = set(), set()
    for line in metadata.get_all("Requires-Dist") or []:
        found = re.match(r"[A-Za-z0-9._-]+", line)
        assert found is not None, line
        (extras if "extra ==" in line else required).add(found.group().lower())
    return required, extras


def wheel_of(wheels: Path, name: str) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(wheels.glob(f"slime_{name}-*.whl")))


def modules(wheels: Path, name: str) -> Iterator[str]:
    with wheel_of(wheels, name) as archive:
        for path in archive.namelist():
            if path.endswith(".py"):
                yield path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(wheels: Path, name: str) -> Iterator[str]:
    """Every module that the code of a wheel imports, at the top or in a function."""
    with wheel_of(wheels, name) as archive:
        for path in archive.namelist():
            if not path.endswith(".py"):
                continue
            for node in ast.walk(ast.parse(archive.read(path))):
                if isinstance(node, ast.Import):
                    yield from (alias.name for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    yield from (f"{node.module}.{alias.name}" for alias in node.names)


def owner(imported: str, owners: dict[str, str]) -> str:
    """The package of ours that holds `imported`, a module or a name in one."""
    module = imported
    while module not in owners:
        module = module.rpartition(".")[0]
        assert module, f"no package has {imported}"
    return owners[module]


def test_wheels_hold_no_module_twice(wheels: Path) -> None:
    seen: dict[str, str] = {}
    for name in SIBLINGS:
        for module in modules(wheels, name):
            assert module not in seen, f"{module} is in slime-{seen.get(module)} and slime-{name}"
            # The namespaces stay open for every package.
            assert module not in ("slime", "slime.utils")
            seen[module] = name


@pytest.mark.parametrize("name", SIBLINGS)
def test_wheels_are_typed(name: str, wheels: Path) -> None:
    with wheel_of(wheels, name) as archive:
        assert f"slime/{name}/py.typed" in archive.namelist()


@pytest.mark.parametrize("name", SIBLINGS)
def test_a_wheel_holds_the_files_of_its_package(name: str, wheels: Path) -> None:
    directory = ROOT / "packages" / name
    kinds = {".py", ".pyi", ".typed", ".proto", ".json", ".jinja", ".tsv", ".yaml", ".html", ".css", ".js"}
    tree = {
        p.relative_to(directory).as_posix()
        for p in (directory / "slime").rglob("*")
        if p.suffix in kinds or p.name == "py.typed"
    }
    with wheel_of(wheels, name) as archive:
        held = {path for path in archive.namelist() if ".dist-info/" not in path}
    assert tree and held == tree


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_can_be_published(name: str, wheels: Path) -> None:
    with wheel_of(wheels, name) as archive:
        (path,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(path).decode())
        licence = archive.read(path.replace("METADATA", "licenses/LICENSE"))
    assert licence == (ROOT / "LICENSE").read_bytes()
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Author"] and metadata["Summary"] and metadata["Requires-Python"] == ">=3.11"
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and page.startswith(f"# slime-{name}")


def test_slime_types_carries_the_contract_for_other_languages(wheels: Path) -> None:
    with wheel_of(wheels, "types") as archive:
        held = {Path(path).name: archive.read(path) for path in archive.namelist() if path.endswith(".proto")}
    assert held == {path.name: path.read_bytes() for path in (ROOT / "proto/slime/v1").glob("*.proto")}


def test_the_meta_distribution_has_no_code_and_requires_one_release(wheels: Path) -> None:
    with wheel_of(wheels, "all") as archive:
        assert all(".dist-info/" in path for path in archive.namelist())
    required, extras = requirements(wheels, "all")
    assert required == {f"slime-{name}" for name in SIBLINGS} and extras == {"slime-launcher"}


@pytest.mark.parametrize("name", SIBLINGS)
def test_each_package_uses_what_python_3_10_does_not_have(name: str, wheels: Path) -> None:
    """Otherwise `requires-python` asks for more than the package needs, with those that it requires."""
    packages = {name, "types"}
    assert "typing.Self" in {imported for each in packages for imported in imports(wheels, each)}
