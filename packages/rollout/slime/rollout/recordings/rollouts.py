"""Recordings: the samples of one iteration, or of one evaluation, as a file without pickle.

    slime rollout 1\\n                       8 bytes of length, little-endian, before each of these:
    {"rollout_id": 3, "groups": 2}          JSON
    slime.v1.SampleGroup                    one for each group; in an evaluation `dataset` names its set

Also reads recordings that `torch.save` wrote (`torch_files.py`).

`python -m slime.rollout.recordings FILE` prints one as JSON, one sample per line.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from google.protobuf.message import DecodeError

from slime.rollout.recordings.paths import MAGIC, path_of
from slime.types import Sample, SampleGroup
from slime.types.codec import group_from_proto, group_to_proto
from slime.types.directories import path_errors
from slime.types.errors import InvalidFile, counted
from slime.types.files import check_readable, whole_file
from slime.v1 import sample_pb2

LENGTH = struct.Struct("<Q")
# Beginnings of files of `torch.save`: a ZIP archive, or in older versions a pickle.
TORCH = (b"PK", b"\x80")


@dataclass(frozen=True)
class RecordedRollout:
    rollout_id: int | None
    groups: list[SampleGroup]


def write_rollout(path: Path, rollout_id: int, groups: Sequence[SampleGroup]) -> None:
    """Writes the file, or replaces it as a whole; makes its directory.

    Raises InvalidField for a sample that cannot be encoded, InvalidSetting for an unusable path, OutOfSpace.
    """
    header = json.dumps({"rollout_id": rollout_id, "groups": len(groups)}).encode()
    with path_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, "wb") as file:
        file.write(MAGIC)
        _write_part(file, header)
        for group in groups:
            _write_part(file, group_to_proto(group).SerializeToString())


def _write_part(file: IO[bytes], content: bytes) -> None:
    file.write(LENGTH.pack(len(content)))
    file.write(content)


def record_rollout(template: str | None, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> None:
    """Writes the groups of an iteration, padding (group_index -1) left out. Does nothing without a template."""
    if template is None:
        return
    kept = [group for group in groups if group and group[0].group_index != -1]
    numbers = [
        position if group[0].group_index is None else group[0].group_index for position, group in enumerate(kept)
    ]
    parts = [SampleGroup(number, samples=list(group)) for number, group in zip(numbers, kept, strict=True)]
    write_rollout(path_of(template, rollout_id), rollout_id, parts)


def record_evaluation(template: str | None, rollout_id: int, data: Mapping[str, Mapping[str, Any]]) -> None:
    """Records an evaluation. data: name of a set -> {"samples": [...], ...}; sets without samples are left out."""
    if template is None:
        return
    parts = [
        SampleGroup(group.group_index, name, group.samples)
        for name, result in data.items()
        for group in group_samples(list(result.get("samples") or ()), 1)
    ]
    write_rollout(path_of(template, rollout_id, evaluation=True), rollout_id, parts)


def check_beginning(path: Path, flag: str) -> None:
    """Raises MissingFile, or InvalidFile for a file that does not begin like a recording of either kind."""
    check_readable(path, flag)
    with path.open("rb") as file:
        if not file.read(len(MAGIC)).startswith((MAGIC, *TORCH)):
            raise InvalidFile.must_be(f"{flag} {path}", "a recorded rollout", got="a file of another kind")


def read_rollout(path: Path, *, flag: str = "", group_size: int = 1) -> RecordedRollout:
    """Reads a recording of either kind; its content tells which.

    flag: where the path came from, for errors. group_size: number of consecutive samples that make a group
    where samples have no group_index.
    Raises MissingFile; InvalidFile for a file that is cut off or not a recording.
    """
    check_readable(path, flag or "recording")
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) == MAGIC:
                header = json.loads(_read_part(file))
                groups = [_group(_read_part(file)) for _ in range(header["groups"])]
                if file.read(1):
                    raise ValueError(f"holds more than the {counted(len(groups), 'group')} that its header announces")
                return RecordedRollout(header["rollout_id"], groups)
        from slime.rollout.recordings.torch_files import read_torch

        rollout_id, samples = read_torch(path)
        return RecordedRollout(rollout_id, group_samples(samples, group_size))
    except InvalidFile:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFile(
            f"{flag}: {path}: {error}".removeprefix(": "), field=flag, value=str(path), expected="a recorded rollout"
        ) from error


def _read_part(file: BinaryIO) -> bytes:
    size = file.read(LENGTH.size)
    length = LENGTH.unpack(size)[0] if len(size) == LENGTH.size else -1
    # Checked before reading, because a wrong length could ask for any amount of memory.
    left = os.fstat(file.fileno()).st_size - file.tell()
    if not 0 <= length <= left:
        raise ValueError("the file is cut off")
    return file.read(length)


def _group(content: bytes) -> SampleGroup:
    try:
        return group_from_proto(sample_pb2.SampleGroup.FromString(content))
    except DecodeError as error:
        raise ValueError(f"a group in it cannot be read: {error}") from error


def group_samples(samples: Sequence[Sample], group_size: int) -> list[SampleGroup]:
    """Groups samples by group_index, in the order of first samples; without indexes, every `group_size` in a row."""
    groups: dict[tuple[str, int], list[Sample]] = {}
    for position, sample in enumerate(samples):
        index = sample.group_index
        key = ("position", position // group_size) if index is None else ("index", index)
        groups.setdefault(key, []).append(sample)
    return [SampleGroup(number, samples=members) for number, members in enumerate(groups.values())]


def head_and_tail(groups: Sequence[SampleGroup], fraction: float) -> list[SampleGroup]:
    """Returns about `fraction` of the groups, half from the beginning and half from the end; at least one."""
    count = min(len(groups), max(1, round(len(groups) * fraction)))
    tail = count // 2
    return [*groups[: count - tail], *groups[len(groups) - tail :]]
