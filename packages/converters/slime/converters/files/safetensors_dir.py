"""Weights on disk as Hugging Face keeps them: one safetensors file, or shards with an index.

Reading takes headers first and tensors one by one; writing holds at most one shard in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.types.directories import usual_mode, write_error
from slime.types.errors import InvalidFile, MissingFile, NotFound

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# The number of shards in the name of one.
_SHARD = re.compile(r"-\d+-of-(\d+)\.safetensors$")
SHARD_BYTES = 5 << 30
# The format's own limit on its JSON header.
MAX_HEADER_BYTES = 100_000_000

BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
        "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as its header describes it. dtype: safetensors' (`BF16`); num_bytes: in `file`, at `offset`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path
    offset: int

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Reads the header of a safetensors file; returns its tensors in the order of their data.

    Raises MissingFile, or InvalidFile for something else, a cut file included.
    """
    if not path.is_file():
        raise MissingFile(f"no such file {path}", field="path", value=str(path))
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _invalid(path, "not a safetensors file, or cut within its header")
        try:
            header = json.loads(file.read(length))
        except ValueError:
            raise _invalid(path, "not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise _invalid(path, "not a safetensors file: its header is not an object")
    header.pop("__metadata__", None)
    try:
        tensors = [_tensor_info(path, name, entry, 8 + length) for name, entry in header.items()]
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except InvalidFile:
        raise
    except (KeyError, TypeError, ValueError, IndexError):
        raise _invalid(path, "a header entry without dtype, shape and offsets") from None
    if size < 8 + length + end:
        raise _invalid(path, f"cut short: {size} bytes, its header says {8 + length + end}")
    tensors.sort(key=lambda tensor: header[tensor.name]["data_offsets"][0])
    return {tensor.name: tensor for tensor in tensors}


def _tensor_info(path: Path, name: str, entry: Mapping[str, Any], start: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    tensor = TensorInfo(
        name, entry["dtype"], tuple(int(size) for size in entry["shape"]), end - begin, path, start + begin
    )
    bits = BITS.get(tensor.dtype)
    if bits is not None and tensor.num_elements * bits != tensor.num_bytes * 8:
        raise _invalid(path, f"{name}: {tensor.num_bytes} bytes do not hold {tensor.dtype} {list(tensor.shape)}")
    return tensor


def _invalid(path: Path, what: str) -> InvalidFile:
    return InvalidFile(f"{path}: {what}", field="path", value=str(path), expected="safetensors")


class SafetensorsDir:
    """The tensors of a Hugging Face directory or of one safetensors file, by name.

    tensors: TensorInfo by name, file after file.
    Raises MissingFile or InvalidFile, also where the index and the files do not agree.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = self._find_files()
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, tensor in read_header(file).items():
                if name in self.tensors:
                    raise _invalid(file, f"{name} is also in {self.tensors[name].file.name}")
                self.tensors[name] = tensor
        self._check_index()

    def _find_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        if not self.path.is_dir():
            raise MissingFile(f"no such file or directory {self.path}", field="path", value=str(self.path))
        index = self._weight_map()
        files = sorted({self.path / name for name in index.values()} if index else self.path.glob("*.safetensors"))
        if not index and any(int(match[1]) > 1 for file in files if (match := _SHARD.search(file.name))):
            raise MissingFile(
                f"no such file {self.path / INDEX}, and {files[0].name} is one of several shards",
                field="path",
                value=str(self.path / INDEX),
                expected="the index of its shards",
            )
        if not files:
            raise MissingFile(
                f"{self.path}: no .safetensors files",
                field="path",
                value=str(self.path),
                expected="a Hugging Face directory",
            )
        return files

    def _weight_map(self) -> dict[str, str]:
        index = self.path / INDEX
        if not index.is_file():
            return {}
        try:
            weight_map = dict(json.loads(index.read_text())["weight_map"].items())
        except (ValueError, KeyError, TypeError, AttributeError):
            raise _invalid(index, "not an index: expected JSON with a weight_map") from None
        outside = [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]
        if outside:
            raise _invalid(index, f"names a file outside the directory: {outside[0]}")
        return weight_map

    def _check_index(self) -> None:
        for name, file in (self._weight_map() if self.path.is_dir() else {}).items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.file.name != file:
                raise _invalid(self.path / INDEX, f"{name} is not in {file}")

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def load(self, name: str) -> torch.Tensor:
        """Reads one tensor into new memory. Raises NotFound."""
        from safetensors import safe_open

        if name not in self.tensors:
            raise NotFound(f"{self.path}: no tensor {name}", field="name", value=name)
        with safe_open(self.tensors[name].file, framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor), one at a time, opening each file once."""
        from safetensors import safe_open

        for path in self.files:
            with safe_open(path, framework="pt") as file:
                for name, tensor in self.tensors.items():
                    if tensor.file == path:
                        yield name, file.get_tensor(name)


def write(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], *, shard_bytes: int = SHARD_BYTES
) -> list[Path]:
    """Writes `tensors` as they come into `directory`, which must exist; returns the files.

    One file `model.safetensors` where all fit into `shard_bytes`, else numbered shards and their index, written last.
    A tensor larger than a shard gets one of its own. Raises OutOfSpace.
    """
    waiting: dict[str, torch.Tensor] = {}
    waiting_bytes = total_bytes = 0
    shards: list[tuple[Path, list[str]]] = []

    def flush() -> None:
        nonlocal waiting, waiting_bytes
        path = directory / f".shard-{len(shards):05d}"
        write_file(path, waiting)
        shards.append((path, list(waiting)))
        waiting, waiting_bytes = {}, 0

    for name, tensor in tensors:
        if waiting and waiting_bytes + tensor.nbytes > shard_bytes:
            flush()
        waiting[name] = tensor.contiguous()
        waiting_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    flush()
    if len(shards) == 1:
        return [shards[0][0].rename(directory / SINGLE)]
    weight_map, files = {}, []
    for number, (path, names) in enumerate(shards, 1):
        file = path.rename(directory / f"model-{number:05d}-of-{len(shards):05d}.safetensors")
        files.append(file)
        weight_map.update(dict.fromkeys(names, file.name))
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    with disk_errors(directory):
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return files


def write_file(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Writes one file. Raises OutOfSpace."""
    from safetensors.torch import save_file

    with disk_errors(path):
        save_file(tensors, path, metadata={"format": "pt"})
        # safetensors creates files that only their owner may read.
        path.chmod(usual_mode(path.parent, of_file=True))


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns errors of writing `path` into OutOfSpace (full disk, size limit) or InvalidSetting (no place for files)."""
    from safetensors import SafetensorError

    try:
        yield
    except OSError as error:
        raise write_error(error, path) from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise write_error(OSError(code, os.strerror(code)), path) from None
    except RuntimeError as error:
        # torch.save raises an error of its own, with the file's error as context.
        if not isinstance(error.__context__, OSError):
            raise
        raise write_error(error.__context__, path) from None
