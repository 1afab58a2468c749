"""Pants on a machine whose pip has a constraints file for all users: its own pip does not read that."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNWANTED = ("PYTHON", "PEX", "PANTS", "VIRTUAL_ENV", "PIP_")


def write_wheel(directory: Path) -> None:
    """demo 1.0, with one module."""
    info = "demo-1.0.dist-info"
    directory.mkdir()
    with zipfile.ZipFile(directory / "demo-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo.py", "ANSWER = 42\n")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", f"demo.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


def write_checkout(directory: Path) -> None:
    """This repository's build with one program that needs demo."""
    directory.mkdir()
    for name in ("pants", "pants.toml"):
        shutil.copy(ROOT / name, directory)
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("pants-plugins", "pants-macros", "scripts"):
        shutil.copytree(ROOT / name, directory / name, ignore=ignore)
    (directory / "constraints.txt").touch()
    (directory / "examples").mkdir()
    (directory / "examples" / "program.py").write_text("import demo\n\nprint(demo.ANSWER)\n")
    (directory / "examples" / "BUILD").write_text(
        'python_requirement(name="demo", requirements=["demo"])\n'
        'python_sources(name="code")\n'
        'pex_binary(name="program", entry_point="program.py", output_path="program.pex")\n'
    )


def test_a_constraint_for_all_users_does_not_stop_a_wheel_of_a_directory(tmp_path: Path) -> None:
    write_wheel(tmp_path / "wheels")
    write_checkout(tmp_path / "checkout")
    (tmp_path / "limits.txt").write_text("demo<=2\n")
    (tmp_path / "etc" / "pip").mkdir(parents=True)
    (tmp_path / "etc" / "pip" / "pip.conf").write_text(f"[global]\nconstraint = {tmp_path / 'limits.txt'}\n")

    environment = {k: v for k, v in os.environ.items() if not k.startswith(UNWANTED)}
    environment |= {
        "PANTS_PANTSD": "false",
        # In place of /etc/xdg, for the pip that Pants starts as well.
        "XDG_CONFIG_DIRS": str(tmp_path / "etc"),
        "PANTS_SUBPROCESS_ENVIRONMENT_ENV_VARS": f"+['XDG_CONFIG_DIRS={tmp_path / 'etc'}']",
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
    }
    checkout = tmp_path / "checkout"
    done = subprocess.run(
        [checkout / "pants", "package", "examples:program"],
        cwd=checkout, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    printed = subprocess.run(
        ["python3.11", checkout / "dist" / "program.pex"], capture_output=True, text=True, timeout=60, check=True
    )
    assert printed.stdout == "42\n"
