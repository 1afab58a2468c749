"""The critic of the Megatron backend: a model of the policy's shapes with a value head, and its optimizer."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from slime.trainer.backends.base import Outputs
from slime.trainer.backends.megatron.backend import MegatronBackend
from slime.trainer.backends.megatron.hooks import Hooks
from slime.trainer.backends.megatron.model.forward import Pipeline
from slime.trainer.backends.megatron.model.row import RankRow
from slime.trainer.backends.megatron.weights import hf, initial
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidFile


class ValueHead(nn.Module):
    """[1, hidden], a copy on every tensor-parallel rank. Each computes it from the same states, gathered before, so its
    gradient is whole on each."""

    # PolicyModel sets it, as of an output layer.
    sequence_parallel = False

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(self.weight)

    def forward(self, hidden: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        """[j, 1, hidden] -> [j, 1, 1], and no bias."""
        return nn.functional.linear(hidden, self.weight), None


class ValuePipeline(Pipeline):
    """Runs micro-batches through a model whose outputs are values."""

    def _outputs(self, batch: PackedBatch, row: RankRow, logits: Tensor, entropy: str) -> Outputs:
        # A rank that predicts nothing has one row, which `_gather` leaves out.
        values = self._gather(batch, row, logits[:, 0].float())
        return Outputs(values.new_zeros(0), None, values=values)

    def _numbers(self, outputs: Outputs) -> list[Tensor]:
        assert outputs.values is not None
        return [outputs.values]

    def _of_numbers(self, numbers: Tensor) -> Outputs:
        return Outputs(numbers.new_zeros(0), None, values=numbers[0])


class MegatronCritic(MegatronBackend):
    """`settings` are those of the policy; the learning rate, its warm-up and the weights are the critic's own.

    policy: whose arguments and process groups are the critic's too.
    """

    name = "megatron critic"
    # A critic is compared with nothing.
    _has_references = False
    # Its experts are its own.
    _replays_routing = False
    _pipeline_class = ValuePipeline

    def __init__(self, settings: TrainerSettings, policy: MegatronBackend, weights: str | None = None) -> None:
        """weights: a critic's directory in place of --critic-load (of a checkpoint to resume from).

        Raises InvalidFile naming the flag where the weights are of another model than the policy's.
        """
        settings = settings.of_critic()
        args = {name: value for name, value in policy.args.items() if name != "mtp_num_layers"}
        args["untie_embeddings_and_output_weights"] = True
        config = hf.config_of_critic(policy.config)
        super().__init__(settings, policy.ranks, policy.device, args, config, weights, Hooks(settings))

    def _initialize(self) -> None:
        """Leaves the policy's process groups as they are."""

    def _build(self) -> list[torch.nn.Module]:
        chunks: list[Any] = super()._build()
        for chunk in chunks:
            if chunk.post_process:
                chunk.output_layer = ValueHead(self.transformer.hidden_size, self.transformer.params_dtype)
        return chunks

    def _load(self, chunks: list[torch.nn.Module], weights_from: str | None) -> None:
        flag = "--load" if weights_from else "--critic-load" if self.settings.critic_load else "--hf-checkpoint"
        path = weights_from or self.settings.critic_load or self.settings.hf_checkpoint
        try:
            initial.load(chunks, self.args, self.config, path, flag=flag)
        except InvalidFile as error:
            text = str(error).removeprefix(f"{flag}: ")
            raise InvalidFile(
                f"{flag}: {text}; a critic of --train-backend megatron has the shapes of --hf-checkpoint",
                field=flag,
                value=path,
            ) from error
