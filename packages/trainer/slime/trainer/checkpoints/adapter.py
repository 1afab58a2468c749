"""Files of a LoRA adapter in the format of the library peft, which peft, vLLM and SGLang load.

adapter_config.json             rank, alpha, the layers
adapter_model.safetensors       float32, as "base_model.model.LAYER.lora_A.weight" and "... .lora_B.weight"
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from slime.converters.files.adapter import CONFIG_FILE, WEIGHTS_FILE
from slime.converters.files.safetensors_dir import write_file
from slime.trainer.checkpoints.hf_directory import NamedTensors, as_dtype
from slime.trainer.settings.adapters import PLAIN, check_adapter, hub_name
from slime.types.errors import InvalidFile, InvalidSetting

_PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """An adapter in words. base: directory of the model, which the file names as the Hub does if it is from there.
    targets: names of the layers, or what they end in."""

    base: str
    rank: int
    alpha: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def as_json(self) -> str:
        alpha = int(self.alpha) if float(self.alpha).is_integer() else self.alpha
        base, revision = hub_name(self.base) or (self.base, None)
        about = {
            "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "revision": revision,
            "r": self.rank,
            "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": list(self.targets), "inference_mode": True,
            "init_lora_weights": True, **PLAIN,
        }  # fmt: skip
        return json.dumps(about, indent=2, sort_keys=True) + "\n"


@dataclasses.dataclass(frozen=True)
class Adapter:
    """An adapter that is written. weights: by the names that fit those in the model's files, one at a time. elements:
    their number."""

    config: AdapterConfig
    weights: NamedTensors
    elements: int

    def write(self, directory: Path) -> None:
        """Writes both files into an existing directory. Raises OutOfSpace."""
        (directory / CONFIG_FILE).write_text(self.config.as_json())
        tensors = {_PREFIX + name: tensor for name, tensor in as_dtype(self.weights, torch.float32)}
        write_file(directory / WEIGHTS_FILE, tensors)


def read_adapter(
    path: str, config: AdapterConfig, shapes: Mapping[str, torch.Size], in_files: Mapping[str, str]
) -> dict[str, Tensor]:
    """Reads the tensors of an adapter by the names of its parameters. shapes: those of the model's adapter. in_files:
    their names as `Adapter` writes them; peft writes these, or those of the parameters, after the class of its model.

    Raises InvalidSetting where the directory holds another adapter than the settings describe, InvalidFile.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_adapter(path, config.rank, config.alpha)
    try:
        tensors = load_file(Path(path) / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise InvalidFile(f"--load: {path}: {WEIGHTS_FILE}: {error}", field="--load", value=path) from error
    own = {written: name for name, written in in_files.items()}
    plain = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    found = {own.get(name, name): tensor for name, tensor in plain.items()}
    if other := sorted(found.keys() ^ shapes.keys()):
        raise InvalidSetting.conflict(
            "--lora-target-modules", f"--load {path}",
            f"{'only' if other[0] in found else 'not'} that adapter has {other[0]}",
        )  # fmt: skip
    for name, shape in shapes.items():
        if found[name].shape != shape:
            raise InvalidFile(
                f"--load: {path}: {name} has shape {tuple(found[name].shape)}", field="--load", value=name,
                expected=str(tuple(shape)),
            )  # fmt: skip
    return found
