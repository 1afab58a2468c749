"""Loads new weights into the running model, in buckets or from a directory, whole or as deltas to its version.

The version changes with the last bucket. A bucket is checked as a whole before any of it is copied, so a refused bucket
changes nothing. If earlier buckets of the same version were copied already, the model is a mixture of versions, and
generation is refused until a version is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_bytes

from slime.rollout.engines.embedded.model.names import disk_tensors
from slime.types.errors import InvalidField, InvalidFile, MissingFile, WrongState, counted
from slime.types.models.vision import Vision
from slime.types.weight_deltas.buckets import TensorDelta, VersionDelta, apply_tensor, read_bucket, read_index


class ModelWeights:
    """The weights of `model` by their names in its files. Not thread-safe: only the scheduler's thread calls it."""

    def __init__(self, model: Any, version: str, vision: Vision | None = None) -> None:
        """vision: the family of a model that reads images.

        Raises NotAvailable, naming a tensor, for a model whose tensors do not correspond to those of its files.
        """
        self.version = version
        self.incomplete = False
        self.writes = 0
        """Grows with every change of the tensors."""
        self.tensors = disk_tensors(model)
        self._optional = vision.optional if vision is not None else ""
        self._seen: set[int] = set()
        self._pending_version: str | None = None

    def check_complete(self) -> None:
        """Raises WrongState if a weight update is incomplete."""
        if self.incomplete:
            raise WrongState(
                f"a weight update stopped half-way: the model is a mixture of version {self.version} and a later one",
                field="weight_version", value=self.version, expected="a complete update",
            )  # fmt: skip

    def load_bucket(self, bucket: bytes, version: str, *, last: bool) -> None:
        """Loads a bucket of safetensors. Raises InvalidField naming the tensor."""
        try:
            tensors = load_bytes(bucket)
        except SafetensorError as error:
            raise InvalidField("body", f"{len(bucket)} bytes", f"safetensors ({error})") from None
        self._copy(tensors, version, last=last)

    def load_file(self, path: str, version: str, *, last: bool) -> None:
        """Loads a bucket from a safetensors file. Raises InvalidFile, and InvalidField naming the tensor."""
        self._copy(_read_file(Path(path), "file"), version, last=last)

    def load_delta(self, bucket: bytes, version: str, *, last: bool) -> None:
        """Applies a bucket of deltas, in the format of `slime.types.weight_deltas.buckets`.

        Raises WrongState if the model does not hold the delta's base version; DataLoss naming a tensor that would
        differ from the trainer's after the change, in which case nothing of the bucket is copied.
        """
        about, deltas = read_bucket(bucket)
        if str(about.version) != version:
            raise InvalidField("weight_version", version, f"{about.version}, the version of the delta")
        if self.version != str(about.base_version) or (self.incomplete and self._pending_version != version):
            held = "a mixture" if self.incomplete else f"version {self.version}"
            raise WrongState(
                f"weight version {version} is a delta of version {about.base_version}, and the model holds {held}",
                field="weight_version", value=self.version, expected=str(about.base_version),
            )  # fmt: skip
        tensors = {delta.name: self._changed(about, delta) for delta in deltas}
        self._copy(tensors, version, last=last)

    def _changed(self, about: VersionDelta, delta: TensorDelta) -> torch.Tensor:
        """Returns the tensor after the change, in the dtype of the delta; the engine's tensor if nothing changed."""
        target = self.tensors.get(delta.name)
        if target is None or list(target.shape) != list(delta.shape):
            found = "no such tensor" if target is None else f"shape {list(target.shape)}"
            raise InvalidField(delta.name, list(delta.shape), f"a tensor of this model: {found}")
        dtype = getattr(torch, delta.dtype)
        if dtype != target.dtype and not _is_wider(target.dtype, dtype):
            held = str(target.dtype).removeprefix("torch.")
            raise InvalidField(
                "--update-weight-mode delta", delta.dtype, held,
                f"--update-weight-mode delta requires --update-weight-dtype {held}: the engine holds {delta.name} in "
                f"{held}, and {delta.dtype} cannot be read back from that",
            )  # fmt: skip
        held_bytes = target.detach().to("cpu", dtype).contiguous().reshape(-1).view(torch.uint8).numpy()
        new = apply_tensor(about, delta, held_bytes)
        if new is held_bytes:
            return target.detach()
        return torch.from_numpy(new).view(dtype).reshape(target.shape)

    def load_directory(self, path: str, version: str) -> None:
        """Loads the safetensors of a Hugging Face directory file by file, or a directory of deltas."""
        delta_index = read_index(Path(path))
        if delta_index is not None:
            for number, file in enumerate(delta_index[1]):
                try:
                    bucket = file.read_bytes()
                except OSError as error:
                    raise InvalidFile(f"model_path: {file}: {error}", field="model_path", value=str(file)) from error
                self.load_delta(bucket, version, last=number == len(delta_index[1]) - 1)
            return
        files = _weight_files(Path(path))
        for number, file in enumerate(files):
            self._copy(_read_file(file, "model_path"), version, last=number == len(files) - 1)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.writes += 1
        with torch.no_grad():
            for name, tensor in tensors.items():
                if tensor.data_ptr() != self.tensors[name].data_ptr():
                    self.tensors[name].copy_(tensor)

    def _copy(self, tensors: dict[str, torch.Tensor], version: str, *, last: bool) -> None:
        if version != self._pending_version:
            self._pending_version, self._seen = version, set()
        for name, tensor in tensors.items():
            target = self.tensors.get(name)
            if target is None:
                raise InvalidField(name, list(tensor.shape), "the name of a tensor of this model")
            if target.shape != tensor.shape:
                raise InvalidField(name, list(tensor.shape), f"shape {list(target.shape)}")
            if not tensor.is_floating_point():
                raise InvalidField(name, str(tensor.dtype), "a floating point type")
        seen = self._seen | {self.tensors[name].data_ptr() for name in tensors}
        if last:
            missing = [name for name, target in self.tensors.items() if target.data_ptr() not in seen]
            if missing and missing != self._untrained():
                raise InvalidField(
                    missing[0], f"missing, with {counted(len(missing) - 1, 'other')}", "a tensor in some bucket"
                )
        self.incomplete |= bool(tensors)
        self.write(tensors)
        self._seen = seen
        if last:
            self.version, self.incomplete, self._pending_version = version, False, None

    def _untrained(self) -> list[str]:
        """Returns the names of the tensors that a trainer of text does not have: an update has all of them or none."""
        return [name for name in self.tensors if self._optional and name.startswith(self._optional)]


def _is_wider(held: torch.dtype, sent: torch.dtype) -> bool:
    """Returns whether `held` can represent every value of `sent`; False for dtypes that torch cannot compare."""
    comparable = held.is_floating_point and sent.is_floating_point and min(held.itemsize, sent.itemsize) > 1
    return comparable and torch.promote_types(sent, held) == held


def _read_file(file: Path, field: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file, which stay on disk until they are used."""
    try:
        if not file.is_file():
            raise OSError("no such file")
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InvalidFile(f"{field}: {file}: {error}", field=field, value=str(file)) from error


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    file = directory / "model.safetensors"
    if not file.is_file():
        raise MissingFile(f"model_path: {directory} has no model.safetensors", field="model_path", value=str(directory))
    return [file]
