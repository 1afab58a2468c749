"""The critic of the fsdp backend: a language model whose head gives one number for each token, and its optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.trainer.backends.base import Outputs
from slime.trainer.backends.fsdp import model as loading
from slime.trainer.backends.fsdp.backend import FsdpBackend
from slime.trainer.backends.fsdp.passes import Passes
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidFile


class ValuePasses(Passes):
    """Passes whose outputs are values."""

    def outputs(self, batch: PackedBatch, logits: Tensor, entropy: str) -> Outputs:
        values = batch.scatter(logits[:, 0].float())
        return Outputs(values.new_zeros(0), None, values=values)


class FsdpCritic(FsdpBackend):
    """`settings` are those of the policy; the learning rate, its warm-up and the weights are the critic's own."""

    name = "fsdp critic"
    # A critic is compared with nothing.
    _has_references = False
    # Its experts are its own.
    _replays_routing = False
    _passes_class = ValuePasses

    def __init__(
        self, settings: TrainerSettings, ranks: Ranks, device: torch.device, weights: str | None = None
    ) -> None:
        """weights: a critic's directory in place of --critic-load (of a checkpoint to resume from)."""
        super().__init__(settings.of_critic(), ranks, device, weights)

    def _load(self, weights: str | None) -> tuple[nn.Module, str]:
        from transformers import AutoConfig

        flag = "--load" if weights else "--critic-load" if self.settings.critic_load else "--hf-checkpoint"
        path = weights or self.settings.critic_load or self.settings.hf_checkpoint
        critic = load_critic(path, flag=flag, train_vision=self.settings.train_vision)
        if path != self.settings.hf_checkpoint:
            policy = AutoConfig.from_pretrained(self.settings.hf_checkpoint).get_text_config()
            loading.check_vocabulary(critic.config, policy.vocab_size, flag, path)
        return critic, flag

    def untrained_weights(self) -> list[str]:
        return []


def load_critic(path: str, *, flag: str, train_vision: bool | None = None) -> nn.Module:
    """Loads a language model with a head [1, hidden]: that of a critic's directory, zeros for any other model.

    With zeros every value is 0 until the first update. Raises as `load_model` does.
    """
    from transformers.utils import logging

    # transformers would warn that the files have another output layer, or none, which is expected here.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model: Any = loading.load_model(path, flag=flag, other_head=True, train_vision=train_vision)
    finally:
        logging.set_verbosity(verbosity)
    head = nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)
    name = next((name for name, module in model.named_modules() if module is model.get_output_embeddings()), None)
    if name is None:
        raise InvalidFile(f"{flag}: {path} has no output layer to put a value head in place of", field=flag, value=path)
    saved = SafetensorsDir(Path(path))
    if f"{name}.weight" in saved.tensors:
        weight = saved.load(f"{name}.weight")
        if weight.shape == head.weight.shape:
            head.weight.data.copy_(weight)
    model.set_output_embeddings(head)
    return model.eval()
