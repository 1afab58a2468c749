"""Checkpoints of the Megatron backend: torch_dist directories that any layout of ranks resumes from.

    iter_0000004/
      .metadata, metadata.json, common.pt, __R_0.distcp     model and optimizer; megatron-core reads them
      hf/, slime.json                                       Hugging Face config and tokenizer, Megatron's arguments:
                                                            `slime-convert torch-dist-to-hf` needs nothing else
      trainer.json, data_place.jsonl                        where the run stands, in its updates and in its data
    latest_checkpointed_iteration.txt                       the newest

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
from slime.trainer.checkpoints.checkpoint import TrainerState, write_state
from slime.trainer.checkpoints.hf_directory import WRITER, copy_side_files
from slime.trainer.process.collective import Ranks
from slime.types.directories import WholeDirectory, path_errors
from slime.types.files import write_whole

log = logging.getLogger(__name__)


@dataclasses.dataclass
class _Save:
    """A checkpoint on its way to the disk."""

    step: int
    directory: WholeDirectory | None  # on the first rank
    partial: Path
    thread: threading.Thread | None = None
    chunks: list[WrittenChunk] = dataclasses.field(default_factory=list)
    error: Exception | None = None


class TorchDistCheckpoints:
    """Saves and restores one backend; every method is collective. source: directory of the config and the tokenizer."""

    def __init__(self, backend: MegatronBackend, ranks: Ranks, source: Path, *, asynchronous: bool = False) -> None:
        self._backend = backend
        self._ranks = ranks
        self._source = source
        self._asynchronous = asynchronous
        self._pending: _Save | None = None

    def load(self, path: str, state: TrainerState) -> None:
        """Loads the optimizer, where the checkpoint has one; the backend was made with its weights.

        Raises MissingFile or InvalidFile naming --load.
        """
        if state.updates and not is_torch_dist(path):
            log.warning("%s is of another backend: its weights are loaded, and the moments start from zero", path)
        elif state.updates and state.has_optimizer:
            checkpoint = TorchDist(path)
            optimizer, models = self._backend.optimizer.wrapped, self._backend.models
            sharded_state.load_optimizer(optimizer, models, reading(checkpoint, "--load"), state.updates)
            checkpoint.close()
        elif state.updates:
            log.warning("%s holds no optimizer state: its moments start from zero", path)
        self._backend.updates = state.updates

    def save(self, path: Path, state: TrainerState, *, optimizer: bool = True, place: bytes | None = None) -> None:
        """Begins to write; `finish` says when it is done. An earlier one is waited for.

        Raises OutOfSpace or InvalidSetting, here or in `finish`; then nothing lies at `path` but what lay there before.
        """
        self.finish(wait=True)
        optimizer = optimizer and state.updates > 0
        state = dataclasses.replace(state, has_optimizer=optimizer)
        self._backend.optimizer.settle()
        parts = list(sharded_state.model_parts(self._backend.models))
        common: dict[str, Any] = {}
        if optimizer:
            moments, common = sharded_state.optimizer_parts(self._backend.optimizer.wrapped, self._backend.models)
            parts += moments
        size = sum(of_rank for of_rank in self._ranks.gather(sum(part.tensor.nbytes for part in parts)))
        first = self._ranks.rank == 0
        directory = self._ranks.together(lambda: WholeDirectory(path, need_bytes=size) if first else None)
        partial = Path(self._ranks.gather(str(directory.partial) if directory else "")[0])
        job = self._pending = _Save(state.step, directory, partial)
        latent = bool(self._backend.args.get("multi_latent_attention"))

        def write() -> None:
            try:
                with path_errors(path):
                    job.chunks = _write(partial, self._ranks.rank, parts, latent=latent)
                    if directory is not None:
                        self._describe(partial, state, common, place)
            except Exception as error:  # raised on every rank by `finish`
                job.error = error

        if self._asynchronous:
            parts = [dataclasses.replace(part, tensor=_copied(part.tensor)) for part in parts]
            job.thread = threading.Thread(target=write, name=f"checkpoint-{state.step}")
            job.thread.start()
        else:
            write()

    def _describe(self, partial: Path, state: TrainerState, common: dict[str, Any], place: bytes | None) -> None:
        backend = self._backend
        dtype = "bfloat16" if backend.settings.bf16 else "float32"
        write_common(partial, backend.args, state.step, common)
        describe(partial, backend.args, dtype)
        (partial / HF_DIR).mkdir()
        copy_side_files(self._source, partial / HF_DIR, dtype)
        write_state(partial, state, place)

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
        chunks = self._join(job)

        def complete() -> None:
            if job.directory is not None:
                with path_errors(job.directory.path):
                    write_metadata(job.partial, chunks)
                job.directory.complete(WRITER, files={chunk.file for chunk in chunks})
                write_whole(job.directory.path.parent / TRACKER, str(job.step))

        try:
            self._ranks.together(complete)
        finally:
            if job.directory is not None:
                job.directory.discard()
        return job.step

    def _join(self, job: _Save) -> list[WrittenChunk]:
        """Returns the chunks of all ranks; raises where one of them failed, after cleaning up."""

        def check() -> None:
            if job.error is not None:
                raise job.error

        try:
            self._ranks.together(check)
        except BaseException:
            if job.directory is not None:
                job.directory.discard()
            raise
        plain = [[*dataclasses.astuple(chunk)] for chunk in job.chunks]
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


def _write(directory: Path, rank: int, parts: Iterable[sharded_state.Part], *, latent: bool) -> list[WrittenChunk]:
    with ChunkFile(directory, rank) as file:
        for part in parts:
            # Megatron-LM, with Transformer Engine or without, looks for its own names.
            aliases = [Place(key) for key in other_keys(part.key, latent=latent)]
            file.add(Place(part.key), part.shape, part.tensor.cpu().view(part.size), part.start, aliases)
        return file.chunks


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
