"""Files that users name: regular ones of a sensible size, or an error that names the flag; nothing blocks on them."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from slime.types import errors
from slime.types.config_files import read_config
from slime.types.files import MOST_BYTES, check_readable, read_bounded, write_whole
from slime.types.rpc import RpcSettings
from slime.types.rpc.auth import read_token, server_credentials

KINDS = {
    "fifo": "is a pipe, expected a regular file",
    "device": "is a device, expected a regular file",
    "directory": "is a directory, expected a regular file",
    "socket": "is a socket, expected a regular file",
    "loop": "cannot read .*: Too many levels of symbolic links",
    "long": "cannot read .*: File name too long",
    "below": "cannot read .*: Not a directory",
    "null": "cannot read .*: embedded null byte",
    "none": "no such file",
}


def made(directory: Path, kind: str) -> Path:
    path = directory / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        return Path("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "long":
        return directory / ("x" * 300)
    elif kind == "below":
        path.write_text("")
        return path / "file"
    elif kind == "null":
        return directory / "a\0b"
    return path


@pytest.mark.parametrize(("kind", "message"), KINDS.items())
def test_what_is_no_regular_file_is_refused_by_name(tmp_path: Path, kind: str, message: str) -> None:
    path = made(tmp_path, kind)
    kinds = (errors.MissingFile, errors.InvalidFile)
    for read in (check_readable, read_bounded, read_config):
        with pytest.raises(kinds, match=f"--config: .*{message}"):
            read(path, "--config")
    with pytest.raises(kinds, match=f"--token-file: .*{message}"):
        read_token(RpcSettings(token_file=str(path)))
    with pytest.raises(kinds, match=f"--tls-key: .*{message}"):
        server_credentials(RpcSettings(tls_cert=str(path), tls_key=str(path)))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch(0o600)
    os.truncate(path, MOST_BYTES + 1)
    for read in (read_bounded, read_config):
        with pytest.raises(errors.InvalidFile, match="--config: .*large is too large, expected at most 16 MiB"):
            read(path, "--config")
    os.truncate(path, MOST_BYTES)
    assert read_bounded(path, "--config") == bytes(MOST_BYTES)


def test_a_link_to_a_regular_file_is_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a: 1")
    (tmp_path / "link").symlink_to("file")
    assert read_config(tmp_path / "link") == {"a": 1}


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o077, 0o600), (0o007, 0o660)])
def test_a_file_has_the_permissions_that_the_user_chose(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "answers", "private")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == mode


def test_text_is_written_in_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    imports = "import pathlib, sys; from slime.types.files import write_whole"
    program = f"{imports}; write_whole(pathlib.Path(sys.argv[1]), chr(0xe9))"
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    path = tmp_path / "answers"
    subprocess.run([sys.executable, "-c", program, str(path)], env=os.environ | locale, check=True, timeout=60)
    assert path.read_bytes() == "é".encode()
