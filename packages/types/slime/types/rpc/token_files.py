"""Token files of the services that this user runs on this machine, readable by this user only.

A service on the loopback that was given no token generates one and writes it to DIRECTORY/HOST:PORT, where clients of
the same user find it. DIRECTORY is $XDG_RUNTIME_DIR/slime, or /tmp/slime-UID if that variable is not set.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
from pathlib import Path

from slime.types.directories import path_errors
from slime.types.errors import InvalidFile

LOCALHOST = "127.0.0.1"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name, which may lead anywhere
        return False


def private_directory(path: Path) -> Path:
    """Creates the directory `path` for this user alone.

    Raises InvalidFile if another user owns it or may read it, as on file systems without modes.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidFile(f"cannot keep a token in {path}: {error.strerror}", field="token", value=str(path)) from None
    if not _is_private(path):
        raise InvalidFile(
            f"{path} is not a directory that only this user can read: remove it, or `chmod 700` it",
            field="token", value=str(path), expected="a directory of this user with mode 0700",
        )  # fmt: skip
    return path


def _is_private(directory: Path) -> bool:
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def write_private(path: Path, text: str) -> None:
    """Writes a file that only this user can read, as a whole. Raises OutOfSpace, InvalidSetting."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with path_errors(path, "token"):
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w") as file:
                file.write(text)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def publish(address: str, token: str) -> Path:
    """Writes the token of the service at "host:port" to a file, and returns its path."""
    path = private_directory(_directories()[0]) / _name(address)
    write_private(path, f"{token}\n")
    return path


def find(address: str) -> str | None:
    """Returns the token of this user's service at "host:port"; None if there is none or it is not on the loopback."""
    if not is_loopback(address.rpartition(":")[0]):
        return None
    for directory in _directories():
        try:
            # In another user's directory the file may be a link to a secret of this user, and would be sent as a token.
            if _is_private(directory):
                return (directory / _name(address)).read_text().strip()
        except OSError:
            continue
    return None


def retract(path: Path, token: str) -> None:
    """Removes the token file, unless a later service has that address now."""
    try:
        if path.read_text().strip() == token:
            path.unlink()
    except FileNotFoundError:
        pass


def _directories() -> list[Path]:
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    # After `sudo` or `su` the variable may still name another user's directory.
    directories = [Path(runtime, "slime")] if os.path.isdir(runtime) and os.stat(runtime).st_uid == os.geteuid() else []
    return [*directories, Path(f"/tmp/slime-{os.geteuid()}")]


def _name(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{LOCALHOST if host == 'localhost' else host}:{port}"
