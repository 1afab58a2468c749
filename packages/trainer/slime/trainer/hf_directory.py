"""Hugging Face directories, written as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from slime.types.errors import OutOfSpace

SHARD_BYTES = 4 * 1024**3
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
        with out_of_space(path):
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


@contextlib.contextmanager
def out_of_space(path: Path) -> Iterator[None]:
    """Turns a full disk, as the operating system or safetensors reports it, into OutOfSpace."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise OutOfSpace(f"{path}: {error.strerror}", field="path", value=str(path)) from error
    except SafetensorError as error:
        if f"os error {errno.ENOSPC}" not in str(error):
            raise
        raise OutOfSpace(f"{path}: {error}", field="path", value=str(path)) from error


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


def write_tensors(directory: Path, stem: str, sizes: Mapping[str, int], tensors: Iterable[tuple[str, Tensor]]) -> int:
    """`stem`.safetensors, or shards of it with an index where they hold more than SHARD_BYTES; returns their bytes.

    sizes: bytes of every tensor, in the order in which `tensors` gives them. One shard at a time is in memory.
    """
    shard_of, count, filled = {}, 1, 0
    for name, size in sizes.items():
        if filled and filled + size > SHARD_BYTES:
            count, filled = count + 1, 0
        shard_of[name] = count
        filled += size
    files = {
        n: f"{stem}.safetensors" if count == 1 else f"{stem}-{n:05d}-of-{count:05d}.safetensors"
        for n in range(1, count + 1)
    }
    shard: dict[str, Tensor] = {}
    current = 1
    for name, tensor in tensors:
        if shard_of[name] != current:
            save_file(shard, directory / files[current], metadata={"format": "pt"})
            shard.clear()
            current = shard_of[name]
        shard[name] = tensor
    save_file(shard, directory / files[current], metadata={"format": "pt"})
    if count > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: files[s] for n, s in shard_of.items()},
        }
        (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return sum(sizes.values())
