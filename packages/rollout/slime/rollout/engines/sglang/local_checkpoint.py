"""The checkpoint on the host of SGLang engines that --update-weight-mode delta brings up to date.

    --update-weight-local-checkpoint-dir/
        weight_v000007-LINEAGE/            a Hugging Face directory with that version of a trainer process
        .weight_v000006-LINEAGE.updating   while a delta is written into it; no engine loads it, and the next whole
                                           update removes it

LINEAGE is part of the name so that no engine loads a directory that another run left or is writing. Each process of an
engine locks the directory that it loaded last; directories of another trainer process are removed only if no process
locks them. A directory of an earlier boot of the host may be a mix of versions, since a delta is not flushed to the
disk: it is not used.

SGLang loads whole directories. Before that its processes run `pull_weights`, which copies a published directory, or
writes a published delta into the local files and renames their directory.
"""

from __future__ import annotations

import fcntl
import functools
import json
import logging
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from slime.types.directories import clear_leftovers, path_errors, read_mark, remove_written, whole_directory
from slime.types.errors import DataLoss, InvalidFile, MissingFile, WrongState
from slime.types.weight_deltas import checkpoint_name, process_of
from slime.types.weight_deltas.buckets import VersionDelta, apply_tensor, read_bucket, read_index

FIELD = "--update-weight-local-checkpoint-dir"
WRITER = "slime-rollout"
BOOT = Path("/proc/sys/kernel/random/boot_id")
# safetensors' names of dtypes, by torch's names.
SAFETENSORS_TYPES = {
    "float64": "F64", "int64": "I64", "float32": "F32", "int32": "I32", "float16": "F16", "bfloat16": "BF16",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
_LENGTH = struct.Struct("<Q")
# Descriptors that lock the directory which this process loaded last, by its parent directory.
_locked: dict[Path, int] = {}
log = logging.getLogger(__name__)


def pull_weights(model: Any, named_tensors: Sequence[tuple[str, Any]]) -> None:
    """Brings the checkpoint up to date; called by SGLang in each of its processes. Does not change `model`.

    named_tensors: each name is a JSON object with the arguments of `pull`. Errors are only logged, because an exception
    would end the engine; loading the directory, which is then missing, fails instead.
    """
    for order, _ in named_tensors:
        try:
            pull(**json.loads(order))
        except Exception as error:
            log.exception("%s: %s", FIELD, error)


def pull(source: str, directory: str, version: int, lineage: str) -> Path:
    """Returns the directory of `version` below `directory`, into which one process of this host writes it.

    source: a whole Hugging Face directory, or a directory of deltas. Raises MissingFile if `source` is neither,
    WrongState if the base of a delta is not on this host, DataLoss if weights differ from the trainer's after it, and
    the errors of `whole_directory`.
    """
    root = Path(directory)
    target = root / checkpoint_name(version, lineage)
    with _alone(root):
        if not _holds(target, lineage):
            delta_index = read_index(Path(source))
            if delta_index is None:
                _unlock(root)
                _remove_unused(root, lineage)
                _copy(Path(source), target, lineage)
            else:
                _update(root, target, *delta_index)
        _lock(root, target)
        _remove_unused(root, lineage, but=target)
    return target


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    with path_errors(root, FIELD):
        root.mkdir(parents=True, exist_ok=True)
        handle = os.open(root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _lineage(path: Path) -> str | None:
    mark = read_mark(path)
    return None if mark is None or "lineage" not in mark else str(mark["lineage"])


def _holds(path: Path, lineage: str) -> bool:
    mark = read_mark(path)
    return mark is not None and mark.get("lineage") == lineage and mark.get("boot") == _boot()


@functools.cache
def _boot() -> str:
    # SGLang runs on Linux alone, so nothing else needs a boot's name.
    return BOOT.read_text().strip() if BOOT.exists() else ""


def _lock(root: Path, target: Path) -> None:
    handle = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(handle, fcntl.LOCK_SH)
    _unlock(root)
    _locked[root] = handle


def _unlock(root: Path) -> None:
    if root in _locked:
        os.close(_locked.pop(root))


def _remove_unused(root: Path, lineage: str, but: Path | None = None) -> None:
    """Removes the versions of this trainer process, and those of others that no engine has loaded."""
    clear_leftovers(root)
    for old in [*root.glob("weight_v*"), *root.glob(".weight_v*.updating")]:
        old_lineage = _lineage(old) if old.is_dir() and old != but else None
        if old_lineage is not None and (process_of(old_lineage) == process_of(lineage) or _is_unlocked(old)):
            reason = remove_written(old, field=FIELD)
            if reason is not None:
                # Its mark is removed, so it is not considered again.
                log.warning("%s: %s %s: only the weights were removed", FIELD, old, reason)


def _is_unlocked(path: Path) -> bool:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(handle)


def _copy(source: Path, target: Path, lineage: str) -> None:
    mark = read_mark(source)
    if mark is None:
        # The trainer no longer waits for this update and has removed the directory.
        raise MissingFile(f"{source} is not a whole directory that slime wrote", field="source", value=str(source))
    with whole_directory(target, WRITER, field=FIELD, lineage=lineage, boot=_boot()) as partial:
        for name in mark["files"]:
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, partial / name)


def _update(root: Path, target: Path, about: VersionDelta, files: Sequence[Path]) -> None:
    base = root / checkpoint_name(about.base_version, about.lineage)
    if not _holds(base, about.lineage):
        raise WrongState(
            f"{FIELD}: {base} is missing, of another run or of an earlier boot, but weight version {about.version} "
            "is a delta to it", field=FIELD, value=str(base), expected="a whole update first",
        )  # fmt: skip
    updating = base.with_name(f".{base.name}.updating")
    with path_errors(root, FIELD):
        base.rename(updating)
        tensors = dict(_tensors(updating))
        for file in files:
            for delta in read_bucket(file.read_bytes())[1]:
                held = tensors.pop(delta.name, None)
                if held is None or held[0] != SAFETENSORS_TYPES.get(delta.dtype) or held[1] != delta.shape:
                    raise DataLoss(
                        f"{FIELD}: {base} has no tensor {delta.name} of {delta.dtype} {list(delta.shape)}",
                        field=delta.name, value=None if held is None else held[:2],
                    )  # fmt: skip
                new = apply_tensor(about, delta, held[2])
                if new is not held[2]:
                    held[2][:] = new
        if tensors:
            raise DataLoss(f"the delta of weight version {about.version} lacks {min(tensors)}", field=min(tensors))
        updating.rename(target)


def _tensors(directory: Path) -> Iterator[tuple[str, tuple[str, tuple[int, ...], Any]]]:
    """Yields (name, (dtype, shape, bytes)) of each tensor; writing to the bytes, uint8 [n], writes to the file."""
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
            if length > file.stat().st_size:
                raise InvalidFile(f"{file}: no safetensors", field=FIELD, value=str(file))
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        content = np.memmap(file, np.uint8, "r+", offset=_LENGTH.size + length) if header else np.empty(0, np.uint8)
        for name, about in header.items():
            first, last = about["data_offsets"]
            yield name, (about["dtype"], tuple(about["shape"]), content[first:last])
