"""Reads tensors of a torch_dist checkpoint by key, whole or any rectangle, without loading the rest."""

from __future__ import annotations

import argparse
import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.converters.families.mapping import Parameter
from slime.converters.files import rectangles
from slime.converters.files.rectangles import Index, Shape, Stored
from slime.converters.torch_dist.blob import find_tensor, read_saved
from slime.converters.torch_dist.description import DESCRIPTION, FORMAT
from slime.converters.torch_dist.directory import COMMON, HF_DIR, METADATA, TRACKER, iteration_directory
from slime.converters.torch_dist.keys import Layout, Place, singletons
from slime.converters.torch_dist.unpickle import load_file
from slime.types.errors import InvalidFile, MissingFile, NotFound

__all__ = ["HF_DIR", "METADATA", "TRACKER", "Chunk", "Parameters", "TensorEntry", "TorchDist"]

MAX_OPEN_FILES = 64


@dataclass(frozen=True)
class Chunk:
    """A rectangle of `shape` that begins at `start` of a tensor, saved in bytes [offset, offset + length) of `file`."""

    start: Shape
    shape: Shape
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint. dtype: the one in the checkpoint's metadata."""

    key: str
    dtype: torch.dtype
    shape: Shape
    chunks: tuple[Chunk, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TorchDist:
    """A torch_dist checkpoint.

    directory: holds the tensor files; tensors: entries by key; objects: keys of entries that are not tensors.
    description: the `slime.json` that slime-convert or the trainer wrote beside them; {} if another program saved.
    Raises MissingFile or InvalidFile naming key and file; missing and truncated files are found at once.
    """

    def __init__(self, path: str | Path) -> None:
        self.directory = iteration_directory(Path(path))
        metadata = load_file(self.directory / METADATA)
        self.tensors: dict[str, TensorEntry] = {}
        self.objects: list[str] = []
        self._open: OrderedDict[str, int] = OrderedDict()
        self._stored: dict[Chunk, Stored] = {}
        self._layers: dict[str, dict[int | None, list[Chunk]]] = {}
        try:
            self._read_metadata(metadata)
        except InvalidFile:
            raise
        except (AttributeError, TypeError, KeyError, ValueError) as error:
            raise self._invalid(METADATA, f"cannot be read as the metadata of a checkpoint: {error}") from None
        self._check_files()
        self.description = self._read_description()

    def _read_metadata(self, metadata: Any) -> None:
        # Entries of objects that are not tensors have no offset.
        where = {
            (index.fqn, tuple(getattr(index, "offset", None) or ())): stored
            for index, stored in metadata.storage_data.items()
        }
        for key, entry in metadata.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                self.objects.append(key)
                continue
            chunks = []
            for chunk in entry.chunks:
                start = tuple(chunk.offsets)
                stored = where.get((key, start))
                if stored is None:
                    raise self._invalid(METADATA, f"{key}: no file holds its part at {list(start)}")
                if getattr(stored, "transform_descriptors", None):
                    raise self._invalid(METADATA, f"{key}: is compressed, which is not what Megatron writes")
                if Path(stored.relative_path).name != stored.relative_path:
                    raise self._invalid(METADATA, f"{key}: in a file outside the directory: {stored.relative_path}")
                chunks.append(Chunk(start, tuple(chunk.sizes), stored.relative_path, stored.offset, stored.length))
            self.tensors[key] = TensorEntry(key, entry.properties.state[0], tuple(entry.size), tuple(chunks))

    def _check_files(self) -> None:
        ends: dict[str, tuple[int, str]] = {}
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                ends[chunk.file] = max(ends.get(chunk.file, (0, key)), (chunk.offset + chunk.length, key))
        for name, (end, key) in ends.items():
            file = self.directory / name
            if not file.is_file():
                raise MissingFile(f"{file}: no such file, {key} is in it", field="path", value=str(file))
            if file.stat().st_size < end:
                raise self._invalid(name, f"{key}: cut short: {file.stat().st_size} bytes, expected {end} or more")

    def _read_description(self) -> dict[str, Any]:
        file = self.directory / DESCRIPTION
        if not file.is_file():
            return {}
        try:
            data = json.loads(file.read_text())
        except ValueError:
            raise self._invalid(DESCRIPTION, "not JSON") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise self._invalid(
                DESCRIPTION, f"format {data.get('format') if isinstance(data, dict) else data!r}, expected {FORMAT}"
            )
        return data

    def _invalid(self, file: str, what: str) -> InvalidFile:
        path = self.directory / file
        return InvalidFile(f"{path}: {what}", field="path", value=str(path), expected="a whole torch_dist checkpoint")

    def common(self) -> dict[str, Any]:
        """Returns the values that are the same on every rank: `iteration`, `args` (an argparse.Namespace) and more.

        Objects of Megatron's classes are StandIns. {} without `common.pt`.
        """
        file = self.directory / COMMON
        if not file.is_file():
            return {}
        data = read_saved(file)
        if not isinstance(data, dict):
            raise self._invalid(COMMON, "not a dict")
        return data

    def args(self) -> dict[str, Any]:
        """Returns the Megatron arguments that the checkpoint was made with; {} if it holds none."""
        if isinstance(self.description.get("args"), dict):
            return dict(self.description["args"])
        args = self.common().get("args")
        return dict(vars(args)) if isinstance(args, argparse.Namespace) else {}

    @property
    def hf_dir(self) -> Path | None:
        """The directory inside the checkpoint with the Hugging Face config and tokenizer."""
        directory = self.directory / HF_DIR
        return directory if (directory / "config.json").is_file() else None

    def load(self, key: str, index: Index | None = None) -> torch.Tensor:
        """Reads a rectangle of a tensor into new memory; the whole tensor without an index. Raises as `read`."""
        entry = self._entry(key)
        index = rectangles.whole(entry.shape) if index is None else index
        out = torch.empty([part.stop - part.start for part in index], dtype=entry.dtype)
        self.read(key, index, out)
        return out

    def read(self, key: str, index: Index, out: torch.Tensor) -> None:
        """Reads a rectangle into `out`, as `out[:] = tensor[index]` in the dtype of `out`.

        index: a slice with start and stop for every dimension. Raises NotFound, and InvalidFile where parts are missing
        or damaged.
        """
        entry = self._entry(key)
        num_read = 0
        for chunk in self._near(entry, index):
            common = _common(index, chunk)
            if common is None:
                continue
            source, target = common
            view = out[target]
            num_read += view.numel()
            fd = self._fd(chunk.file)
            stored = self._stored.get(chunk)
            if stored is None:
                stored = find_tensor(fd, self.directory / chunk.file, chunk.offset, chunk.length, key)
                if stored.shape != chunk.shape:
                    raise self._invalid(chunk.file, f"{key}: shape {list(stored.shape)}, expected {list(chunk.shape)}")
                self._stored[chunk] = stored
            rectangles.read(fd, stored, source, view)
        if num_read != out.numel():
            raise self._invalid(METADATA, f"{key}: {out.numel() - num_read:,} of {out.numel():,} elements are missing")

    def _near(self, entry: TensorEntry, index: Index) -> Sequence[Chunk]:
        """Returns the chunks that may have a part of a rectangle: of layers that are stacked, those of its layer.

        A model of experts has 12,000 chunks under a key, and is read in ten times as many pieces.
        """
        if not index or index[0].stop - index[0].start != 1:
            return entry.chunks
        if entry.key not in self._layers:
            layers = self._layers[entry.key] = {}
            for chunk in entry.chunks:
                layers.setdefault(chunk.start[0] if chunk.shape[0] == 1 else None, []).append(chunk)
        layers = self._layers[entry.key]
        return [*layers.get(None, ()), *layers.get(index[0].start, ())]

    def _entry(self, key: str) -> TensorEntry:
        if key not in self.tensors:
            raise NotFound(f"{self.directory}: no tensor {key}", field="key", value=key)
        return self.tensors[key]

    def _fd(self, name: str) -> int:
        fd = self._open.pop(name, None)
        if fd is None:
            fd = rectangles.open_file(self.directory / name)
            if len(self._open) >= MAX_OPEN_FILES:
                os.close(self._open.popitem(last=False)[1])
        self._open[name] = fd
        return fd

    def close(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])

    def __del__(self) -> None:
        # `_open` does not exist if __init__ failed.
        with suppress(AttributeError):
            self.close()


def _common(index: Index, chunk: Chunk) -> tuple[Index, Index] | None:
    """Returns the common part of a chunk and a rectangle, as (index in the chunk, index in the rectangle)."""
    source, target = [], []
    for part, start, size in zip(index, chunk.start, chunk.shape, strict=True):
        first, last = max(part.start, start), min(part.stop, start + size)
        if first >= last:
            return None
        source.append(slice(first - start, last - start))
        target.append(slice(first - part.start, last - part.start))
    return tuple(source), tuple(target)


class Parameters:
    """Finds and reads Megatron's parameters in a checkpoint, whichever keys its writer chose.

    args: Megatron arguments of the model.
    """

    def __init__(self, checkpoint: TorchDist, args: Mapping[str, Any]) -> None:
        self.checkpoint = checkpoint
        self._layout = Layout.of(args)

    def find(self, parameter: Parameter) -> tuple[TensorEntry, ...]:
        """Returns the tensors that hold the parameter: one, or two stacked ones. Raises NotFound."""
        return tuple(self.checkpoint.tensors[key] for key, _ in self._find(parameter))

    def keys(self, parameter: Parameter) -> set[str]:
        """Returns every key of the parameter in the checkpoint: some norms are saved under two names."""
        others = {place.key for place in self._layout.candidates(parameter.name)}
        return {key for key, _ in self._find(parameter)} | (others & self.checkpoint.tensors.keys())

    def _find(self, parameter: Parameter) -> list[tuple[str, Shape]]:
        """Returns [(key, leading indices)] of the tensors that hold the parameter."""
        tensors = self.checkpoint.tensors
        for place in self._layout.candidates(parameter.name):
            entry = tensors.get(place.key)
            if entry is not None and len(entry.shape) == len(place.lead) + len(parameter.shape):
                self._check_lead(parameter, entry, place)
                return [(place.key, place.lead)]
        keys = singletons(parameter.name)
        if all(key in tensors for key in keys):
            return [(key, ()) for key in keys]
        raise NotFound(
            f"{self.checkpoint.directory}: no tensor {self._layout.place(parameter.name).key} for {parameter.name}",
            field="key",
            value=parameter.name,
        )

    def _check_lead(self, parameter: Parameter, entry: TensorEntry, place: Place) -> None:
        if entry.shape[: len(place.lead)] != place.lead_shape:
            expected = (*place.lead_shape, *parameter.shape)
            raise InvalidFile(
                f"{self.checkpoint.directory}: {entry.key} has shape {list(entry.shape)}, expected {list(expected)}: "
                "the model has another number of layers or experts",
                field=entry.key,
                value=list(entry.shape),
                expected=str(list(expected)),
            )

    def check(self, parameter: Parameter) -> None:
        """Raises NotFound if the checkpoint lacks the parameter, InvalidFile if its shape differs."""
        places = self._find(parameter)
        for key, lead in places:
            shape = self.checkpoint.tensors[key].shape
            expected = (parameter.shape[0] // len(places), *parameter.shape[1:])
            stored = shape[len(lead) :]
            if stored != expected and not (
                parameter.padded and stored[1:] == expected[1:] and stored[0] >= expected[0]
            ):
                wanted = (
                    f"at least {expected[0]} rows" if parameter.padded else f"{list((*shape[: len(lead)], *expected))}"
                )
                raise InvalidFile(
                    f"{self.checkpoint.directory}: {key} has shape {list(shape)}, "
                    f"expected {wanted} for {parameter.name}",
                    field=key,
                    value=list(shape),
                    expected=wanted,
                )

    def read_rows(self, parameter: Parameter, rows: slice, out: torch.Tensor) -> None:
        """Reads rows into `out`, as `out[:] = parameter[rows]`. Raises NotFound, and InvalidFile where data is
        damaged."""
        places = self._find(parameter)
        height = parameter.shape[0] // len(places)
        for number, (key, lead) in enumerate(places):
            first, last = max(rows.start, number * height), min(rows.stop, (number + 1) * height)
            if first < last:
                view = out[first - rows.start : last - rows.start]
                index = (
                    *(slice(at, at + 1) for at in lead),
                    slice(first - number * height, last - number * height),
                    *(slice(0, size) for size in parameter.shape[1:]),
                )
                self.checkpoint.read(key, index, view.view([1] * len(lead) + list(view.shape)))
