"""Hugging Face directories, written as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from slime.converters.safetensors_dir import disk_errors
from slime.types.errors import OutOfSpace

# What a model directory needs beside its weights; taken over from where the weights came from.
SIDE_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip


class WholeDirectory:
    """A temporary directory, `partial`, beside `path`, that takes its place when it is complete.

    Raises OutOfSpace where `need_bytes` do not fit.
    """

    def __init__(self, path: Path, need_bytes: int) -> None:
        self.path = path.absolute()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.path.parent).free
        if free < need_bytes:
            raise OutOfSpace(
                f"{self.path}: {need_bytes} bytes are needed, {free} are free",
                field="path",
                value=str(self.path),
                expected=f"{need_bytes} bytes",
            )
        self.partial = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.partial-", dir=self.path.parent))

    def complete(self) -> None:
        for file in self.partial.rglob("*"):
            _sync(file)
        self.partial.chmod(0o755)
        _replace(self.partial, self.path)

    def discard(self) -> None:
        """Nothing of it stays, if it was not completed."""
        shutil.rmtree(self.partial, ignore_errors=True)


@contextlib.contextmanager
def whole_directory(path: Path, need_bytes: int) -> Iterator[Path]:
    """The `partial` of a WholeDirectory that is complete when the block ends well, and vanishes when it does not.

    Raises OutOfSpace where `need_bytes` do not fit, or where the disk fills up inside the block.
    """
    directory = WholeDirectory(path, need_bytes)
    try:
        with disk_errors(directory.path):
            yield directory.partial
            directory.complete()
    finally:
        directory.discard()


def _replace(partial: Path, path: Path) -> None:
    if path.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old-", dir=path.parent))
        os.rename(path, old / path.name)
        os.rename(partial, path)
        shutil.rmtree(old)
    else:
        os.rename(partial, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_side_files(source: Path, target: Path, dtype: str) -> None:
    """Config, tokenizer and chat template; the config names the `dtype` that the weights are written in."""
    for name in SIDE_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    config = json.loads((target / "config.json").read_text())
    config.pop("torch_dtype", None)
    config.pop("quantization_config", None)
    config["dtype"] = dtype
    (target / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
