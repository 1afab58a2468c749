"""Clean virtual environments, and the wheels that are installed in them.

Environments are made by uv: it links files from its cache, so that one with torch takes seconds. Versions are those of
constraints.txt unless a test asks for others.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uv

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("types", "buffer", "rollout", "converters", "trainer", "launcher")
# The last has no code: it requires the others.
DISTRIBUTIONS = (*PACKAGES, "all")


def run(*command: str | Path, timeout: float = 240, **options) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; a failure shows everything it printed."""
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=timeout, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done


def clean_environment() -> dict[str, str]:
    """This process's environment without what would let an interpreter see more than its own virtual environment."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PEX", "VIRTUAL_ENV"))}


class CleanEnvironment:
    """A virtual environment of its own."""

    def __init__(self, path: Path, wheels: Path, python: str) -> None:
        self.bin = path / "bin"
        self.python = self.bin / "python"
        self._wheels = wheels
        run(uv.find_uv_bin(), "venv", "--quiet", "--no-project", "--python", python, path, env=clean_environment())

    def install(self, *requirements: str | Path, options: Sequence[str | Path] = ()) -> None:
        """Installs from the built wheels and the machine's indexes; `options` replace the constraints."""
        run(
            uv.find_uv_bin(), "pip", "install", "--quiet", "--python", self.python, "--find-links", self._wheels,
            *(options or ("--constraint", ROOT / "constraints.txt")), *requirements,
            timeout=400, env=clean_environment(),
        )  # fmt: skip

    def installed(self) -> set[str]:
        listing = run(uv.find_uv_bin(), "pip", "freeze", "--python", self.python, env=clean_environment()).stdout
        return {line.split("==")[0].split(" @")[0].lower() for line in listing.splitlines()}

    def megabytes(self) -> float:
        """Returns the size of what is installed, as it was unpacked: no bytecode."""
        files = (path for path in self._site_packages.rglob("*") if path.is_file() and path.suffix != ".pyc")
        return sum(path.stat().st_size for path in files) / 1e6

    @property
    def _site_packages(self) -> Path:
        (directory,) = self.bin.parent.glob("lib/python*/site-packages")
        return directory

    def run(self, code: str, *arguments: str) -> str:
        return run(self.python, "-I", "-c", code, *arguments, env=clean_environment()).stdout

    def script(self, name: str, *arguments: str) -> str:
        return run(self.bin / name, *arguments, env=clean_environment()).stdout


def collect_wheels(directory: Path) -> Path:
    """Fills `directory` with all wheels: those that Pants packaged for the test, else built here."""
    packaged = list(ROOT.glob("slime_*.whl"))
    for wheel in packaged:
        shutil.copy(wheel, directory)
    for name in () if packaged else DISTRIBUTIONS:
        # In a copy: setuptools leaves build directories behind.
        with tempfile.TemporaryDirectory() as scratch:
            copy = Path(scratch) / name
            shutil.copytree(ROOT / "packages" / name, copy, ignore=shutil.ignore_patterns("build", "*.egg-info"))
            run(uv.find_uv_bin(), "build", "--quiet", "--wheel", "--no-create-gitignore", "-o", directory, copy)
    return directory
