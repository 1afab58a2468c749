"""Tiny checkpoints of a family, what transformers makes of them, and the layouts in which our models are held to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tiny_families import transformers_config, write_tiny

LENGTHS = (16, 8, 12)
# Two stages of two virtual ones each.
LAYERS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "core_recomputed": {"recompute_activations": True},
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp": {"pipeline_model_parallel_size": 2},
    "vpp": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "cp": {"context_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
    "sp_ep": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}


ALONE = ("one", "recomputed", "core_recomputed")
# Pipelines are compared through the schedule, in the tests of the backend.
GRADIENT_LAYOUTS = tuple(name for name, sizes in LAYOUTS.items() if "pipeline_model_parallel_size" not in sizes)


def sequences(vocab_size: int) -> list[Tensor]:
    """Tokens of the sequences, [length] int64; without 0, which may be padding and then has no gradient."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, vocab_size, (length,), generator=generator) for length in LENGTHS]


def write(name: str, directory: Path) -> None:
    """`directory`/fp32 and bf16: the tiny model `name`; gradient: its gradients, as a checkpoint.

    reference.safetensors: logits [tokens, V] of the sequences one by one in float32, and weights [tokens, V]; the
    gradients are those of the sum of both multiplied.
    """
    from transformers import AutoModelForCausalLM, logging

    # Reports of the layers that it has no modules for.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    write_tiny(name, directory / "bf16", layers=LAYERS, dtype=torch.bfloat16)
    write_tiny(name, directory / "fp32", layers=LAYERS)
    config = transformers_config(name, layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(directory / "fp32", config=config, dtype=torch.float32).eval()
    logits = torch.cat([model(tokens[None]).logits[0] for tokens in sequences(config.vocab_size)])
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    (logits * weights).sum().backward()
    save_file({"logits": logits.detach(), "weights": weights}, directory / "reference.safetensors")
    with torch.no_grad():
        # Saving the gradients in place of the weights gives them the names and shapes of a checkpoint.
        for parameter in model.parameters():
            parameter.copy_(parameter.grad if parameter.grad is not None else torch.zeros_like(parameter))
    model.save_pretrained(directory / "gradient")
