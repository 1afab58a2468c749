"""Checkpoints: a Hugging Face directory of float32 weights, and beside them the state that training resumes from.

    config.json, tokenizer files, model*.safetensors     loads with transformers
    optimizer/*.safetensors                              moments as "exp_avg.NAME", "exp_avg_sq.NAME"; whole, so any
                                                         number of ranks can load what any number saved
    trainer.json                                         format, and the fields of TrainerState
    data_place.jsonl                                     the place in the data, as the buffer describes it
    adapter_config.json, adapter_model.safetensors       with LoRA in place of the model: the adapter as peft has it
    critic/                                              the same for a critic, without a place

Nothing in it is a pickle. A directory without trainer.json is a plain model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from slime.converters.convert.hf_source import HfSource
from slime.converters.files.adapter import ADAPTER_DIR, CONFIG_FILE
from slime.converters.files.safetensors_dir import SafetensorsDir, write
from slime.converters.torch_dist.directory import is_torch_dist
from slime.trainer.checkpoints.adapter import Adapter
from slime.trainer.checkpoints.hf_directory import WRITER, NamedTensors, as_dtype, copy_side_files
from slime.trainer.process.collective import Ranks
from slime.types.directories import whole_directory
from slime.types.errors import InvalidFile, MissingFile

if TYPE_CHECKING:
    from slime.trainer.backends.base import Backend
    from slime.trainer.backends.fsdp.backend import FsdpBackend

FORMAT = 1
STATE_FILE = "trainer.json"
PLACE_FILE = "data_place.jsonl"
TRACKER = "latest_checkpointed_iteration.txt"
# Files that a Hugging Face or a torch_dist directory has, or one of a LoRA adapter.
MODEL_FILES = ("config.json", ".metadata", TRACKER, CONFIG_FILE)
log = logging.getLogger(__name__)
OPTIMIZER_DIR = "optimizer"
CRITIC_DIR = "critic"


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """Progress of a run. step: the last iteration that was trained, -1 for none; updates: of the optimizer.

    moment_updates: as in Backend; None in checkpoints that do not say, where it is `updates`.
    """

    step: int = -1
    updates: int = 0
    weight_version: int = 0
    has_optimizer: bool = True
    moment_updates: int | None = None

    def of(self, backend: Backend, *, optimizer: bool) -> TrainerState:
        """Returns the state to save with `backend`. optimizer: whether its moments are saved, where it has any."""
        return dataclasses.replace(
            self, has_optimizer=optimizer and backend.moment_updates > 0, moment_updates=backend.moment_updates
        )


class Checkpoints(Protocol):
    """Saves and restores a backend; every method is collective."""

    def load(self, path: str, state: TrainerState) -> None:
        """Loads the state that constructing the backend does not. Raises MissingFile or InvalidFile naming --load."""

    def save(self, path: Path, state: TrainerState, *, optimizer: bool = True, place: bytes | None = None) -> None:
        """Begins to write; raises OutOfSpace. place: in the data, for PLACE_FILE; on the first rank."""

    def finish(self, *, wait: bool) -> int | None:
        """Returns the step of a checkpoint that has become complete since; raises the error that stopped it."""

    def close(self) -> None:
        """Drops a checkpoint that is not complete."""


class HuggingFaceCheckpoints:
    """Checkpoints as this module describes them. source: the directory that config and tokenizer files come from."""

    def __init__(self, backend: FsdpBackend, ranks: Ranks, source: Path, critic: FsdpBackend | None = None) -> None:
        self._backend = backend
        self._critic = critic
        self._ranks = ranks
        self._source = source
        self._done: int | None = None

    def load(self, path: str, state: TrainerState) -> None:
        _load_optimizer(self._backend, path, state)
        of_critic = critic_directory(path)
        if self._critic is not None and of_critic is not None:
            _load_optimizer(self._critic, of_critic, read_state(of_critic))

    def save(self, path: Path, state: TrainerState, *, optimizer: bool = True, place: bytes | None = None) -> None:
        save_checkpoint(
            path, self._backend, self._ranks, state, self._source, optimizer=optimizer, place=place, critic=self._critic
        )
        self._done = state.step

    def finish(self, *, wait: bool) -> int | None:
        done, self._done = self._done, None
        return done

    def close(self) -> None:
        self._done = None


def read_state(path: str, train_backend: str | None = None) -> TrainerState:
    """Reads the state of a checkpoint; for a plain model, the state before the first iteration.

    train_backend: the one that is to load it, where that is known. Raises MissingFile or InvalidFile for --load.
    """
    if train_backend == "fsdp" and is_torch_dist(path):
        expected = "a Hugging Face directory, or a checkpoint that this backend saved"
        raise InvalidFile(
            f"--load: {path} holds a torch_dist checkpoint, which --train-backend fsdp cannot read; use "
            "--train-backend megatron, or convert it with `slime-convert to-hf`",
            field="--load", value=path, expected=expected,
        )  # fmt: skip
    file = _state_file(Path(path))
    if not file.is_file():
        if any((Path(path) / name).is_file() for name in MODEL_FILES):
            return TrainerState(has_optimizer=False)
        raise MissingFile(
            f"--load: {path} is neither a checkpoint of this trainer nor a model: it has no {STATE_FILE}",
            field="--load",
            value=path,
        )
    try:
        data = json.loads(file.read_text())
        if data["format"] != FORMAT:
            raise InvalidFile(
                f"--load: {file}: format {data['format']}, expected {FORMAT}", field="--load", value=data["format"]
            )
        known = {"moment_updates": None} | data
        return TrainerState(**{f.name: known[f.name] for f in dataclasses.fields(TrainerState)})
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidFile(f"--load: {file}: {type(error).__name__}: {error}", field="--load", value=path) from error


def _state_file(path: Path) -> Path:
    """Returns the path of trainer.json: of the newest checkpoint where `path` holds several, as Megatron's do."""
    tracker = path / TRACKER
    number = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    return (path / f"iter_{int(number):07d}" if number.isascii() and number.isdigit() else path) / STATE_FILE


def critic_directory(path: str) -> str | None:
    """Returns where the checkpoint has a critic, None where it has none."""
    directory = _state_file(Path(path)).parent / CRITIC_DIR
    return str(directory) if directory.is_dir() else None


def _load_optimizer(backend: FsdpBackend, path: str, state: TrainerState) -> None:
    if state.has_optimizer and state.updates:
        backend.load_optimizer_state(read_optimizer(path), state.updates, state.moment_updates)
    elif state.updates:
        log.warning("%s holds no optimizer state: its moments start from zero", path)
        backend.updates = state.updates


def read_optimizer(path: str) -> Callable[[str], Tensor]:
    """Returns a function that reads one optimizer tensor of a checkpoint by name. Raises InvalidFile naming --load."""
    tensors = SafetensorsDir(Path(path) / OPTIMIZER_DIR)

    def read(name: str) -> Tensor:
        if name not in tensors.tensors:
            raise InvalidFile(f"--load: {tensors.path} has no tensor {name}", field="--load", value=name)
        return tensors.load(name)

    return read


def save_checkpoint(
    path: Path,
    backend: FsdpBackend,
    ranks: Ranks,
    state: TrainerState,
    source: Path,
    *,
    optimizer: bool = True,
    place: bytes | None = None,
    critic: FsdpBackend | None = None,
) -> None:
    """Writes a checkpoint; collective, rank 0 writes. `source` is the directory that config and tokenizer files come
    from.

    Raises OutOfSpace, and InvalidSetting for a path that takes no checkpoint. After these and any other failure, `path`
    is as it was before.
    """
    parts = [_Part(backend, state, source, optimizer)]
    if critic is not None:
        parts.append(_Part(critic, dataclasses.replace(state, updates=critic.updates), source, optimizer))

    def write_all() -> None:
        need = torch.float32.itemsize * sum(part.elements for part in parts)
        with whole_directory(path, WRITER, need_bytes=need) as directory:
            parts[0].write(directory, source, place)
            for part in parts[1:]:
                (directory / CRITIC_DIR).mkdir()
                part.write(directory / CRITIC_DIR, source, None)
                # A critic may be another model than the policy.
                part.backend.config.save_pretrained(directory / CRITIC_DIR)

    ranks.on_first(write_all, *(stream for part in parts for stream in (part.weights, part.moments)))


class _Part:
    """A backend as one directory of a checkpoint."""

    def __init__(self, backend: FsdpBackend, state: TrainerState, source: Path, optimizer: bool) -> None:
        self.backend = backend
        self.untrained = _sizes_in(source, backend.untrained_weights())
        self.state = state.of(backend, optimizer=optimizer)
        self.adapter = backend.adapter()
        self.weights = backend.named_weights() if self.adapter is None else self.adapter.weights
        self.moments = backend.optimizer_state() if self.state.has_optimizer else iter(())

    @property
    def elements(self) -> int:
        moments = sum(self.backend.optimizer_sizes().values()) if self.state.has_optimizer else 0
        if self.adapter is not None:
            return self.adapter.elements + moments
        return sum(self.backend.weight_sizes().values()) + moments + sum(self.untrained.values())

    def write(self, directory: Path, source: Path, place: bytes | None) -> None:
        if self.adapter is not None:
            copy_side_files(source, directory)
            self.adapter.write(directory)
        else:
            copy_side_files(source, directory, "float32")
            untrained = _of_source(source, list(self.untrained))
            write(directory, as_dtype(itertools.chain(self.weights, untrained), torch.float32))
        if self.state.has_optimizer:
            (directory / OPTIMIZER_DIR).mkdir()
            write(directory / OPTIMIZER_DIR, as_dtype(self.moments, torch.float32))
        write_state(directory, self.state, place)


def write_state(directory: Path, state: TrainerState, place: bytes | None) -> None:
    """Writes the progress of the run, in its updates and in its data."""
    if place is not None:
        (directory / PLACE_FILE).write_bytes(place)
    (directory / STATE_FILE).write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(state)}, indent=2) + "\n")


def write_model(
    path: Path,
    weights: NamedTensors,
    sizes: dict[str, int],
    dtype: torch.dtype,
    source: Path,
    untrained: Iterable[str] = (),
    adapter: Adapter | None = None,
) -> int:
    """Writes a Hugging Face directory in `dtype`, by this process alone; returns the bytes of its weights. Raises as
    `save_checkpoint` does.

    untrained: names of tensors that are copied from `source` if it has them. adapter: written below the directory.
    """
    kept = _sizes_in(source, untrained)
    size = (sum(sizes.values()) + sum(kept.values())) * dtype.itemsize
    need = size + (torch.float32.itemsize * adapter.elements if adapter is not None else 0)
    with whole_directory(path, WRITER, need_bytes=need) as directory:
        copy_side_files(source, directory, str(dtype).removeprefix("torch."))
        copied = _of_source(source, list(kept))
        write(directory, itertools.chain(as_dtype(weights, dtype), as_dtype(copied, dtype)))
        if adapter is not None:
            (directory / ADAPTER_DIR).mkdir()
            adapter.write(directory / ADAPTER_DIR)
    return size


def write_as_given(
    path: Path, weights: NamedTensors, num_bytes: int, source: Path, untrained: Iterable[str] = ()
) -> int:
    """Writes a Hugging Face directory of tensors as they are, with the config of `source`; returns their bytes.

    num_bytes: those of `weights`. untrained: names of tensors that are copied from `source` if it has them. Raises as
    `save_checkpoint` does.
    """
    names = list(untrained)
    stored = SafetensorsDir(source) if names else None
    kept = {} if stored is None else {name: stored.tensors[name] for name in names if name in stored.tensors}
    size = num_bytes + sum(info.num_bytes for info in kept.values())
    with whole_directory(path, WRITER, need_bytes=size) as directory:
        copy_side_files(source, directory)
        copied = ((name, stored.load(name)) for name in kept) if stored is not None else iter(())
        write(directory, itertools.chain(weights, copied))
    return size


def _sizes_in(source: Path, names: Iterable[str]) -> dict[str, int]:
    """Returns the elements of those of the tensors that a directory has. Factors of fp8 are none: `_of_source` reads
    weights that are multiplied with them."""
    kept = HfSource(source, _config(source)).tensors if (names := list(names)) else {}
    return {name: kept[name].num_elements for name in names if name in kept}


def _of_source(source: Path, names: list[str]) -> NamedTensors:
    if not names:
        return
    tensors = HfSource(source, _config(source))
    try:
        for name in names:
            yield name, tensors.load(name)
    finally:
        tensors.close()


def config_dtype(source: Path) -> torch.dtype:
    """Returns the type in which weights of a Hugging Face directory are to be stored; float32 where it names none."""
    config = _config(source)
    named = (part.get(key) for part in (config, config.get("text_config") or {}) for key in ("dtype", "torch_dtype"))
    name = next(filter(None, named), "float32")
    return getattr(torch, name)


def _config(source: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    return config
