"""Converts a Hugging Face directory into a torch_dist checkpoint, one parameter at a time, without a model.

SAVE/latest_checkpointed_iteration.txt      "release", written last
SAVE/release/.metadata, *.distcp, common.pt, metadata.json      what megatron-core and Megatron-LM load
SAVE/release/slime.json, hf/                what the way back needs: dtypes, files, config, tokenizer
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.converters.convert.hf_source import HfSource
from slime.converters.convert.leftovers import SHOWN, check_tied, keep
from slime.converters.convert.workers import TorchrunRanks, convert_in_jobs, reported
from slime.converters.families import find_family, with_vision_in
from slime.converters.families.base import Config, Family
from slime.converters.families.mapping import Parameter
from slime.converters.files.dtypes import NAMES
from slime.converters.files.finished import SPARE_BYTES, WRITER, fingerprint
from slime.converters.files.rectangles import pieces
from slime.converters.files.scratch import Scratch
from slime.converters.files.side_files import config_changes, copy_side_files
from slime.converters.megatron.args import (
    check_model_args,
    errors_name_family,
    model_args,
    padded_vocab_size,
    read_model_config,
)
from slime.converters.megatron.rank_layout import check_model_split, check_parameters
from slime.converters.torch_dist.description import describe
from slime.converters.torch_dist.directory import COMMON, CONFIG, HF_DIR, RELEASE, TRACKER
from slime.converters.torch_dist.keys import Layout
from slime.converters.torch_dist.reader import TorchDist
from slime.converters.torch_dist.writer import ChunkFile, WrittenChunk, write_common, write_metadata
from slime.types.directories import check_replaceable, whole_directory
from slime.types.errors import InvalidSetting, MissingFile, SlimeError, counted, errors_name
from slime.types.files import no_directory, write_whole

# A chunk is small because loading a part of one reads all of it.
CHUNK_BYTES = 128 << 20

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model to convert, known from its config and headers alone."""

    path: str
    config: Config
    args: dict[str, Any]
    dtype: torch.dtype | None
    name: str | None

    @property
    def family(self) -> Family:
        return find_family(self.config)

    def parameters(self) -> list[Parameter]:
        """Returns the parameters, those with a padded vocabulary in their padded shape."""
        rows = padded_vocab_size(self.args)
        return [
            dataclasses.replace(parameter, shape=(rows, *parameter.shape[1:])) if parameter.padded else parameter
            for parameter in self.family.parameters(self.config)
        ]


@dataclasses.dataclass(frozen=True)
class ImportJob:
    """A worker's share of a conversion to torch_dist: the numbers of its parameters with their dtypes.

    number: of its file.
    """

    model: Model
    directory: str
    number: int
    parameters: tuple[int, ...]
    dtypes: dict[int, torch.dtype]


def convert(
    hf_checkpoint: str | Path,
    save: str | Path,
    *,
    megatron_args: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    dtype: str | None = None,
    num_workers: int = 1,
    overwrite: bool = False,
    progress: Progress = lambda text: None,
) -> Path:
    """Writes `save` from `hf_checkpoint`; returns the directory of the tensors.

    megatron_args: model and parallel sizes that are set, by name; compared with the config before a tensor is read.
    model_name: the family, where that of config.json is not known.
    dtype: of floating-point weights, the source's by default; fp8 and int4 become bfloat16.
    A `save` that was made of the same files with the same arguments is kept; `overwrite` replaces another conversion.
    Under torchrun every rank calls this and converts its share. Raises MissingFile, InvalidFile (tensors that are
    missing, unexpected or of another shape), InvalidSetting (contradictory flags, a `save` that holds something else),
    OutOfSpace.
    """
    save = Path(save).absolute()
    target = save / RELEASE
    with TorchrunRanks() as ranks:
        model = read_model(hf_checkpoint, megatron_args or {}, dtype, model_name)
        with errors_name_family(hf_checkpoint, model_name), errors_name("--hf-checkpoint"):
            source = HfSource(model.path, model.config)
            source.check(model.parameters(), model.family.ignored(model.config))
        mark = fingerprint(
            [*source.weights.files, Path(model.path) / "config.json"], {"args": model.args, "dtype": dtype}
        )
        if ranks.on_first(lambda: _is_done(save, mark, overwrite)):
            progress(f"{target} is complete: kept")
            return target
        ranks.on_first(lambda: check_tied(source, model.config))
        _write(ranks, model, source, target, mark, num_workers, progress)
    return target


def read_model(
    hf_checkpoint: str | Path, megatron_args: Mapping[str, Any], dtype: str | None, model_name: str | None = None
) -> Model:
    """Reads the model's config and compares the flags with it.

    Raises MissingFile, InvalidFile, or InvalidSetting naming each contradiction between flags and config, or a parallel
    size that does not divide the model.
    """
    path = Path(hf_checkpoint)
    if not path.is_dir():
        raise no_directory(path, "--hf-checkpoint")
    with errors_name("--hf-checkpoint"):
        read_model_config(path)
    config = read_model_config(path, model_name)
    with errors_name_family(path, model_name):
        config = with_vision_in(path, config)
        check_model_args(dict(megatron_args), dict(config))
        args = model_args(config, megatron_args)
        args.setdefault("padded_vocab_size", padded_vocab_size(args))
        model = Model(str(path), config, args, None if dtype is None else getattr(torch, dtype), model_name)
        check_model_split(args)
        check_parameters(args, model.parameters())
    return model


def _is_done(save: Path, mark: str, overwrite: bool) -> bool:
    """Returns whether `save` is complete. Raises InvalidSetting where it holds something that may not be replaced."""
    if not save.exists():
        return False
    if not save.is_dir():
        raise _taken(save, "is not a directory", "a new directory")
    tracker = save / TRACKER
    iterations = sorted(path.name for path in save.glob("iter_*"))
    if iterations or (tracker.is_file() and tracker.read_text().strip() != RELEASE):
        raise _taken(
            save, f"holds checkpoints of a run ({', '.join(iterations[:3]) or tracker.name})", "another directory"
        )
    if not (save / RELEASE).exists():
        unfinished = tuple(f".{RELEASE}.{kind}-" for kind in ("partial", "old"))
        others = [path.name for path in save.iterdir() if path.name != TRACKER and not path.name.startswith(unfinished)]
        if others:
            raise _taken(save, f"holds something else ({', '.join(sorted(others)[:3])})", "a new directory")
        return False
    check_replaceable(save / RELEASE, field="--save")
    if overwrite:
        return False
    try:
        same = TorchDist(save / RELEASE).description.get("source") == mark
        for name in (COMMON, CONFIG, f"{HF_DIR}/config.json"):
            if not (save / RELEASE / name).is_file():
                raise MissingFile(f"no {name}", field="path", value=str(save / RELEASE / name))
    except SlimeError as error:
        raise _taken(save, f"holds a damaged checkpoint ({error})", "--overwrite, to replace it") from None
    if not same:
        raise _taken(save, "holds a conversion of other files or with other flags", "--overwrite, to replace it")
    if not tracker.is_file():
        _write_tracker(save)
    return True


def _taken(save: Path, what: str, expected: str) -> InvalidSetting:
    return InvalidSetting(
        f"--save: {save} {what}; expected {expected}", field="--save", value=str(save), expected=expected
    )


def _write_tracker(save: Path) -> None:
    write_whole(save / TRACKER, RELEASE, field="--save")


def _write(
    ranks: TorchrunRanks, model: Model, source: HfSource, target: Path, mark: str, num_workers: int, progress: Progress
) -> None:
    parameters = model.parameters()
    layout = Layout.of(model.args)
    dtypes = key_dtypes(model, source, layout, parameters)
    sizes = [torch.Size(p.shape).numel() * dtypes[layout.place(p.name).key].itemsize for p in parameters]
    total = sum(sizes)
    with reported(target, total, progress), contextlib.ExitStack() as stack:

        def begin() -> str:
            size = total + SPARE_BYTES
            return str(
                stack.enter_context(whole_directory(target, WRITER, field="--save", need_bytes=size, alone=True))
            )

        partial = Path(ranks.on_first(begin))
        progress(f"{counted(len(parameters), 'parameter')}, {total / 2**30:.2f} GiB, to {target}")
        names = {number: dtypes[layout.place(p.name).key] for number, p in enumerate(parameters)}

        def make_job(number: int, share: tuple[int, ...]) -> ImportJob:
            return ImportJob(model, str(partial), number, share, names)

        chunks = convert_in_jobs(ranks, write_chunks, make_job, sizes, total, num_workers, progress)

        def finish() -> None:
            write_metadata(partial, itertools.chain(*itertools.chain(*chunks)))
            write_common(partial, model.args, 0)
            lost = _describe_source(partial, model, source, mark, {p.name: names[i] for i, p in enumerate(parameters)})
            if lost:
                progress(f"left out, because Megatron has no place for them: {', '.join(lost[:SHOWN])}")
            stack.close()
            _write_tracker(target.parent)

        ranks.on_first(finish)


def key_dtypes(model: Model, source: HfSource, layout: Layout, parameters: list[Parameter]) -> dict[str, torch.dtype]:
    """Returns for each tensor of the checkpoint the dtype that holds everything that is stacked in it."""
    dtypes: dict[str, torch.dtype] = {}
    for parameter in parameters:
        key = layout.place(parameter.name).key
        for block in parameter.blocks:
            dtype = source.dtype(block.name)
            # Megatron keeps the router's bias in float32, as its sources do, whatever the rest is in.
            if model.dtype is not None and dtype.is_floating_point and not key.endswith(".expert_bias"):
                dtype = model.dtype
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
    return dtypes


def write_chunks(job: ImportJob) -> list[WrittenChunk]:
    """Writes a worker's file, holding one piece of a parameter in memory at a time."""
    model = job.model
    source = HfSource(model.path, model.config)
    layout = Layout.of(model.args)
    parameters = model.parameters()
    scratch = Scratch()
    with ChunkFile(Path(job.directory), job.number) as file:
        for number in job.parameters:
            parameter, dtype = parameters[number], job.dtypes[number]
            place, aliases = layout.place(parameter.name), layout.aliases(parameter.name)
            for rows in chunk_rows(parameter, dtype):
                size = (rows.stop - rows.start, *parameter.shape[1:])
                start = (rows.start, *(0 for _ in parameter.shape[1:]))
                stored = file.reserve(place, parameter.shape, size, dtype, start, aliases)
                for index in pieces(size, dtype):
                    first, last = index[0].start, index[0].stop
                    tensor = scratch.tensor((last - first, *parameter.shape[1:]), dtype)
                    source.read_rows(parameter, slice(rows.start + first, rows.start + last), tensor)
                    file.fill(stored, index, tensor)
    source.close()
    return file.chunks


def chunk_rows(parameter: Parameter, dtype: torch.dtype) -> Iterator[slice]:
    """Yields rows that are saved together. No chunk crosses stacks, which ranks load separately."""
    row = torch.Size(parameter.shape[1:]).numel() * dtype.itemsize
    height = parameter.shape[0] // parameter.stacks
    step = max(1, min(height, CHUNK_BYTES // max(1, row)))
    for stack in range(parameter.stacks):
        for first in range(stack * height, (stack + 1) * height, step):
            yield slice(first, min(first + step, (stack + 1) * height))


def _describe_source(
    directory: Path, model: Model, source: HfSource, mark: str, dtypes: dict[str, torch.dtype]
) -> list[str]:
    """Writes `slime.json` and `hf/`, which the way back needs beside the tensors. Returns what is lost."""
    dtype = None if model.dtype is None else str(model.dtype).removeprefix("torch.")
    changes = config_changes(was_quantized=source.is_quantized, dtype=dtype)
    copy_side_files(Path(model.path), directory / HF_DIR, changes)
    # A tensor that was widened to be stacked with others is narrow again in a Hugging Face directory.
    narrow = {
        block.name: NAMES[source.dtype(block.name)]
        for parameter in model.parameters()
        for block in parameter.blocks
        if model.dtype is None and source.dtype(block.name) != dtypes[parameter.name]
    }
    copies, lost = keep(source, model.family.parameters(model.config), directory / HF_DIR)
    describe(
        directory,
        model.args,
        str(model.dtype or dtypes["embedding.word_embeddings.weight"]).removeprefix("torch."),
        source=mark,
        model_name=model.name,
        narrow=narrow,
        copies=copies,
        lost=lost,
        weight_map={name: tensor.file.name for name, tensor in source.tensors.items()},
    )
    return lost
