"""Reads pickles of torch_dist checkpoints with an allow-list: only classes named here are imported.

A `.metadata` may hold data about tensors; a `common.pt` plain data, and enums and settings of Megatron. Their classes
become `StandIn`s: reading them needs no megatron-core, runs none of its code, and does not import torch's checkpoint
package, which takes seconds.
"""

from __future__ import annotations

import argparse
import io
import pickle
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from slime.types.errors import InvalidFile


class StandIn:
    """An object of a class that is not imported: its attributes, or its `state` if that is not a dict.

    `kind`: the class's qualified name; `arguments`: the constructor's.
    """

    kind = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state

    def __repr__(self) -> str:
        return f"{self.kind}({', '.join(map(repr, self.__dict__.get('arguments', ())))})"


def _member(kind: Any, name: str) -> StandIn:
    """Returns the stand-in of an enum's member, which Python 3.11.2, Debian 12's, pickles as `getattr(KIND, NAME)`."""
    if not (isinstance(kind, type) and issubclass(kind, StandIn)):
        raise pickle.UnpicklingError(f"getattr of {kind!r}, expected an enum")
    return kind(name)


def _size(*values: Any) -> torch.Size:
    return torch.Size(*values)


_BUILTINS: dict[str, Any] = {
    f"builtins.{kind.__name__}": kind
    for kind in (set, frozenset, bytearray, complex, slice, range, int, float, bool, str, bytes, list, dict, tuple)
}
_PLAIN: dict[str, Any] = {
    **_BUILTINS,
    "builtins.getattr": _member,
    "collections.OrderedDict": OrderedDict,
    "collections.defaultdict": defaultdict,
    "collections.deque": deque,
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": types.SimpleNamespace,
    "pathlib.PosixPath": PurePosixPath,
    "pathlib.PurePosixPath": PurePosixPath,
    "pathlib._local.PosixPath": PurePosixPath,
    "torch.Size": _size,
    "torch.device": torch.device,
    "torch.serialization._get_layout": torch.serialization._get_layout,
}
_METADATA = {
    f"torch.distributed.checkpoint.{name}"
    for name in (
        "metadata.Metadata",
        "metadata.MetadataIndex",
        "metadata.StorageMeta",
        "metadata.TensorProperties",
        "metadata.TensorStorageMetadata",
        "metadata.BytesStorageMetadata",
        "metadata.ChunkStorageMetadata",
        "metadata._MEM_FORMAT_ENCODING",
        "planner.SavePlan",
        "planner.WriteItem",
        "planner.WriteItemType",
        "planner.TensorWriteData",
        "filesystem._StorageInfo",
        "filesystem._StoragePrefix",
    )
}
# Megatron's settings in `common.pt`, which a converter does not need.
_STAND_INS = (
    "megatron.core.enums.",
    "megatron.core.transformer.enums.",
    "megatron.core.optimizer.",
    "megatron.core.rerun_state_machine.",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
    "megatron.training.",
    "slime.trainer.",
    "signal.Signals",
)
_NUMPY = {"numpy.dtype", "numpy.ndarray", "_codecs.encode"} | {
    f"numpy.{module}.multiarray.{name}" for module in ("core", "_core") for name in ("scalar", "_reconstruct")
}


def _stand_in(name: str) -> type[StandIn]:
    return type("StandIn", (StandIn,), {"kind": name})


def _rebuild_tensor(storage: Any, offset: int, size: Any, stride: Any, *rest: Any) -> StandIn:
    return _stand_in("torch.Tensor")(tuple(size))


_STORAGE_TYPES: dict[str, torch.dtype] = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


class AllowList(pickle.Unpickler):
    """An unpickler that raises InvalidFile naming any class that is not on its list."""

    def __init__(self, file: Any, source: str, extra: dict[str, Any] | None = None) -> None:
        super().__init__(file)
        self._source = source
        self._known = _PLAIN | (extra or {})

    def find_class(self, module: str, name: str) -> Any:
        # torch.save writes protocol 2, which uses Python 2's name of the module.
        full = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if full in self._known:
            return self._known[full]
        if module == "torch" and isinstance(getattr(torch, name, None), (torch.dtype, torch.layout)):
            return getattr(torch, name)
        if module in ("torch", "torch.storage") and name in _STORAGE_TYPES:
            return _STORAGE_TYPES[name]
        if full in _METADATA or full.startswith(_STAND_INS) or full in _NUMPY or module == "numpy.dtypes":
            return _stand_in(full)
        raise InvalidFile(
            f"{self._source}: refused to load {full}, which a checkpoint has no use for",
            field="path",
            value=full,
            expected="a torch_dist checkpoint that Megatron or slime-convert wrote",
        )


def loads(data: bytes, source: str, extra: dict[str, Any] | None = None) -> Any:
    """Reads a pickle. source: for the error. Raises InvalidFile for a refused class or a damaged pickle."""
    return _load(AllowList(io.BytesIO(data), source, extra), source)


def load_file(path: Path) -> Any:
    """Reads a pickle from a file, as `loads` does."""
    with path.open("rb") as file:
        return _load(AllowList(file, str(path)), str(path))


def loads_saved(data: bytes, source: str) -> Any:
    """Reads the `data.pkl` of a file of torch.save; its tensors become StandIns with their shapes."""
    extra: dict[str, Callable[..., Any]] = {
        "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
        "torch._utils._rebuild_tensor_v3": _rebuild_tensor,
        "torch._utils._rebuild_parameter": lambda tensor, *rest: tensor,
        "torch.storage.UntypedStorage": torch.uint8,  # type: ignore[dict-item]
    }
    unpickler = AllowList(io.BytesIO(data), source, extra)
    unpickler.persistent_load = lambda saved: None  # type: ignore[method-assign, assignment]
    return _load(unpickler, source)


def _load(unpickler: AllowList, source: str) -> Any:
    try:
        return unpickler.load()
    except InvalidFile:
        raise
    # A damaged pickle can raise any exception.
    except Exception as error:
        raise InvalidFile(f"{source}: damaged: {type(error).__name__}: {error}", field="path", value=source) from error
