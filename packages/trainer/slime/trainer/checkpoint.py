"""Checkpoints: a Hugging Face directory of float32 weights, with what training resumes from beside them.

    config.json, tokenizer files, model*.safetensors     loads with transformers
    optimizer/*.safetensors                              moments as "exp_avg.NAME", "exp_avg_sq.NAME"; whole, so any
                                                         number of ranks can load what any number saved
    trainer.json                                         format, step, updates, weight_version

Nothing in it is a pickle. A directory without trainer.json is a plain model.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from slime.converters.safetensors_dir import SafetensorsDir, write
from slime.trainer.backends.base import Backend
from slime.trainer.collective import Ranks
from slime.trainer.hf_directory import copy_side_files, whole_directory
from slime.trainer.weight_sync.base import Weights, as_dtype
from slime.types.errors import InvalidFile, MissingFile

FORMAT = 1
STATE_FILE = "trainer.json"
OPTIMIZER_DIR = "optimizer"


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """Where a run stands. step: the last one that the weights have seen, -1 for none; updates: of the optimizer."""

    step: int = -1
    updates: int = 0
    weight_version: int = 0
    has_optimizer: bool = True


def read_state(path: str) -> TrainerState:
    """Raises MissingFile or InvalidFile naming --load."""
    file = Path(path) / STATE_FILE
    if not file.is_file():
        raise MissingFile(
            f"--load: {path} is no checkpoint of this trainer: it has no {STATE_FILE}", field="--load", value=path
        )
    try:
        data = json.loads(file.read_text())
        if data["format"] != FORMAT:
            raise InvalidFile(
                f"--load: {file}: format {data['format']}, expected {FORMAT}", field="--load", value=data["format"]
            )
        return TrainerState(**{f.name: data[f.name] for f in dataclasses.fields(TrainerState)})
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFile(f"--load: {file}: {type(error).__name__}: {error}", field="--load", value=path) from error


def read_optimizer(path: str) -> Callable[[str], Tensor]:
    """Finds an optimizer tensor of a checkpoint by name, and reads that one. Raises InvalidFile naming --load."""
    tensors = SafetensorsDir(Path(path) / OPTIMIZER_DIR)

    def read(name: str) -> Tensor:
        if name not in tensors.tensors:
            raise InvalidFile(f"--load: {tensors.path} has no tensor {name}", field="--load", value=name)
        return tensors.load(name)

    return read


def save_checkpoint(
    path: Path, backend: Backend, ranks: Ranks, state: TrainerState, source: Path, *, optimizer: bool = True
) -> None:
    """Collective; rank 0 writes. `source` is the directory that config and tokenizer files come from.

    Raises OutOfSpace; then and after any other failure nothing lies at `path` but what lay there before.
    """
    state = dataclasses.replace(state, has_optimizer=optimizer and state.updates > 0)
    elements = sum(backend.weight_sizes().values())
    if state.has_optimizer:
        elements += sum(backend.optimizer_sizes().values())
    weights = backend.named_weights()
    moments = backend.optimizer_state() if state.has_optimizer else iter(())

    def write_all() -> None:
        with whole_directory(path, torch.float32.itemsize * elements) as directory:
            copy_side_files(source, directory, "float32")
            write(directory, as_dtype(weights, torch.float32))
            if state.has_optimizer:
                (directory / OPTIMIZER_DIR).mkdir()
                write(directory / OPTIMIZER_DIR, as_dtype(moments, torch.float32))
            (directory / STATE_FILE).write_text(
                json.dumps({"format": FORMAT, **dataclasses.asdict(state)}, indent=2) + "\n"
            )

    ranks.on_first(write_all, weights, moments)


def write_model(path: Path, weights: Weights, sizes: dict[str, int], dtype: torch.dtype, source: Path) -> int:
    """A Hugging Face directory in `dtype`, by this process alone; returns the bytes of its weights."""
    size = sum(sizes.values()) * dtype.itemsize
    with whole_directory(path, size) as directory:
        copy_side_files(source, directory, str(dtype).removeprefix("torch."))
        write(directory, as_dtype(weights, dtype))
    return size


def config_dtype(source: Path) -> torch.dtype:
    """The type in which the weights of a Hugging Face directory are meant to be stored; float32 where it names none."""
    config = json.loads((source / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    return getattr(torch, name)
