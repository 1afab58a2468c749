"""Reads regular files that users name, and writes files as a whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from slime.types.directories import kind_of, path_errors
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile

# Settings, tokens, keys and certificates are far smaller.
MOST_BYTES = 16 << 20
# Bytes at the beginning of a file that are searched for the sign of its kind.
SIGN_WITHIN = 4096
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def check_readable(path: str | Path, flag: str) -> None:
    """Raises MissingFile, or InvalidFile if `path` is not a regular file: reading a pipe would wait for its writer, and
    a device may have no end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise MissingFile(f"{flag}: no such file {path}", field=flag, value=str(path), expected="a file") from None
    except (OSError, ValueError) as error:
        raise _cannot_read(path, flag, error) from None
    if not stat.S_ISREG(mode):
        raise InvalidFile(
            f"{flag}: {path} is a {kind_of(mode)}, expected a regular file",
            field=flag, value=str(path), expected="a regular file",
        )  # fmt: skip


def no_directory(path: str | Path, flag: str, expected: str = "a Hugging Face model directory") -> MissingFile:
    """Returns the error for a missing directory, with the command that downloads it if it looks like a Hub name."""
    return MissingFile(
        f"{flag}: no such directory {path}{hub_hint(path, flag)}", field=flag, value=str(path), expected=expected
    )


def hub_hint(path: str | Path, flag: str, kind: str = "model") -> str:
    """Returns a hint how to download "ORG/NAME" from the Hub; "" for other paths. kind: model or dataset."""
    text = str(path)
    if not _HUB_NAME.fullmatch(text) or Path(text).parent.exists():
        return ""
    name = text.rpartition("/")[2]
    options, file = ("", "") if kind == "model" else (f" --repo-type {kind}", "/FILE")
    return f": for a name on the Hub, `hf download {text}{options} --local-dir {name}`, then {flag} {name}{file}"


def read_bounded(path: str | Path, flag: str, most_bytes: int = MOST_BYTES) -> bytes:
    """Returns the content of a regular file that `flag` names. Raises MissingFile, InvalidFile."""
    check_readable(path, flag)
    try:
        with open_regular(path) as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise _cannot_read(path, flag, error) from None
    if len(content) > most_bytes:
        expected = f"at most {most_bytes >> 20} MiB"
        raise InvalidFile(
            f"{flag}: {path} is too large, expected {expected}", field=flag, value=str(path), expected=expected
        )
    return content


def open_regular(path: str | Path) -> BinaryIO:
    """Opens a file to read its bytes. Raises OSError; also, without waiting, for a pipe or a device."""
    # Without O_NONBLOCK, opening a pipe would wait for its writer.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        raise OSError(errno.EINVAL, f"a {kind_of(mode)} and not a regular file", str(path))
    return file


def read_regular(path: str | Path) -> bytes:
    """Returns the content of a file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def _cannot_read(path: str | Path, flag: str, error: OSError | ValueError) -> InvalidFile:
    reason = error.strerror if isinstance(error, OSError) else error
    return InvalidFile(f"{flag}: cannot read {path}: {reason}", field=flag, value=str(path), expected="a regular file")


def check_file_place(path: Path, *, field: str = "path") -> None:
    """Raises InvalidSetting if `path` exists and is not a regular file."""
    if os.path.lexists(path) and (path.is_symlink() or not path.is_file()):
        raise InvalidSetting(
            f"{field}: {path} is not a regular file; expected one, or a path that does not exist",
            field=field, value=str(path), expected="a regular file, or a path that does not exist",
        )  # fmt: skip


def check_own_file(path: Path, sign: bytes, kind: str, *, field: str = "path") -> None:
    """Raises InvalidSetting if a file at `path` lacks the `sign` that a `kind` has near its beginning: it belongs to
    somebody else and must not be replaced."""
    check_file_place(path, field=field)
    try:
        with path.open("rb") as file:
            beginning = file.read(SIGN_WITHIN)
    except (FileNotFoundError, NotADirectoryError):
        # Writing the file reports a path that cannot hold one.
        return
    except OSError as error:
        raise _cannot_read(path, field, error) from None
    if beginning and sign not in beginning:
        expected = f"a new file, or a {kind} to replace"
        raise InvalidSetting(
            f"{field}: {path} is not a {kind}, and is not replaced; expected {expected}",
            field=field, value=str(path), expected=expected,
        )  # fmt: skip


@contextmanager
def whole_file(path: Path, mode: str = "w", *, field: str = "path") -> Iterator[IO[Any]]:
    """Yields a file that replaces `path` if the block succeeds; otherwise `path` stays unchanged.

    The file is written beside it, under an unpredictable name, with the permissions that the umask leaves; text as
    UTF-8.
    Raises InvalidSetting if `path` is not a regular file or cannot be written, OutOfSpace.
    """
    with path_errors(path, field):
        check_file_place(path, field=field)
        # Not mkstemp, whose files only this user can read: the umask of a process cannot be asked for without a change.
        name = path.parent / f".{path.name}.{secrets.token_hex(4)}"
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        try:
            with open(descriptor, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(name)
            raise


def write_whole(path: Path, text: str, *, field: str = "path") -> None:
    """Replaces `path` by a file that holds `text`, as a whole."""
    with whole_file(path, field=field) as file:
        file.write(text)


def json_reason(error: Exception) -> str:
    """Returns why a line is not JSON, with the place in it; the file and the line are known already."""
    return f"{error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else str(error)
