"""Finds the files of a torch_dist checkpoint; needs no torch."""

from __future__ import annotations

from pathlib import Path

from slime.types.errors import InvalidFile, MissingFile

METADATA = ".metadata"
COMMON = "common.pt"
CONFIG = "metadata.json"
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF_DIR = "hf"


def iteration_directory(path: Path) -> Path:
    """Returns the directory of tensors that `path` stands for: itself, or the one that its tracker file names.

    Raises MissingFile or InvalidFile.
    """
    if (path / METADATA).is_file():
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        raise MissingFile(
            f"{path}: no torch_dist checkpoint: it has neither {METADATA} nor {TRACKER}",
            field="path",
            value=str(path),
            expected="a directory that Megatron or slime-convert saved",
        )
    text = tracker.read_text(errors="replace").strip()
    if text != RELEASE and not (text.isascii() and text.isdigit()):
        raise InvalidFile(
            f"{tracker}: got {text!r}, expected a number or {RELEASE}", field="path", value=text, expected="a number"
        )
    inner = path / (text if text == RELEASE else f"iter_{int(text):07d}")
    if not (inner / METADATA).is_file():
        raise MissingFile(
            f"{inner}: no {METADATA}, {tracker.name} names this checkpoint", field="path", value=str(inner)
        )
    return inner


def is_torch_dist(path: str | Path) -> bool:
    """Returns whether `path` is meant to be such a checkpoint, complete or not."""
    return any((Path(path) / name).is_file() for name in (METADATA, TRACKER))
