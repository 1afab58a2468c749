"""`--ray-address auto` joins a Ray of this user, and not what others of the machine noted or started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from slime.launcher.platform import probes
from slime.launcher.platform.ray_cluster import address_for_auto, ray_cluster
from slime.types.errors import Unavailable

# Says that it runs, and waits until its standard input ends.
NODE = "import sys; print(flush=True); sys.stdin.read()"
Start = Callable[[str], None]


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Ray's note of the last cluster of this machine."""
    path = tmp_path / "ray_current_cluster"
    monkeypatch.setattr(probes, "RAY_CLUSTER", path)
    return path


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a process with the name and the option of a node of the Ray cluster at an address."""
    program = tmp_path / "raylet"
    program.symlink_to(os.path.realpath(sys.executable))
    look = probes.psutil.process_iter
    started: set[int] = set()
    # Another test, or a user of this machine, may run a Ray at this moment.
    monkeypatch.setattr(probes.psutil, "process_iter", lambda *fields: (p for p in look(*fields) if p.pid in started))
    with ExitStack() as running:

        def begin(address: str) -> None:
            words = [str(program), "-c", NODE, f"--gcs-address={address}"]
            node = running.enter_context(
                subprocess.Popen(
                    words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONHOME": sys.base_prefix}
                )
            )
            running.callback(node.kill)
            assert node.stdout is not None and node.stdout.readline() == b"\n"
            started.add(node.pid)

        yield begin


def test_the_ray_of_this_user_is_joined_whatever_is_noted(note: Path, start: Start) -> None:
    start("127.0.0.1:1")
    assert address_for_auto() == "127.0.0.1:1"
    note.write_text("127.0.0.1:2\n")
    assert address_for_auto() == "127.0.0.1:1"
    start("127.0.0.1:3")
    with pytest.raises(Unavailable, match=r"several here: 127.0.0.1:1, 127.0.0.1:3; give the address of one"):
        address_for_auto()
    note.write_text("127.0.0.1:3\n")
    assert address_for_auto() == "127.0.0.1:3"


def test_a_ray_of_another_user_is_not_joined(note: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Any] = []
    monkeypatch.setattr("ray.init", lambda **options: joined.append(options))
    note.write_text("127.0.0.1:1\n")
    with pytest.raises(Unavailable, match="127.0.0.1:1, has ended, or another user runs it"), ray_cluster("auto"):
        pass
    start("127.0.0.1:1")
    # To another user, the process is one of somebody else.
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(Unavailable, match="another user runs it"), ray_cluster("auto"):
        pass
    assert joined == []
