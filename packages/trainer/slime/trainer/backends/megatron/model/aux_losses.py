"""Losses that a model adds by itself: those of routers, and that of multi-token-prediction layers.

Each is a sum over the tokens of a micro-batch, divided by the tokens of the update: together, a mean over the
micro-batches of the update, weighted by their tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker

from slime.trainer.backends.megatron.model.names import unwrapped
from slime.trainer.process.collective import Ranks

# Megatron's names of what its routers add, and those of our metrics.
_OF_ROUTERS = {
    "load_balancing_loss": "moe_aux_loss",
    "seq_load_balancing_loss": "moe_seq_aux_loss",
    "global_load_balancing_loss": "moe_global_aux_loss",
    "z_loss": "moe_z_loss",
}


def use_whole_rows(config: Any) -> None:
    """Makes the losses of routers weigh the same however a row is cut over ranks.

    A rank has a part of the row and of its loss. Where losses are sums over tokens, megatron-core 0.16 multiplies that
    part of the loss by the tokens in the rank's part of the row, so the sum of all parts is too small by a factor of
    the number of ranks.
    """
    ranks = _ranks_of_a_row()
    coefficients = config.moe_aux_loss_coeff
    if isinstance(coefficients, list):
        config.moe_aux_loss_coeff = [value * ranks for value in coefficients]
    else:
        config.moe_aux_loss_coeff = coefficients * ranks
    if config.moe_z_loss_coeff is not None:
        config.moe_z_loss_coeff *= ranks


def _ranks_of_a_row() -> int:
    return int(parallel_state.get_tensor_and_context_parallel_world_size())


def clear(chunks: Sequence[torch.nn.Module]) -> None:
    get_moe_layer_wise_logging_tracker().clear()
    for chunk in chunks:
        unwrapped(chunk).prediction_sums = None


def means(chunks: Sequence[torch.nn.Module], ranks: Ranks, micro_batches: int) -> dict[str, float]:
    """Returns means of the losses since `clear`, without coefficients: over routers and the micro-batches of all
    replicas, and over tokens for multi-token-prediction layers. Collective."""
    totals = ranks.add_numbers(_of_this_rank(chunks))
    metrics = {}
    if totals.get("mtp tokens"):
        metrics["mtp_loss"] = totals["mtp"] / totals["mtp tokens"]
    routers = totals.get("routers", 0.0)
    for name, metric in _OF_ROUTERS.items():
        if routers and name in totals:
            replicas = 1 if name == "global_load_balancing_loss" else parallel_state.get_data_parallel_world_size()
            # A rank has the mean over its part for the z-loss, and its part of the sum for the other losses.
            parts = _ranks_of_a_row() if name == "z_loss" else 1
            metrics[metric] = totals[name] / (routers * micro_batches * replicas * parts)
    return metrics


def _of_this_rank(chunks: Sequence[torch.nn.Module]) -> dict[str, float]:
    numbers: dict[str, float] = {}
    models = [unwrapped(chunk) for chunk in chunks]
    first_of_tensor = parallel_state.get_tensor_model_parallel_rank() == 0
    sums = [getattr(model, "prediction_sums", None) for model in models]
    for both in sums:
        if both is not None and first_of_tensor:
            for name, value in zip(("mtp", "mtp tokens"), both.tolist(), strict=True):
                numbers[name] = numbers.get(name, 0.0) + value
    if first_of_tensor and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0:
        numbers["routers"] = float(sum(isinstance(m, MoELayer) for model in models for m in model.modules()))
    for name, entry in get_moe_layer_wise_logging_tracker().items():
        numbers[name] = float(entry["values"].sum())
    return numbers
