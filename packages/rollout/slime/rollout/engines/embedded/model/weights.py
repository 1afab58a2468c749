"""Loads new weights into the running model, in buckets or from a directory.

The version changes when the last bucket is in. A bucket is checked as a whole before any of it is copied, so a refused
one changes nothing; where earlier buckets of the same version were copied already, the model is a mixture, and
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


class ModelWeights:
    """The weights of `model` by the names of its files; not thread-safe: the scheduler's thread calls it."""

    def __init__(self, model: Any, version: str) -> None:
        """Raises NotAvailable, naming a tensor, for a model whose files' names say nothing of its tensors."""
        self.version = version
        self.incomplete = False
        self.writes = 0
        """Grows with every change of the tensors."""
        self.tensors = disk_tensors(model)
        self._seen: set[int] = set()
        self._pending_version: str | None = None

    def check_complete(self) -> None:
        """Raises WrongState where an update stopped half-way."""
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

    def load_directory(self, path: str, version: str) -> None:
        """Loads the safetensors of a Hugging Face directory, file by file."""
        files = _weight_files(Path(path))
        for number, file in enumerate(files):
            try:
                with safe_open(file, framework="pt") as opened:
                    tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise InvalidFile(f"model_path: {file}: {error}", field="model_path", value=str(file)) from error
            self._copy(tensors, version, last=number == len(files) - 1)

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.writes += 1
        with torch.no_grad():
            for name, tensor in tensors.items():
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
            if missing:
                raise InvalidField(
                    missing[0], f"missing, with {counted(len(missing) - 1, 'other')}", "a tensor in some bucket"
                )
        self.incomplete = True
        self.write(tensors)
        self._seen = seen
        if last:
            self.version, self.incomplete, self._pending_version = version, False, None


def _weight_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    file = directory / "model.safetensors"
    if not file.is_file():
        raise MissingFile(f"model_path: {directory} has no model.safetensors", field="model_path", value=str(directory))
    return [file]
