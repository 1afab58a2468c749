"""Converts a torch_dist checkpoint into a Hugging Face directory, one parameter at a time, without a model.

Checkpoints of slime-convert and slime's trainer carry their config and tokenizer; for those of other programs these
come from the directory of the original model.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from slime.converters.convert.leftovers import Leftovers
from slime.converters.convert.workers import TorchrunRanks, convert_in_jobs, reported
from slime.converters.families import find_family, read_config
from slime.converters.families.base import Config, Family
from slime.converters.families.config_json import check_vocab_size, text_of
from slime.converters.families.mapping import Parameter
from slime.converters.families.qwen_gated import with_layout, with_vision
from slime.converters.files.dtypes import DTYPES
from slime.converters.files.finished import SPARE_BYTES, WRITER, check_hf_output, fingerprint
from slime.converters.files.hf_writer import HfFiles, HfTensor, create, divide_into_files, places
from slime.converters.files.rectangles import pieces
from slime.converters.files.safetensors_dir import SHARD_BYTES, SafetensorsDir
from slime.converters.files.scratch import Scratch
from slime.converters.files.side_files import config_changes, copy_side_files, weight_map
from slime.converters.megatron.args import check_model_args, read_model_config
from slime.converters.torch_dist.directory import METADATA
from slime.converters.torch_dist.reader import Parameters, TorchDist
from slime.types.directories import whole_directory
from slime.types.errors import InvalidFile, MissingFile, NotFound, counted

# Keys of the model in a checkpoint; others belong to the optimizer or to the run.
_MODEL_KEYS = ("embedding.", "decoder.", "output_layer.", "mtp.")

Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Export:
    """The model to write, and the checkpoint to read it from.

    mtp: whether the checkpoint has the layers for multi-token prediction.
    """

    path: str
    config: Config
    dtype: torch.dtype | None
    mtp: bool

    @property
    def family(self) -> Family:
        return find_family(self.config)

    @property
    def parameters(self) -> list[Parameter]:
        return [p for p in self.family.parameters(self.config) if self.mtp or not p.name.startswith("mtp.")]

    def open(self) -> Parameters:
        return Parameters(TorchDist(self.path), self.family.arguments(self.config))


@dataclasses.dataclass(frozen=True)
class ExportJob:
    """One worker's share of a conversion to Hugging Face files: the indexes of its parameters."""

    export: Export
    files: dict[str, list[HfTensor]]
    directory: str
    parameters: tuple[int, ...]


def convert(
    input_dir: str | Path,
    output_dir: str | Path,
    *,
    origin_hf_dir: str | Path | None = None,
    megatron_args: Mapping[str, Any] | None = None,
    model_name: str | None = None,
    vocab_size: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int | None = None,
    num_workers: int = 1,
    overwrite: bool = False,
    progress: Progress = lambda text: None,
) -> Path:
    """Writes `output_dir` from the checkpoint `input_dir`; returns it.

    origin_hf_dir: where config, tokenizer and sizes of shards come from, the checkpoint itself by default.
    megatron_args: Megatron arguments to check against the config. model_name: the family, if config.json's is unknown.
    vocab_size: rows of embedding and output layer, written to config.json too; the config's by default.
    dtype: of floating-point weights, the checkpoint's by default. max_shard_bytes: files as in the source by default.
    An `output_dir` made from the same checkpoint in the same way is kept; `overwrite` replaces any other.
    Under torchrun every rank calls this and writes its share. Raises MissingFile, InvalidFile (damage, tensors that are
    missing, left over or of another shape), InvalidSetting, OutOfSpace.
    """
    target = Path(output_dir).absolute()
    with TorchrunRanks() as ranks:
        checkpoint = TorchDist(input_dir)
        origin = _origin(checkpoint, origin_hf_dir)
        export = read_export(checkpoint, origin, vocab_size, dtype, model_name)
        check_model_args(megatron_args or {}, export.config)
        mark = fingerprint(
            [checkpoint.directory / METADATA, origin / "config.json"],
            {
                "vocab_size": vocab_size,
                "dtype": dtype,
                "max_shard_bytes": max_shard_bytes,
                "origin": str(origin.resolve()),
            },
        )
        if ranks.on_first(lambda: check_hf_output(target, mark, overwrite)):
            progress(f"{target} is complete: kept")
            return target
        _write(ranks, export, checkpoint, origin, target, mark, max_shard_bytes, num_workers, progress)
    return target


def _origin(checkpoint: TorchDist, path: str | Path | None) -> Path:
    if path is not None:
        return Path(path)
    if checkpoint.hf_dir is None:
        raise MissingFile.required(
            "--origin-hf-dir",
            f"the Hugging Face directory that the model came from; {checkpoint.directory} does not hold its config, as "
            "checkpoints of slime-convert and of slime's trainer do",
        )
    return checkpoint.hf_dir


def read_export(
    checkpoint: TorchDist,
    origin: Path,
    vocab_size: int | None = None,
    dtype: str | None = None,
    model_name: str | None = None,
) -> Export:
    """Checks every parameter of the model against the checkpoint. Raises InvalidFile, InvalidSetting."""
    config = read_model_config(origin, model_name or checkpoint.description.get("model_name"))
    config = with_layout(config, checkpoint.description.get("weight_map") or ())
    if any(key.startswith("visual.") for key in checkpoint.tensors):
        config = with_vision(config)
    check_vocab_size(config, vocab_size)
    if vocab_size is not None:
        config["vocab_size"] = vocab_size
    has_mtp = any(key.startswith("mtp.") for key in checkpoint.tensors)
    export = Export(
        str(checkpoint.directory),
        config,
        None if dtype is None else getattr(torch, dtype),
        has_mtp,
    )
    stored_parameters = Parameters(checkpoint, export.family.arguments(config))
    used: set[str] = set()
    missing: list[str] = []
    for parameter in export.parameters:
        try:
            stored_parameters.check(parameter)
        except NotFound as error:
            missing.append(error.message)
            continue
        used.update(stored_parameters.keys(parameter))
    if missing:
        raise InvalidFile(
            f"{counted(len(missing), 'parameter is', 'parameters are')} missing: {'; '.join(missing[:10])}",
            field="tensors",
            value=missing[0],
        )
    left = sorted(
        key
        for key in checkpoint.tensors
        if key.startswith(_MODEL_KEYS) and key not in used and not key.endswith("._extra_state")
    )
    if left:
        raise InvalidFile(
            f"{checkpoint.directory}: {counted(len(left), 'tensor')} that the model of {origin / 'config.json'} has no "
            f"place for: {', '.join(left[:10])}",
            field="tensors",
            value=left[0],
            expected="the config.json of this model",
        )
    return export


def _write(
    ranks: TorchrunRanks,
    export: Export,
    checkpoint: TorchDist,
    origin: Path,
    target: Path,
    mark: str,
    max_shard_bytes: int | None,
    num_workers: int,
    progress: Progress,
) -> None:
    parameters = export.parameters
    tensors = hf_tensors(export, checkpoint)
    leftovers = Leftovers(checkpoint, export.family.parameters(export.config), tensors, origin)
    like = None if max_shard_bytes else _source_files(checkpoint, origin)
    files = divide_into_files(
        [*tensors.values(), *leftovers.tensors()], like=like, max_bytes=max_shard_bytes or SHARD_BYTES
    )
    total = sum(tensor.num_bytes for group in files.values() for tensor in group)
    sizes = [sum(tensors[block.name].num_bytes for block in {b.name: b for b in p.blocks}.values()) for p in parameters]
    with reported(target, total, progress), contextlib.ExitStack() as stack:

        def begin() -> str:
            writing = whole_directory(
                target, WRITER, field="--output-dir", need_bytes=total + SPARE_BYTES, alone=True, source=mark
            )
            partial = stack.enter_context(writing)
            create(partial, files)
            return str(partial)

        partial = Path(ranks.on_first(begin))
        size = f"{counted(len(tensors), 'tensor')}, {total / 2**30:.2f} GiB"
        progress(f"{size}, in {counted(len(files), 'file')}, to {target}")

        def make_job(number: int, share: tuple[int, ...]) -> ExportJob:
            return ExportJob(export, files, str(partial), share)

        convert_in_jobs(ranks, write_tensors, make_job, sizes, total, num_workers, progress)

        def finish() -> None:
            leftovers.write(places(partial, files))
            copy_side_files(origin, partial, _config_changes(export, origin, tensors))
            stack.close()

        ranks.on_first(finish)
        for line in leftovers.notes:
            progress(line)


def hf_tensors(export: Export, checkpoint: TorchDist) -> dict[str, HfTensor]:
    """Returns the tensors that the parameters form, in order.

    Raises InvalidFile for a tensor that they do not fill.
    """
    narrow = checkpoint.description.get("narrow", {})
    found = Parameters(checkpoint, export.family.arguments(export.config))
    tensors: dict[str, HfTensor] = {}
    filled: dict[str, int] = {}
    for parameter in export.parameters:
        stored = found.find(parameter)[0].dtype
        for block in parameter.blocks:
            dtype = DTYPES[narrow[block.name]] if block.name in narrow else stored
            if export.dtype is not None and dtype.is_floating_point and not parameter.name.endswith(".expert_bias"):
                dtype = export.dtype
            tensors.setdefault(block.name, HfTensor(block.name, dtype, block.shape))
            filled[block.name] = filled.get(block.name, 0) + torch.Size(block.size).numel()
    for name, count in filled.items():
        if count != torch.Size(tensors[name].shape).numel():
            raise InvalidFile(
                f"{name}: the model has {count:,} of its {torch.Size(tensors[name].shape).numel():,} elements",
                field=name,
            )
    return tensors


def write_tensors(job: ExportJob) -> None:
    """Writes one worker's share, holding one piece of a parameter in memory at a time."""
    stored_parameters = job.export.open()
    parameters = job.export.parameters
    scratch = Scratch()
    with HfFiles(places(Path(job.directory), job.files)) as files:
        for number in job.parameters:
            parameter = parameters[number]
            dtype = stored_parameters.find(parameter)[0].dtype
            for rows, *_ in pieces(parameter.shape, dtype):
                data = scratch.tensor((rows.stop - rows.start, *parameter.shape[1:]), dtype)
                stored_parameters.read_rows(parameter, rows, data)
                for piece in parameter.slices_of_rows(rows):
                    files.write(piece.hf_name, piece.hf_index, data[piece.index])
    stored_parameters.checkpoint.close()


def _source_files(checkpoint: TorchDist, origin: Path) -> dict[str, str]:
    """Returns the file of each tensor in the source; {} if unknown."""
    recorded = checkpoint.description.get("weight_map")
    if isinstance(recorded, dict) and origin == checkpoint.hf_dir:
        return recorded
    if weight_map(origin):
        return weight_map(origin)
    return (
        {name: tensor.file.name for name, tensor in SafetensorsDir(origin).tensors.items()}
        if any(origin.glob("*.safetensors"))
        else {}
    )


def _config_changes(export: Export, origin: Path, tensors: dict[str, HfTensor]) -> dict[str, Any]:
    config, rows = read_config(origin), text_of(export.config)["vocab_size"]
    return config_changes(
        was_quantized=bool(config.get("quantization_config")),
        dtype=None if export.dtype is None else str(export.dtype).removeprefix("torch."),
        vocab_size=rows if rows != text_of(config)["vocab_size"] else None,
    )
