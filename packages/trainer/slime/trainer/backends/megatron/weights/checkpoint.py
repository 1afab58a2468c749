"""Checkpoints of the Megatron backend: torch_dist directories that any layout of ranks resumes from.

    iter_0000004/
      .metadata, metadata.json, common.pt, __R_0.distcp     model and optimizer; megatron-core reads them
      hf/, slime.json                                       Hugging Face config and tokenizer, Megatron's arguments:
                                                            `slime-convert torch-dist-to-hf` needs nothing else
      trainer.json, data_place.jsonl                        where the run stands, in its updates and in its data
      critic/                                               the same of a critic, without hf/ and a place
    latest_checkpointed_iteration.txt                       the newest; a warning says where it could not be written

Every rank writes the parts that it alone has, into a file of its own; the first rank joins them, and only then does the
directory get its name. With --async-save the writing goes on beside training, from copies in host memory.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from slime.converters.torch_dist.description import describe
from slime.converters.torch_dist.directory import HF_DIR, TRACKER, is_torch_dist
from slime.converters.torch_dist.keys import Place, other_keys
from slime.converters.torch_dist.reader import TorchDist
from slime.converters.torch_dist.writer import ChunkFile, WrittenChunk, write_common, write_metadata
from slime.trainer.backends.megatron.backend import MegatronBackend
from slime.trainer.backends.megatron.weights import sharded_state
from slime.trainer.backends.megatron.weights.initial import reading
from slime.trainer.checkpoints.checkpoint import (
    CRITIC_DIR,
    TrainerState,
    critic_directory,
    read_state,
    write_state,
)
from slime.trainer.checkpoints.hf_directory import WRITER, copy_side_files
from slime.trainer.process.collective import Ranks
from slime.types.directories import WholeDirectory, path_errors
from slime.types.errors import InvalidSetting, OutOfSpace
from slime.types.files import write_whole

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Model:
    """The tensors of one backend that this rank writes into a checkpoint.

    directory: inside the checkpoint's; common: what of the optimizer is the same on all ranks; chunks: as written.
    """

    backend: MegatronBackend
    directory: str
    state: TrainerState
    parts: list[sharded_state.Part]
    common: dict[str, Any]
    chunks: list[WrittenChunk] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, backend: MegatronBackend, directory: str, state: TrainerState, optimizer: bool) -> _Model:
        """Collects the parts, views of the backend's tensors. Collective."""
        state = dataclasses.replace(state, updates=backend.updates) if directory else state
        state = state.of(backend, optimizer=optimizer)
        backend.optimizer.settle()
        parts = list(sharded_state.model_parts(backend.models))
        common: dict[str, Any] = {}
        if state.has_optimizer:
            moments, common = sharded_state.optimizer_parts(backend.optimizer.wrapped, backend.models)
            parts += moments
        return cls(backend, directory, state, parts, common)

    def copy_parts(self) -> None:
        """Takes copies in host memory, which further training leaves as they are."""
        self.parts = [dataclasses.replace(part, tensor=_copied(part.tensor)) for part in self.parts]

    def write(self, partial: Path, rank: int) -> None:
        names = ("multi_latent_attention", "qk_layernorm_across_heads")
        latent, across_heads = (bool(self.backend.args.get(name)) for name in names)
        directory = partial / self.directory
        self.chunks = _write(directory, rank, self.parts, latent=latent, across_heads=across_heads)


@dataclasses.dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    step: int
    models: list[_Model]
    directory: WholeDirectory | None  # on the first rank
    partial: Path
    thread: threading.Thread | None = None
    error: Exception | None = None


class TorchDistCheckpoints:
    """Saves and restores a backend and a critic; every method is collective. source: directory of the config and the
    tokenizer."""

    def __init__(
        self,
        backend: MegatronBackend,
        ranks: Ranks,
        source: Path,
        critic: MegatronBackend | None = None,
        *,
        asynchronous: bool = False,
    ) -> None:
        self._backend = backend
        self._critic = critic
        self._ranks = ranks
        self._source = source
        self._asynchronous = asynchronous
        self._pending: _Save | None = None

    def load(self, path: str, state: TrainerState) -> None:
        """Loads the optimizers, where the checkpoint has them; the backends were made with its weights.

        Raises MissingFile or InvalidFile naming --load.
        """
        self._load(self._backend, path, state)
        of_critic = critic_directory(path)
        if self._critic is not None and of_critic is not None:
            self._load(self._critic, of_critic, read_state(of_critic))

    def _load(self, backend: MegatronBackend, path: str, state: TrainerState) -> None:
        if state.updates and not is_torch_dist(path):
            log.warning("%s is of another backend: its weights are loaded, and the moments start from zero", path)
        elif state.updates and state.has_optimizer:
            checkpoint = TorchDist(path)
            optimizer, models = backend.optimizer.wrapped, backend.models
            seen = state.updates if state.moment_updates is None else state.moment_updates
            sharded_state.load_optimizer(optimizer, models, reading(checkpoint, "--load"), seen)
            backend.moment_updates = seen
            checkpoint.close()
        elif state.updates:
            log.warning("%s holds no optimizer state: its moments start from zero", path)
        backend.updates = state.updates

    def save(self, path: Path, state: TrainerState, *, optimizer: bool = True, place: bytes | None = None) -> None:
        """Begins to write; `finish` says when it is done. An earlier one is waited for.

        Raises OutOfSpace or InvalidSetting, here or in `finish`; then nothing lies at `path` but what lay there before.
        """
        self.finish(wait=True)
        models = [_Model.of(self._backend, "", state, optimizer)]
        if self._critic is not None:
            models.append(_Model.of(self._critic, CRITIC_DIR, state, optimizer))
        size = sum(self._ranks.gather(sum(part.tensor.nbytes for model in models for part in model.parts)))
        directory = self._ranks.together(lambda: self._begin(path, size, models))
        partial = Path(self._ranks.gather(str(directory.partial) if directory else "")[0])
        job = self._pending = _Save(state.step, models, directory, partial)

        def write() -> None:
            try:
                with path_errors(path):
                    for model in models:
                        model.write(partial, self._ranks.rank)
                        if directory is not None:
                            self._describe(model, partial / model.directory, None if model.directory else place)
            except Exception as error:  # raised on every rank by `finish`
                job.error = error

        if self._asynchronous:
            for model in models:
                model.copy_parts()
            job.thread = threading.Thread(target=write, name=f"checkpoint-{state.step}")
            job.thread.start()
        else:
            write()

    def _begin(self, path: Path, size: int, models: list[_Model]) -> WholeDirectory | None:
        """Creates the directories, on the first rank."""
        if self._ranks.rank != 0:
            return None
        directory = WholeDirectory(path, need_bytes=size)
        for model in models:
            (directory.partial / model.directory).mkdir(exist_ok=True)
        return directory

    def _describe(self, model: _Model, directory: Path, place: bytes | None) -> None:
        args, state = model.backend.args, model.state
        dtype = "bfloat16" if model.backend.settings.bf16 else "float32"
        write_common(directory, args, state.step, model.common)
        describe(directory, args, dtype)
        if model.backend is self._backend:
            # config.json describes no model with a value head.
            (directory / HF_DIR).mkdir()
            copy_side_files(self._source, directory / HF_DIR, dtype)
        write_state(directory, state, place)

    def finish(self, *, wait: bool) -> int | None:
        """Gives a checkpoint that is written its name; its step, or None where none is (ready).

        wait: for one that is still being written. Raises what went wrong while writing.
        """
        job = self._pending
        if job is None:
            return None
        if job.thread is not None:
            if wait:
                job.thread.join()
            if any(self._ranks.gather(job.thread.is_alive())):
                return None
        self._pending = None
        self._check(job)
        joined = [(model.directory, self._join(model)) for model in job.models]

        def complete() -> None:
            if job.directory is not None:
                with path_errors(job.directory.path):
                    for name, chunks in joined:
                        write_metadata(job.partial / name, chunks)
                files = {Path(name, chunk.file).as_posix() for name, chunks in joined for chunk in chunks}
                job.directory.complete(WRITER, files=files)
                _name_newest(job.directory.path, job.step)

        try:
            self._ranks.together(complete)
        finally:
            if job.directory is not None:
                job.directory.discard()
        return job.step

    def _check(self, job: _Save) -> None:
        """Raises where one of the ranks failed, after cleaning up."""

        def check() -> None:
            if job.error is not None:
                raise job.error

        try:
            self._ranks.together(check)
        except BaseException:
            if job.directory is not None:
                job.directory.discard()
            raise

    def _join(self, model: _Model) -> list[WrittenChunk]:
        """Returns the chunks of all ranks."""
        plain = [[*dataclasses.astuple(chunk)] for chunk in model.chunks]
        for chunk in plain:
            chunk[1] = str(chunk[1]).removeprefix("torch.")
        joined = []
        for of_rank in self._ranks.gather(plain):
            for keys, dtype, shape, start, size, file, offset, length in of_rank:
                joined.append(
                    WrittenChunk(
                        tuple(keys),
                        getattr(torch, dtype),
                        tuple(shape),
                        tuple(start),
                        tuple(size),
                        file,
                        offset,
                        length,
                    )
                )
        return joined

    def close(self) -> None:
        """Drops what is not complete."""
        job, self._pending = self._pending, None
        if job is not None:
            if job.thread is not None:
                job.thread.join()
            if job.directory is not None:
                job.directory.discard()


def _name_newest(path: Path, step: int) -> None:
    """Names the checkpoint at `path`, which is complete, in the file beside it. Without that it counts all the same."""
    tracker = path.parent / TRACKER
    try:
        write_whole(tracker, str(step))
    except (InvalidSetting, OutOfSpace) as error:
        log.warning(
            "%s is complete, but %s does not name it as the newest checkpoint: %s; give --load %s to resume from it",
            path, tracker, error, path,
        )  # fmt: skip


def _write(
    directory: Path, rank: int, parts: Iterable[sharded_state.Part], *, latent: bool, across_heads: bool
) -> list[WrittenChunk]:
    with ChunkFile(directory, rank) as file:
        for part in parts:
            # Megatron-LM, with Transformer Engine or without, and the original look for their own names.
            aliases = [Place(key) for key in other_keys(part.key, latent=latent, across_heads=across_heads)]
            file.add(Place(part.key), part.shape, part.tensor.cpu().view(part.size), part.start, aliases)
        return file.chunks


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
