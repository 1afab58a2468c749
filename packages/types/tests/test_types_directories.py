"""Directories that appear whole, and the paths that they may replace."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slime.types import directories
from slime.types.directories import (
    MARK,
    WholeDirectory,
    check_replaceable,
    foreign_files,
    read_mark,
    remove_directory,
    remove_written,
    whole_directory,
)
from slime.types.errors import InvalidSetting, OutOfSpace
from slime.types.files import whole_file, write_whole
from slime.types.scratch import SCRATCH_MARK, ScratchDirectory


def write(path: Path, text: str = "new", name: str = "weights") -> None:
    with whole_directory(path, "test", field="--save-hf") as partial:
        (partial / "deep").mkdir()
        (partial / "deep" / name).write_text(text)


def entries(path: Path) -> list[str]:
    return sorted(p.relative_to(path).as_posix() for p in path.rglob("*"))


def test_a_directory_appears_whole_with_a_list_of_its_files(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    with whole_directory(target, "test") as partial:
        assert not target.exists() and stat.S_IMODE(partial.stat().st_mode) == 0o700
        (partial / "weights").write_text("x")
    assert read_mark(target) == {"writer": "test", "files": ["weights"]}
    assert stat.S_IMODE(target.stat().st_mode) == 0o755
    assert entries(tmp_path) == ["a", "a/model", f"a/model/{MARK}", "a/model/weights"]


@pytest.mark.parametrize("umask, mode", [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_a_directory_has_the_permissions_that_the_user_chose(tmp_path: Path, umask: int, mode: int) -> None:
    target, before = tmp_path / "model", os.umask(umask)
    try:
        write(target)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (target, target / "deep")} == {mode}
    assert entries(target) == ["deep", "deep/weights", MARK] and os.listdir(tmp_path) == ["model"]


def test_a_directory_keeps_the_group_of_a_shared_parent(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    write(tmp_path / "model")
    assert (tmp_path / "model").stat().st_mode & stat.S_ISGID, "what a teammate adds would not belong to the group"


def test_what_was_written_before_is_replaced(tmp_path: Path) -> None:
    write(tmp_path / "model", "old", "gone")
    write(tmp_path / "model", "new")
    assert entries(tmp_path / "model") == ["deep", "deep/weights", MARK]
    assert entries(tmp_path)[0] == "model", "nothing is left beside it"


def test_an_empty_directory_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model")
    assert read_mark(tmp_path / "model")


def a_file(path: Path) -> None:
    path.write_text("precious")


def a_link(path: Path) -> None:
    (path.parent / "elsewhere").mkdir()
    path.symlink_to("elsewhere")


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def somebodys_directory(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("precious")


def somebodys_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text("{}")


def ours_with_more(path: Path) -> None:
    write(path, "old")
    (path / "deep" / "results.csv").write_text("precious")


def ours_with_a_link(path: Path) -> None:
    write(path, "old")
    (path / "link").symlink_to(path.parent)


def an_older_checkpoint(path: Path) -> None:
    path.mkdir()
    (path / "trainer.json").write_text("{}")


OTHERS = {
    a_file: "is a file", a_link: "is a symbolic link", os.mkfifo: "is a pipe", a_socket: "is a socket",
    somebodys_directory: r"holds what slime did not write \(notes.txt\)",
    somebodys_model: r"\(config.json\)", ours_with_more: r"\(deep/results.csv\)", ours_with_a_link: r"\(link/\)",
    an_older_checkpoint: "older version of slime.*; move it away",
}  # fmt: skip


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_what_slime_did_not_write_is_refused_and_stays(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # paths of sockets are short
    target = tmp_path / "model"
    make(target)
    before = entries(tmp_path), os.lstat(target).st_ino
    for attempt in (lambda: check_replaceable(target, field="--save-hf"), lambda: write(target)):
        with pytest.raises(InvalidSetting, match=f"--save-hf: {target} .*{OTHERS[make]}") as told:
            attempt()
        assert told.value.field == "--save-hf" and told.value.value == str(target)
    assert (entries(tmp_path), os.lstat(target).st_ino) == before


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_what_slime_did_not_write_is_not_removed(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "model")
    before = entries(tmp_path)
    with pytest.raises(InvalidSetting, match=OTHERS[make]):
        remove_directory(tmp_path / "model")
    assert entries(tmp_path) == before


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_of_what_others_put_into_a_directory_nothing_is_removed(make, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "model"
    make(target)
    mark = None if target.is_symlink() else read_mark(target)
    ours = set() if mark is None else {MARK, *mark["files"]}
    before = entries(tmp_path)
    assert remove_written(target, field="--dir")
    # Directories that are empty then go, too.
    kept = [name for name in before if name.removeprefix("model/") not in ours]
    assert {*kept} - {*entries(tmp_path)} <= {"model/deep"} and {*entries(tmp_path)} <= {*kept}


def test_a_mark_that_names_files_outside_removes_none_of_them(tmp_path: Path) -> None:
    write(tmp_path / "model")
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "model" / "mine").write_text("kept")
    names = ["../precious", str(tmp_path / "precious"), "deep/weights"]
    (tmp_path / "model" / MARK).write_text(json.dumps({"files": names}))
    assert remove_written(tmp_path / "model")
    assert entries(tmp_path) == ["model", "model/mine", "precious"]
    write(tmp_path / "whole")
    assert remove_written(tmp_path / "whole") is None and not (tmp_path / "whole").exists()


def test_what_slime_wrote_is_removed(tmp_path: Path) -> None:
    write(tmp_path / "model")
    remove_directory(tmp_path / "model")
    assert not os.listdir(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
def test_a_device_is_refused(tmp_path: Path) -> None:
    try:
        os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("no right to make one here")
    with pytest.raises(InvalidSetting, match="is a device"):
        write(tmp_path / "null")
    assert stat.S_ISCHR(os.lstat(tmp_path / "null").st_mode)


@pytest.mark.parametrize("make", OTHERS, ids=lambda make: make.__name__)
def test_what_comes_while_writing_is_refused_too(make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "model"
    directory = WholeDirectory(target)
    make(target)
    inode = os.lstat(target).st_ino
    with pytest.raises(InvalidSetting, match=OTHERS[make]):
        directory.complete("test")
    directory.discard()
    assert os.lstat(target).st_ino == inode and not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_planted_links_are_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    somebodys_directory(victim)
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in (
        ".model.partial",
        ".model.old",
        directories._leftover_prefix(shared / "model", "partial") + "abcdefgh",
    ):
        (shared / name).symlink_to(victim)
    write(shared / "model")
    assert entries(victim) == ["notes.txt"] and not (shared / "model").is_symlink()


def test_a_partial_that_was_exchanged_for_a_link_is_noticed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    somebodys_directory(victim)
    directory = WholeDirectory(tmp_path / "model")
    directory.partial.rename(tmp_path / "moved")
    directory.partial.symlink_to(victim)
    with pytest.raises(InvalidSetting, match="moved the directory away"):
        directory.complete("test")
    directory.discard()
    assert entries(victim) == ["notes.txt"] and not (tmp_path / "model").exists()


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    write(tmp_path / "model", "old")
    with pytest.raises(KeyError), whole_directory(tmp_path / "model", "test"):
        raise KeyError
    with pytest.raises(KeyError), whole_directory(tmp_path / "new" / "model", "test"):
        raise KeyError
    assert (tmp_path / "model" / "deep" / "weights").read_text() == "old" and os.listdir(tmp_path) == ["model"]


KILLED = """
import os, signal, sys
from pathlib import Path
from slime.types import directories

target, when = Path(sys.argv[1]), sys.argv[2]
rename, renames = os.rename, []

def dying(*arguments):
    renames.append(rename(*arguments))
    if len(renames) == int(when):
        os.kill(os.getpid(), signal.SIGKILL)

directories.os.rename = dying
with directories.whole_directory(target, "test") as partial:
    (partial / "weights").write_text("killed")
    if when == "0":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["0", "1"])
def test_what_a_killed_writer_left_is_cleared_away(when: str, tmp_path: Path) -> None:
    target = tmp_path / "model"
    write(target, "old")
    (target / MARK).stat()
    # Killed while it writes, or between the two renames of the replacement (the first is refused by the system).
    done = subprocess.run([sys.executable, "-c", KILLED, target, when], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [name for name in os.listdir(tmp_path) if name.startswith(".")], "there is something to clear away"
    directory = WholeDirectory(target)
    assert (target / "deep" / "weights").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == sorted(["model", directory.partial.name])
    directory.discard()
    write(target)
    assert os.listdir(tmp_path) == ["model"]


def test_what_a_living_writer_writes_stays(tmp_path: Path) -> None:
    first = WholeDirectory(tmp_path / "model")
    (first.partial / "weights").write_text("first")
    with pytest.raises(InvalidSetting, match="--save: another process is writing"):
        WholeDirectory(tmp_path / "model", field="--save", alone=True)
    write(tmp_path / "model", "second")
    first.complete("test")
    first.discard()
    assert entries(tmp_path / "model") == [MARK, "weights"]


SCRATCH = """
import os, signal, sys
from slime.types.scratch import ScratchDirectory
directory = ScratchDirectory("slime-test-", sys.argv[1])
(directory.path / "payloads").mkdir()
(directory.path / "payloads" / "0").write_text("samples")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_scratch_of_dead_processes_goes_with_the_next_start_and_nothing_else_does(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRATCH, tmp_path], timeout=60, check=False)
    (dead,) = tmp_path.iterdir()
    assert entries(dead) == ["run", "run/payloads", "run/payloads/0", SCRATCH_MARK]
    # One that another program made, one of another host, a link, and one of a living process.
    for name, mark in (("own", None), ("host", "another-host")):
        (tmp_path / f"slime-test-{name}" / "run").mkdir(parents=True)
        if mark is not None:
            (tmp_path / f"slime-test-{name}" / SCRATCH_MARK).write_text(mark)
    alive = ScratchDirectory("slime-test-", str(tmp_path))
    (alive.path / "samples").write_text("new")
    (tmp_path / "slime-test-link").symlink_to(alive.path.parent)
    kept = {"slime-test-own", "slime-test-host", "slime-test-link", alive.path.parent.name}
    assert {path.name for path in tmp_path.iterdir()} == kept
    second = ScratchDirectory("slime-test-", str(tmp_path))
    assert (alive.path / "samples").read_text() == "new"
    assert second.path.parent.stat().st_mode & 0o777 == 0o700
    for each in (alive, second):
        each.close()
    assert {path.name for path in tmp_path.iterdir()} == kept - {alive.path.parent.name}


def test_paths_that_take_no_directory_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "model", tmp_path / ("n" * 300), tmp_path / ("n" * 250)):
        with pytest.raises(InvalidSetting, match="--save-hf: cannot write"):
            write(path)
    assert os.listdir(tmp_path) == ["file"]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace, match="bytes are needed"):
        WholeDirectory(tmp_path / "model", need_bytes=1 << 60)
    with pytest.raises(OutOfSpace, match="no space left"), whole_directory(tmp_path / "model", "test"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OutOfSpace, match="no space left"), whole_directory(tmp_path / "model", "test"):
        raise OSError("8192 requested and 5824 written")  # numpy's words
    assert not os.listdir(tmp_path)


def test_files_that_no_mark_lists_are_named(tmp_path: Path) -> None:
    write(tmp_path / "model")
    assert foreign_files(tmp_path / "model") == []
    (tmp_path / "model" / MARK).write_text('{"files": 3}')
    assert foreign_files(tmp_path / "model") == ["deep/", MARK]


def test_a_file_appears_whole_and_replaces_only_a_file(tmp_path: Path) -> None:
    target = tmp_path / "notes.txt"
    write_whole(target, "first")
    with pytest.raises(KeyError), whole_file(target) as file:
        file.write("half")
        raise KeyError
    write_whole(tmp_path / "second", "x")
    assert target.read_text() == "first" and stat.S_IMODE(target.stat().st_mode) == 0o644
    (tmp_path / "link").symlink_to(target)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe", "missing/below", "n" * 300):
        with pytest.raises(InvalidSetting, match="path"):
            write_whole(tmp_path / name, "text", field="--path")
    assert entries(tmp_path) == ["link", "notes.txt", "pipe", "second"] and target.read_text() == "first"
