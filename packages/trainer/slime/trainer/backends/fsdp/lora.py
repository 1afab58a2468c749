"""LoRA: frozen linear layers with trained updates of low rank, W + (alpha / r) B A (Hu et al., arXiv:2106.09685).

    r  rank        n  inputs of a layer        m  its outputs

A layer keeps its place and its weight's name, so that everything that knows the model by names and shapes goes on as it
is; beside them are `lora_A.weight` [r, n] and `lora_B.weight` [m, r], the names of the library peft. Experts that
transformers holds in one tensor are no linear layers, and stay as they are.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slime.converters.convert.hf_source import HfSource
from slime.trainer.backends.fsdp.model import decoder_layers
from slime.trainer.backends.fsdp.names import disk_parts
from slime.trainer.backends.snapshots import local
from slime.trainer.checkpoints.adapter import AdapterConfig
from slime.trainer.checkpoints.hf_directory import NamedTensors
from slime.trainer.settings.adapters import check_rank, refuse_quantized_base
from slime.trainer.settings.checks import ALL_LINEAR
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.models.experts import experts_of

log = logging.getLogger(__name__)


class LoraLinear(nn.Linear):
    """A linear layer with the weight and bias of `linear`, and an update that is 0 at first."""

    def __init__(self, linear: nn.Linear, rank: int, scale: float, generator: torch.Generator) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = linear.in_features, linear.out_features, scale
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_A = nn.Linear(self.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5), generator=generator)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, input: Tensor) -> Tensor:
        update: Tensor = self.lora_B(self.lora_A(input))
        return super().forward(input) + self.scale * update


class ModelTensors(NamedTuple):
    """The tensors of a model with adapters, this rank's part of each, and functions that make them whole. updates: A
    and B. whole: gets a name, a tensor and a dtype, or None. in_files: gives the tensors that files have for one.
    together: raises on every rank what its argument raises on one."""

    weights: NamedTensors
    updates: Mapping[str, Tensor]
    whole: Callable[[str, Tensor, torch.dtype | None], Tensor]
    in_files: Callable[[str, Tensor], Iterable[tuple[str, Tensor]]]
    together: Callable[[Callable[[], None]], None]


class _BaseFiles:
    """The frozen weights as their files have them. directory: None to take none from there.

    A rank that cannot read has to go on with the collective calls of the others: `check` raises the error, at the end.
    """

    def __init__(self, directory: str | None) -> None:
        self._source: HfSource | None = None
        self._error: Exception | None = None
        if directory is not None:
            try:
                self._source = HfSource(directory, json.loads((Path(directory) / "config.json").read_text()))
            except Exception as error:  # for `check`
                self._error = error

    def __enter__(self) -> _BaseFiles:
        return self

    def __exit__(self, *error: object) -> None:
        if self._source is not None:
            self._source.close()

    def check(self) -> None:
        """Raises the first error of reading."""
        if self._error is not None:
            raise self._error

    def exact(self, name: str, tensor: Tensor) -> Tensor:
        """Returns the tensor, or the one in the files if it was rounded to bfloat16."""
        if self._source is None or self._error is not None or tensor.dtype != torch.bfloat16:
            return tensor
        try:
            return self._read(self._source, name, tensor)
        except Exception as error:  # for `check`
            self._error = error
            return tensor

    @staticmethod
    def _read(source: HfSource, name: str, tensor: Tensor) -> Tensor:
        if name not in source.weights.tensors:
            log.warning("%s is written in bfloat16, as it is computed with: %s has none of its name", name, source.path)
            return tensor
        return tensor if source.dtype(name) == torch.bfloat16 else source.load(name).to(tensor.device)


class Adapters:
    """The updates of a model's layers. layers: by name of the module. config: as peft describes them. names: of the
    parameters, each with the name that belongs to the names in the model's files."""

    def __init__(self, layers: Mapping[str, LoraLinear], config: AdapterConfig, in_files: Mapping[str, str]) -> None:
        """in_files: names of the layers in the model's files."""
        self.layers = layers
        self.config = config
        self.names = {
            f"{name}.{part}.weight": f"{in_files[name]}.{part}.weight"
            for name in layers
            for part in ("lora_A", "lora_B")
        }

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of everything that trains."""
        return [part for layer in self.layers.values() for part in (layer.lora_A, layer.lora_B)]

    def parts_of(self, name: str) -> tuple[str, str] | None:
        """Returns the names of A and B for the weight `name`; None if it has no update."""
        layer = name.removesuffix(".weight")
        return (f"{layer}.lora_A.weight", f"{layer}.lora_B.weight") if layer in self.layers else None

    def merged(self, base: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """[m, n], [r, n], [m, r] -> W + (alpha / r) B A, float32 [m, n], computed in float32."""
        return torch.addmm(base.float(), b.float(), a.float(), alpha=self.config.scale)

    def named_weights(self, model: ModelTensors, dtype: torch.dtype | None, base: str | None) -> NamedTensors:
        """Yields every weight as the files have it, merged; the others as they are. base: directory of the frozen
        weights, to read those from it that the model holds rounded to bfloat16."""
        with _BaseFiles(base) as files:
            for name, tensor in model.weights:
                parts = self.parts_of(name)
                if parts is None:
                    for named in model.in_files(name, model.whole(name, tensor, dtype)):
                        yield named[0], files.exact(*named)
                    continue
                frozen = model.whole(name, tensor, None)
                in_files = list(model.in_files(name, frozen))
                if len(in_files) == 1:
                    frozen = files.exact(*in_files[0])
                # Rounded to `dtype` before they are multiplied, as the model has them.
                a, b = (model.whole(part, model.updates[part], dtype) for part in parts)
                merged = self.merged(frozen, a, b)
                yield from model.in_files(name, merged if dtype is None else merged.to(dtype))
            model.together(files.check)

    @contextmanager
    @torch.no_grad()
    def switched_off(self) -> Iterator[None]:
        """Makes the model the base model inside the block. No parameter may be gathered when it begins or ends."""
        weights = [local(layer.lora_B.weight.detach()) for layer in self.layers.values()]
        kept = [weight.clone() for weight in weights]
        torch._foreach_zero_(weights)
        try:
            yield
        finally:
            torch._foreach_copy_(weights, kept)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Sets the updates, by the names of their parameters; before the model is sharded."""
        for name, layer in self.layers.items():
            layer.lora_A.weight.copy_(tensors[f"{name}.lora_A.weight"])
            layer.lora_B.weight.copy_(tensors[f"{name}.lora_B.weight"])


def add_adapters(model: Any, settings: TrainerSettings, renamed: Container[str] = ()) -> Adapters:
    """Freezes a model and gives its layers updates, the same on every rank. Raises InvalidSetting, NotAvailable.

    renamed: tensors that have other names in the model's files.
    """
    base, rank, alpha = settings.hf_checkpoint, settings.lora_rank, settings.lora_alpha
    refuse_quantized_base(json.loads((Path(base) / "config.json").read_text()), rank)
    check_rank(rank, model.config.to_dict())
    layers = target_layers(model, settings.lora_target_modules)
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(settings.seed)
    adapted = {name: LoraLinear(linear, rank, alpha / rank, generator) for name, linear in layers.items()}
    for name, layer in adapted.items():
        model.set_submodule(name, layer)
    if experts_of(model.config.to_dict()) is not None:
        log.warning("LoRA trains no experts of this model, but its other linear layers: %s", ", ".join(_ends(adapted)))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log.info(
        "LoRA trains %s numbers in %s layers, beside %s that are frozen",
        f"{trained:,}",
        len(adapted),
        f"{sum(p.numel() for p in model.parameters()) - trained:,}",
    )
    in_files = {name: _in_files(model, name, renamed) for name in adapted}
    targets = tuple(sorted({in_files.get(name, name) for name in _described(model, adapted)}))
    return Adapters(adapted, AdapterConfig(base, rank, alpha, targets), in_files)


def _in_files(model: nn.Module, layer: str, renamed: Container[str]) -> str:
    """Returns the name of a layer in the model's files: that of the class that the files are of, where it is trained as
    a part of it. Engines and peft load that class."""
    weight = f"{layer}.weight"
    if weight not in renamed:
        return layer
    parts = disk_parts(model, weight, torch.empty(0, device="meta"))
    return next(iter(parts)).removesuffix(".weight") if len(parts) == 1 else layer


def target_layers(model: Any, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """Returns linear layers by name: all of the decoder for "all-linear", and those whose names end like a target,
    among which the output layer may be.

    Raises InvalidSetting for a name without a layer, NotAvailable for an output layer that is the embedding.
    """
    names = {module: name for name, module in model.named_modules()}
    inner = [m for layer in decoder_layers(model) for m in layer.modules() if isinstance(m, nn.Linear)]
    head = model.get_output_embeddings()
    possible = {names[module]: module for module in (*inner, head) if isinstance(module, nn.Linear)}
    found: dict[str, nn.Linear] = {}
    for target in targets:
        ending = {name: module for name, module in possible.items() if f".{name}".endswith(f".{target}")}
        if target == ALL_LINEAR:
            ending = {names[module]: module for module in inner}
        if not ending:
            raise InvalidSetting.must_be(
                "--lora-target-modules",
                f"{ALL_LINEAR}, or names of linear layers, separated by spaces: {' '.join(_ends(possible))}",
                got=target,
            )  # fmt: skip
        found |= ending
    if head in found.values() and is_tied(model):
        raise NotAvailable.unavailable(
            f"--lora-target-modules {names[head]} for this model",
            "its output layer shares its weights with the embedding",
        )
    return {name: module for name, module in possible.items() if name in found}


def is_tied(model: Any) -> bool:
    """Tells whether the output layer has the weight of the embedding."""
    return model.get_output_embeddings().weight is model.get_input_embeddings().weight


def _ends(names: Mapping[str, Any]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _described(model: nn.Module, adapted: Mapping[str, Any]) -> list[str]:
    """Returns the shortest names by which peft finds these layers and no others."""
    ends = _ends(adapted)
    meant = {name for name, module in model.named_modules() if name.rpartition(".")[2] in ends}
    return ends if meant == set(adapted) else sorted(adapted)
