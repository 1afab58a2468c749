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
    "preprocessor_config.json",
)  # fmt: skip


@contextlib.contextmanager
def whole_directory(path: Path, need_bytes: int) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its place when the block ends well, and vanishes when it does not.

    Raises OutOfSpace where `need_bytes` do not fit, or where the disk fills up inside the block.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(path.parent).free
    if free < need_bytes:
        raise OutOfSpace(
            f"{path}: {need_bytes} bytes are needed, {free} are free",
            field="path",
            value=str(path),
            expected=f"{need_bytes} bytes",
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.partial-", dir=path.parent))
    try:
        with disk_errors(path):
            yield partial
            for file in partial.rglob("*"):
                _sync(file)
            partial.chmod(0o755)
            _replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
