"""Keeps tensors of a Hugging Face directory that belong to no Megatron parameter, and writes them on the way back.

Copies of the embedding or the output layer (a tied `lm_head.weight`, those in DeepSeek's MTP layers) are known by name
and written again from the trained tensor. Small tensors (`rotary_emb.inv_freq`) are kept unchanged in the checkpoint's
`hf/others`. Untrained layers for multi-token prediction come from the directory of the original model.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import torch

from slime.converters.convert.hf_source import HfSource
from slime.converters.families import read_config
from slime.converters.families.base import Config
from slime.converters.families.config_json import tied
from slime.converters.families.mapping import Parameter
from slime.converters.files.hf_writer import HfFiles, HfTensor
from slime.converters.files.rectangles import Stored, open_file, pieces, read
from slime.converters.files.safetensors_dir import write
from slime.converters.torch_dist.reader import TorchDist
from slime.types.errors import InvalidFile, counted

# Directory inside a checkpoint's `hf`.
OTHERS = "others"
SMALL_BYTES = 1 << 20
SHOWN = 10


def find(source: HfSource, parameters: Iterable[Parameter]) -> tuple[dict[str, str], list[str], list[str]]:
    """Returns (name of each copy -> name of its original, small tensors, lost tensors that are neither)."""
    wanted, vocabulary = set(), []
    for parameter in parameters:
        names = [block.name for block in parameter.blocks]
        wanted.update(names)
        if parameter.padded:
            vocabulary += names
    copies: dict[str, str] = {}
    small: list[str] = []
    lost: list[str] = []
    for name, tensor in source.tensors.items():
        if name in wanted:
            continue
        originals = (other for other in vocabulary if other in source.tensors and _equal(source, name, other))
        original = next(originals, None)
        if original is not None:
            copies[name] = original
        else:
            (small if tensor.num_bytes <= SMALL_BYTES else lost).append(name)
    return copies, small, lost


def keep(source: HfSource, parameters: Iterable[Parameter], hf_dir: Path) -> tuple[dict[str, str], list[str]]:
    """Writes the small tensors below `hf_dir`; returns copies and lost, as `find` does."""
    copies, small, lost = find(source, parameters)
    if small:
        (hf_dir / OTHERS).mkdir()
        write(hf_dir / OTHERS, ((name, source.load(name)) for name in small))
    return copies, lost


def kept(checkpoint: TorchDist) -> HfSource | None:
    """Opens the small tensors that a checkpoint keeps; None if it has none."""
    if checkpoint.hf_dir is None or not (checkpoint.hf_dir / OTHERS).is_dir():
        return None
    return HfSource(checkpoint.hf_dir / OTHERS, {})


def check_tied(source: HfSource, config: Config) -> None:
    """Raises InvalidFile if config.json ties the output layer to the embedding but the weights differ."""
    first, second = "model.embed_tokens.weight", "lm_head.weight"
    if not tied(config) or not {first, second} <= source.tensors.keys() or _equal(source, first, second):
        return
    raise InvalidFile(
        f"{source.path}: {second} differs from {first}; config.json says tie_word_embeddings = true, "
        "which makes them one",
        field=second,
        expected=f"{first}, or tie_word_embeddings = false",
    )


def _equal(source: HfSource, first: str, second: str) -> bool:
    """Compares two tensors bit by bit, some rows at a time."""
    shape, dtype = source.tensors[first].shape, source.dtype(first)
    if (shape, dtype) != (source.tensors[second].shape, source.dtype(second)):
        return False
    for index in pieces(shape, dtype):
        a, b = (torch.empty([part.stop - part.start for part in index], dtype=dtype) for _ in range(2))
        source.read(first, index, a)
        source.read(second, index, b)
        if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
            return False
    return True


class Leftovers:
    """Tensors of the source that are not parameters, to be written along with them.

    parameters: of the model; written: names of the tensors made from the checkpoint's parameters.
    origin: the directory of the original model; its weights, if any, supply what the checkpoint lacks.
    notes: lines to show to the user.
    """

    def __init__(
        self, checkpoint: TorchDist, parameters: Iterable[Parameter], written: dict[str, HfTensor], origin: Path
    ) -> None:
        parameters = list(parameters)
        untrained = {block.name for parameter in parameters for block in parameter.blocks} - written.keys()
        description = checkpoint.description
        copies, lost = description.get("copies", {}), description.get("lost", [])
        self._taken: list[tuple[HfSource, list[str]]] = []
        self.notes: list[str] = []
        source = HfSource(origin, read_config(origin)) if any(origin.glob("*.safetensors")) else None
        others = kept(checkpoint)
        if others is not None:
            self._taken.append((others, list(others.tensors)))
        elif source is not None and "copies" not in description:
            copies, small, lost = find(source, parameters)
            self._taken.append((source, small))
        if source is not None and untrained:
            found = sorted(untrained & source.tensors.keys())
            self._taken.append((source, found))
            if found:
                count = counted(len(found), "tensor")
                self.notes.append(f"taken from {origin}, as the checkpoint does not have them: {count}")
            untrained -= set(found)
        if untrained:
            self.notes.append(
                f"left out, neither in the checkpoint nor in {origin}: {', '.join(sorted(untrained)[:SHOWN])}"
            )
        if lost:
            self.notes.append(f"left out, because the checkpoint has no place for them: {', '.join(lost[:SHOWN])}")
        self._copies = {name: written[original] for name, original in copies.items() if original in written}

    def tensors(self) -> list[HfTensor]:
        found = [HfTensor(name, original.dtype, original.shape) for name, original in self._copies.items()]
        return found + [
            HfTensor(name, source.dtype(name), source.tensors[name].shape)
            for source, names in self._taken
            for name in names
        ]

    def write(self, where: dict[str, Stored]) -> None:
        """Writes these tensors. Called after all other tensors are written, which copies are read from."""
        with HfFiles(where) as files:
            for name, original in self._copies.items():
                self._copy(files, name, where[original.name])
            for source, names in self._taken:
                for name in names:
                    for index in pieces(source.tensors[name].shape, source.dtype(name)):
                        part = torch.empty([p.stop - p.start for p in index], dtype=source.dtype(name))
                        source.read(name, index, part)
                        files.write(name, index, part)

    @staticmethod
    def _copy(files: HfFiles, name: str, original: Stored) -> None:
        descriptor = open_file(original.file)
        try:
            for index in pieces(original.shape, original.dtype):
                part = torch.empty([p.stop - p.start for p in index], dtype=original.dtype)
                read(descriptor, original, index, part)
                files.write(name, index, part)
        finally:
            os.close(descriptor)
