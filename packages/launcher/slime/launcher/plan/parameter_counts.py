"""Counts the parameters of a model and of each trainer rank from config.json, without weights or Megatron."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.converters.families import find_family
from slime.converters.families.mapping import Parameter
from slime.converters.megatron.args import padded_vocab_size
from slime.converters.megatron.rank_layout import Sizes, layers_of_stages
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidFile, NotAvailable
from slime.types.models.experts import experts_of
from slime.types.models.vision import trained_vision

Config = Mapping[str, Any]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def whole_model(config: Config, *, mtp: bool = False) -> int:
    """Counts the parameters of a model of a known family, without padding; a tied output layer counts once.

    mtp: whether to count the layers for multi-token prediction. Raises NotAvailable for an unknown family, InvalidFile.
    """
    return sum(math.prod(parameter.shape) for parameter in _trained(config, mtp=mtp))


def by_transformers(directory: str | Path) -> int:
    """Counts the parameters of any model that transformers can build, without allocating them. Raises InvalidFile."""
    return sum(parameter.numel() for parameter in _unallocated(directory).parameters())


def of_adapters(directory: str | Path, settings: TrainerSettings) -> int:
    """Counts the parameters that train with --lora-rank.

    Raises InvalidFile, InvalidSetting or NotAvailable for --lora-target-modules that the model does not have.
    """
    from slime.trainer.backends.fsdp.lora import target_layers

    model = _unallocated(directory, settings.train_vision)
    layers = target_layers(model, settings.lora_target_modules).values()
    return settings.lora_rank * sum(layer.in_features + layer.out_features for layer in layers)


def adapters_in_words(settings: TrainerSettings, config: Config, adapters: int, parameters: int) -> str:
    """Describes the adapters of --lora-rank in a line. config: that of the model, with `parameters` parameters."""
    text = (
        f"rank {settings.lora_rank}, alpha {settings.lora_alpha:g}, {' '.join(settings.lora_target_modules)}: "
        f"{adapters:,} parameters train, {adapters / parameters:.2%} of the model's"
    )
    # transformers holds experts in one tensor, which is no linear layer.
    return text if experts_of(config) is None else f"{text}; experts get no adapters"


def _unallocated(directory: str | Path, train_vision: bool | None = None) -> Any:
    """Builds a model on the meta device. Raises InvalidFile."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            vision = trained_vision(config.to_dict(), train_vision)
            return (AutoModelForCausalLM if vision is None else AutoModelForImageTextToText).from_config(config)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        raise InvalidFile(
            f"{directory}: transformers makes no model of its config.json: {error}",
            field="config.json",
            value=str(directory),
        ) from None


def of_directory(directory: str | Path, config: Config) -> int:
    """Counts the parameters of the model in a Hugging Face directory, by its family's table or else with transformers.

    Raises InvalidFile for a config that does not describe a model.
    """
    try:
        return whole_model(config)
    except NotAvailable:
        return by_transformers(directory)
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidFile(
            f"{directory}: config.json describes no model: {error}", field="config.json", value=str(directory)
        ) from None


@dataclass(frozen=True)
class Held:
    """Parameters on one rank. dense: all but the routed experts, which are replicated over another group of ranks."""

    dense: int
    experts: int

    @property
    def total(self) -> int:
        return self.dense + self.experts


def of_stages(config: Config, args: Mapping[str, Any], sizes: Sizes) -> list[Held]:
    """Counts the parameters on a rank of each pipeline stage; ranks of one stage hold equally many.

    args: Megatron's arguments of the model, with `mtp_num_layers` if those layers are built.
    """
    stages = layers_of_stages(args, sizes)
    where = {layer: stage for stage, chunks in enumerate(stages) for layers in chunks for layer in layers}
    dense, experts = [0] * sizes.pipeline, [0] * sizes.pipeline
    tied = bool(config.get("tie_word_embeddings"))
    mtp = bool(args.get("mtp_num_layers"))
    rows = padded_vocab_size(args)
    for parameter in _trained(config, mtp=mtp):
        for stage in _stages_of(parameter, where, sizes.pipeline, copied=tied or mtp):
            if parameter.is_expert:
                match = _EXPERT.search(parameter.name)
                assert match is not None
                # Ranks share experts evenly, so that rank 0 of the expert group stands for all.
                if int(match[1]) < int(args["num_experts"]) // sizes.expert:
                    experts[stage] += math.prod(parameter.local_shape(sizes.expert_tensor))
            else:
                dense[stage] += math.prod(parameter.local_shape(sizes.tensor, rows))
    return [Held(*counts) for counts in zip(dense, experts, strict=True)]


def _stages_of(parameter: Parameter, where: Mapping[int, int], stages: int, *, copied: bool) -> list[int]:
    """Returns the stages that hold a parameter.

    copied: whether the last stage also holds the embedding, as output layer or for multi-token prediction.
    """
    layer = _LAYER.match(parameter.name)
    if layer is not None:
        return [where[int(layer[1])]]
    if parameter.name.startswith("embedding."):
        return [0, stages - 1] if copied and stages > 1 else [0]
    if parameter.name.startswith("visual."):
        return [0]
    return [stages - 1]


def _trained(config: Config, *, mtp: bool) -> Iterator[Parameter]:
    """Yields all parameters except the biases of expert routers: those get no gradient, and are buffers in both
    libraries."""
    if not mtp:
        config = {**config, "num_nextn_predict_layers": 0, "num_mtp_layers": 0}
    for parameter in find_family(config).parameters(config):
        if not parameter.name.endswith(".expert_bias"):
            yield parameter
