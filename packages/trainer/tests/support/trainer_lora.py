"""An adapter of known numbers, and the model that it makes of its base in float64."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trainer_float64 import load64

from slime.trainer.checkpoints.adapter import Adapter, AdapterConfig
from slime.trainer.settings.trainer import TrainerSettings

LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(path: Path, settings: TrainerSettings, *, ends: tuple[str, ...] = LAYERS, seed: int = 0) -> str:
    """Writes an adapter of random numbers for the layers of `settings.hf_checkpoint` whose names end in `ends`."""
    path.mkdir()
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in load64(settings.hf_checkpoint).named_modules():
        if name.rpartition(".")[2] in ends:
            m, n = module.weight.shape
            tensors[f"{name}.lora_A.weight"] = torch.randn(settings.lora_rank, n, generator=generator) / 4
            tensors[f"{name}.lora_B.weight"] = torch.randn(m, settings.lora_rank, generator=generator) / 16
    config = AdapterConfig(settings.hf_checkpoint, settings.lora_rank, settings.lora_alpha, ends)
    Adapter(config, iter(tensors.items()), 0).write(path)
    (path / "config.json").write_text((Path(settings.hf_checkpoint) / "config.json").read_text())
    return str(path)


class Lora64:
    """The model in float64 whose weights are W + scale B A. tensors: by the names of peft's files."""

    def __init__(self, model: str, tensors: dict[str, Tensor], scale: float) -> None:
        self.base = load64(model).requires_grad_(False)
        self.adapter = {
            name.removeprefix("base_model.model."): t.double().requires_grad_() for name, t in tensors.items()
        }
        self.scale = scale

    def weights(self) -> dict[str, Tensor]:
        found = dict(self.base.named_parameters())
        for name, a in self.adapter.items():
            if name.endswith(".lora_A.weight"):
                layer = name.removesuffix(".lora_A.weight")
                update = self.adapter[f"{layer}.lora_B.weight"] @ a
                found[f"{layer}.weight"] = found[f"{layer}.weight"] + self.scale * update
        return found

    def __call__(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self.base, self.weights(), kwargs=inputs)
