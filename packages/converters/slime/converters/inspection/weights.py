"""Weights by name, whatever form they have on disk: a Hugging Face directory, a file, a torch_dist checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from slime.converters.files.safetensors_dir import SafetensorsDir, TensorInfo
from slime.converters.torch_dist.directory import is_torch_dist

if TYPE_CHECKING:
    import torch

    from slime.converters.families.mapping import Slice
    from slime.converters.files.rectangles import Index


class Weights(Protocol):
    """Weights on disk. path: the directory or file; tensors: their headers by name."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        """Returns a tensor in runs of rows, as `rectangles.pieces` divides its shape."""


def open_weights(path: str | Path) -> Weights:
    """Opens weights; those of a torch_dist checkpoint are its tensors by key. Raises MissingFile, InvalidFile."""
    return TorchDistKeys(path) if is_torch_dist(path) else HfTensors(path)


def open_two(first: str | Path, second: str | Path) -> tuple[Weights, Weights]:
    """Opens two sets of weights; if only one is torch_dist, both as Hugging Face tensors. Raises as `open_weights`."""
    if is_torch_dist(first) == is_torch_dist(second):
        return open_weights(first), open_weights(second)
    if is_torch_dist(first):
        return HfView(first, second), HfTensors(second)
    return HfTensors(first), HfView(second, first)


class HfTensors:
    def __init__(self, path: str | Path) -> None:
        self._weights = SafetensorsDir(path)
        self.path, self.tensors = self._weights.path, self._weights.tensors

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        from slime.converters.files.rectangles import pieces

        tensor = self._weights.load(name)
        for index in pieces(tuple(tensor.shape), tensor.dtype):
            yield tensor[index]


class TorchDistKeys:
    def __init__(self, path: str | Path) -> None:
        from slime.converters.files.dtypes import NAMES
        from slime.converters.torch_dist.reader import TorchDist

        self._checkpoint = TorchDist(path)
        self.path = self._checkpoint.directory
        self.tensors = {
            key: TensorInfo(
                key,
                NAMES.get(entry.dtype, str(entry.dtype)),
                entry.shape,
                entry.num_bytes,
                self.path / (entry.chunks[0].file if entry.chunks else ""),
                0,
            )
            for key, entry in self._checkpoint.tensors.items()
        }

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        from slime.converters.files.rectangles import pieces

        entry = self._checkpoint.tensors[name]
        for index in pieces(entry.shape, entry.dtype):
            yield self._checkpoint.load(name, index)


class HfView:
    """A torch_dist checkpoint as the Hugging Face tensors that it would be converted to.

    other: the directory that it is compared with, whose config counts where the checkpoint has none.
    """

    def __init__(self, path: str | Path, other: str | Path) -> None:
        from slime.converters.convert.leftovers import kept
        from slime.converters.convert.torch_dist_to_hf import hf_tensors, read_export
        from slime.converters.files.dtypes import NAMES
        from slime.converters.torch_dist.reader import Parameters, TorchDist

        checkpoint = TorchDist(path)
        export = read_export(checkpoint, checkpoint.hf_dir or Path(other))
        self.path = checkpoint.directory
        self._found = Parameters(checkpoint, export.family.arguments(export.config))
        self._parts: dict[str, list[tuple[int, Slice]]] = {}
        self._parameters = export.parameters
        for number, parameter in enumerate(self._parameters):
            for piece in parameter.slices():
                self._parts.setdefault(piece.hf_name, []).append((number, piece))
        self._stored = hf_tensors(export, checkpoint)
        copies = checkpoint.description.get("copies", {})
        self._originals = {name: name for name in self._stored} | {
            name: original for name, original in copies.items() if original in self._stored
        }
        self.tensors = {}
        for name, original in self._originals.items():
            tensor = self._stored[original]
            self.tensors[name] = TensorInfo(name, NAMES[tensor.dtype], tensor.shape, tensor.num_bytes, self.path, 0)
        self._others = kept(checkpoint)
        if self._others is not None:
            self.tensors |= self._others.tensors

    def parts(self, name: str) -> Iterator[torch.Tensor]:
        import torch

        from slime.converters.files.rectangles import pieces

        if name not in self._originals and self._others is not None:
            other = self._others.load(name)
            for index in pieces(tuple(other.shape), other.dtype):
                yield other[index]
            return
        tensor = self._stored[self._originals[name]]
        for index in pieces(tensor.shape, tensor.dtype):
            out = torch.empty([part.stop - part.start for part in index], dtype=tensor.dtype)
            for number, piece in self._parts[tensor.name]:
                self._fill(number, piece, index, out)
            yield out

    def _fill(self, number: int, piece: Slice, index: Index, out: torch.Tensor) -> None:
        import torch

        first = max(piece.hf_index[0].start, index[0].start)
        last = min(piece.hf_index[0].stop, index[0].stop)
        if first >= last:
            return
        parameter = self._parameters[number]
        if len(piece.hf_index) > len(piece.index):
            # One expert of a tensor that holds all of them.
            part = torch.empty(*parameter.shape, dtype=self._found.find(parameter)[0].dtype)
            self._found.read_rows(parameter, slice(0, parameter.shape[0]), part)
            out[(slice(first - index[0].start, last - index[0].start), *piece.hf_index[1:])] = part[piece.index]
            return
        shift = piece.index[0].start - piece.hf_index[0].start
        rows = torch.empty(last - first, *parameter.shape[1:], dtype=self._found.find(parameter)[0].dtype)
        self._found.read_rows(parameter, slice(first + shift, last + shift), rows)
        target = (slice(first - index[0].start, last - index[0].start), *piece.hf_index[1:])
        out[target] = rows[(slice(None), *piece.index[1:])]
