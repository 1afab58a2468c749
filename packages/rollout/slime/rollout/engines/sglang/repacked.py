"""Layers whose weights SGLang repacks once, after it has loaded them: lets them be loaded and repacked again.

A layer in INT4 (compressed-tensors' `pack-quantized`) is loaded as the checkpoint has it. SGLang then lays its weights
and scales out for a kernel (Marlin), in parameters that have other shapes and no loader. Here

- loading one of its tensors again gives the layer's memory the shapes of the checkpoint back: nothing is allocated;
- at the end of an update `repack_all` has SGLang repack such layers, and copies the result into the memory that the
  kernel's parameters have had since the start, because CUDA graphs hold its addresses.

A layer of which only some tensors came is an error, because the others are lost when it is opened. In between, the
layer cannot compute; an engine serves nothing during an update.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slime.types.errors import counted

# Attribute of a layer: its RepackedLayer.
ATTRIBUTE = "slime_repacked"
# Attributes of a layer that keep SGLang from repacking it a second time.
DONE_FLAGS = ("is_marlin_converted", "is_triton_converted")
SHOWN = 5

# A call of a parameter's loader: the parameter's name, and which part of it is loaded.
Part = tuple[str, ...]
Repack = Callable[[Any, nn.Module], None]

_lock = threading.Lock()
# In the order in which they were opened.
_open: dict[RepackedLayer, None] = {}


@dataclass
class _Loaded:
    """A parameter as it is loaded, and as the kernel uses it. values: the kernel's tensor, in the same memory."""

    parameter: nn.Parameter
    shape: torch.Size
    dtype: torch.dtype
    attributes: dict[str, Any]
    kernel: nn.Parameter = field(init=False)
    values: Tensor = field(init=False)


class RepackedLayer:
    """A layer, between the creation of its parameters and its end. scheme: SGLang's object that creates and repacks
    them."""

    def __init__(self, scheme: Any, layer: nn.Module) -> None:
        self._scheme = scheme
        self._layer = layer
        self._loaders: dict[str, Callable[..., Any]] = {}
        self._loaded: dict[str, _Loaded] = {}
        # Parts that were loaded before the layer was repacked first, and since it was opened.
        self._needed: set[Part] = set()
        self._found: set[Part] = set()
        self._repacked = False
        for name, parameter in layer.named_parameters(recurse=False):
            loader = getattr(parameter, "weight_loader", None)
            if loader is not None:
                self._loaders[name] = _watched(self, name, parameter, loader)
                _set_loader(parameter, self._loaders[name])

    def will_load(self, part: Part) -> None:
        """Notes that a part is loaded next; opens the layer if it is repacked. Loaders may run in several threads."""
        with _lock:
            if not self._repacked:
                self._needed.add(part)
                return
            if part[0] not in self._loaded:
                raise RuntimeError(
                    f"a weight update brings {part[0]} of {type(self._layer).__name__}, which this engine did not load "
                    "from a checkpoint (--sglang-load-format dummy?) or cannot load again"
                )
            if self not in _open:
                _open[self] = None
                self._found = set()
                for loaded in self._loaded.values():
                    loaded.parameter.data = _viewed(loaded.values, loaded.dtype, loaded.shape)
                    vars(loaded.parameter).update(loaded.attributes)
            self._found.add(part)

    def process(self, repack: Repack) -> None:
        """Repacks the layer by SGLang's `repack(scheme, layer)`, unless it is repacked and nothing was loaded since.

        Raises RuntimeError naming tensors that were not loaded again.
        """
        if not self._repacked:
            self._repack_first(repack)
        elif self in _open:
            self._repack_again()

    def _repack_first(self, repack: Repack) -> None:
        self._repack = repack
        parameters = dict(self._layer.named_parameters(recurse=False))
        before = {
            name: _Loaded(loaded, loaded.shape, loaded.dtype, dict(vars(loaded)))
            for name, loaded in parameters.items()
            if any(part[0] == name for part in self._needed)
        }
        num_bytes = {name: loaded.parameter.nbytes for name, loaded in before.items()}
        repack(self._scheme, self._layer)
        for name, loaded in before.items():
            loaded.kernel = self._layer.get_parameter(name)
            loaded.values = loaded.kernel.data
            if loaded.values.is_contiguous() and loaded.values.nbytes == num_bytes[name]:
                self._loaded[name] = loaded
                loaded.parameter.data = loaded.values
        for name, parameter in self._layer.named_parameters(recurse=False):
            if name in self._loaders:
                _set_loader(parameter, self._loaders[name])
            if name not in before:
                # No checkpoint fills it, so SGLang's checksums of weights leave it out.
                parameter._skip_weight_check = True  # type: ignore[attr-defined]
        self._repacked = True

    def _repack_again(self) -> None:
        missing = sorted(self._needed - self._found)
        if missing:
            shown = ", ".join(" ".join(part) for part in missing[:SHOWN])
            raise RuntimeError(
                f"a weight update lacks {counted(len(missing), 'tensor')} of a {type(self._layer).__name__}, of which "
                f"others came: {shown}{', ...' if len(missing) > SHOWN else ''}"
            )
        registered = self._layer._parameters
        holders: list[MutableMapping[str, Any]] = [registered, vars(self._layer), vars(self._scheme)]
        kept = [{k: v for k, v in holder.items() if isinstance(v, Tensor)} for holder in holders]
        for name, loaded in self._loaded.items():
            registered[name] = loaded.parameter
        for flag in DONE_FLAGS:
            if hasattr(self._layer, flag):
                setattr(self._layer, flag, False)
        # In-place changes of tensors are allowed only in the mode in which they were made.
        with torch.inference_mode(any(each.values.is_inference() for each in self._loaded.values())), torch.no_grad():
            self._repack(self._scheme, self._layer)
            for name, loaded in self._loaded.items():
                _copy(registered[name].data, loaded.values)
                loaded.kernel.data = loaded.parameter.data = loaded.values
            for holder, tensors in zip(holders, kept, strict=True):
                for name, tensor in tensors.items():
                    # Workspaces of kernels too: released memory that came back has no zeros in them.
                    if holder.get(name) is not tensor and name not in self._loaded:
                        _copy(holder[name].data, tensor.data)
                    holder[name] = tensor
        del _open[self]


def create_weights(create: Callable[..., None], scheme: Any, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
    """Creates the parameters of a layer in place of SGLang's `create`, and watches what is loaded into them."""
    create(scheme, layer, *args, **kwargs)
    setattr(layer, ATTRIBUTE, RepackedLayer(scheme, layer))


def process_weights(repack: Repack, scheme: Any, layer: nn.Module) -> None:
    """Repacks a layer in place of SGLang's `repack`, also if it has been repacked before."""
    watched: RepackedLayer | None = getattr(layer, ATTRIBUTE, None)
    if watched is None:
        repack(scheme, layer)
    else:
        watched.process(repack)


def update_weights(update: Callable[[Any, Any], Any], manager: Any, request: Any) -> Any:
    """Updates weights by SGLang's `update`, and repacks all layers that were loaded with the last part of an update, by
    which an engine is told its new version. Returns SGLang's answer, or a failure of its type."""
    answer = update(manager, request)
    if answer.success and request.weight_version is not None:
        try:
            repack_all()
        except RuntimeError as error:
            return type(answer)(success=False, message=str(error))
    return answer


def repack_all() -> None:
    """Repacks all layers of this process that were loaded since they were repacked. Raises RuntimeError."""
    for layer in list(_open):
        layer._repack_again()


def _watched(
    layer: RepackedLayer, name: str, parameter: nn.Parameter, loader: Callable[..., Any]
) -> Callable[..., Any]:
    def load(_: nn.Parameter, loaded: Tensor, *args: Any, **kwargs: Any) -> Any:
        layer.will_load((name, *map(str, args), *(f"{key}={value}" for key, value in sorted(kwargs.items()))))
        # The parameter that the model passes may be the kernel's.
        return loader(parameter, loaded, *args, **kwargs)

    return load


def _set_loader(parameter: nn.Parameter, loader: Callable[..., Any]) -> None:
    # A property of SGLang's own parameters returns this attribute.
    own = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
    setattr(parameter, own, loader)


def _viewed(values: Tensor, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return values.view(-1).view(torch.uint8).view(dtype).view(shape)


def _copy(source: Tensor, target: Tensor) -> None:
    """Copies the values, unless they lie in the memory of the target already."""
    if source.shape != target.shape or source.dtype != target.dtype:
        raise RuntimeError(
            f"a layer was repacked to {source.dtype} {list(source.shape)}, and before to {target.dtype} "
            f"{list(target.shape)}"
        )
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
