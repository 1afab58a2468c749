"""The Megatron backend with its optimizer in host memory, on a real GPU: the same training, and the memory is free.

    pytest tests/gpu/test_optimizer_offload.py

Checkpoints and flags: packages/trainer/tests/backends/megatron/test_trainer_optimizer_offload.py, which runs on a GPU
too.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gpu_needs import make_samples, needs, write_qwen3
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.types.clients import SampleSummary

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS)
DISTRIBUTED = {"use_distributed_optimizer": True}
OFFLOAD: dict[str, Any] = DISTRIBUTED | {
    "use_precision_aware_optimizer": True, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0,
}  # fmt: skip
CASES = {
    "offloaded": OFFLOAD,
    "overlapped": OFFLOAD | {"overlap_cpu_optimizer_d2h_h2d": True},
    "half": OFFLOAD | {"optimizer_offload_fraction": 0.5},
}
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_qwen3(
        tmp_path_factory.mktemp("model"),
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
        intermediate_size=1536, vocab_size=32000, tie_word_embeddings=False, max_position_embeddings=2048,
    )  # fmt: skip


def train(model: str, megatron: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    """(gradient norms, weights, bytes of GPU memory held between steps, parameters)."""
    from slime.trainer.backends.megatron.model import parallel

    settings = TrainerSettings(
        hf_checkpoint=model, train_backend="megatron", bf16=True, lr=1e-3, use_dynamic_batch_size=True,
        max_tokens_per_gpu=2048,
    )  # fmt: skip
    ranks = Ranks(0, 1, "", 10, "cuda")
    backend = build_backend(settings, ranks, torch.device("cuda", 0), megatron=megatron)
    step, planner, norms = TrainStep(settings, backend, ranks), Planner(settings), []
    for number in range(STEPS):
        batch = make_samples(number, 32000, rollout_log_probs=np.full(192, -10.0, np.float32))
        plan = planner.plan(number, [SampleSummary.of(sample) for sample in batch])
        norms.append(step.run(plan, functools.partial(map, batch.__getitem__))["train/grad_norm"])
    torch.cuda.synchronize()
    gc.collect()
    held = torch.cuda.memory_allocated()
    weights = {name: tensor.to("cpu", copy=True) for name, tensor in backend.named_weights()}
    parameters = backend.num_parameters
    parallel.destroy()
    del backend, step
    gc.collect()
    torch.cuda.empty_cache()
    return norms, weights, held, parameters


@pytest.fixture(scope="module")
def on_the_gpu(model: str) -> tuple[list[float], dict[str, torch.Tensor], int, int]:
    return train(model, DISTRIBUTED)


@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_in_host_memory_trains_alike_and_leaves_the_gpu(
    model: str, on_the_gpu: tuple[list[float], dict[str, torch.Tensor], int, int], case: str
) -> None:
    expected, expected_weights, expected_held, parameters = on_the_gpu
    norms, weights, held, _ = train(model, CASES[case])
    assert norms == pytest.approx(expected, rel=0.02)
    # Where a gradient is next to nothing, AdamW steps by the learning rate one way or the other.
    start = load_file(Path(model) / "model.safetensors")
    moved = sum(float((expected_weights[name].float() - start[name].float()).abs().sum()) for name in weights)
    apart = sum(
        float((weight.float() - expected_weights[name].float()).abs().sum()) for name, weight in weights.items()
    )
    print(f"{case}: apart by {apart / moved:.4f} of how far the weights moved")
    assert moved > 0 and apart < 0.05 * moved
    # Float32 weights and two moments.
    kept = 12 * parameters * CASES[case]["optimizer_offload_fraction"]
    print(f"{case}: {parameters:,} parameters, {held / 2**20:,.0f} MiB held, {expected_held / 2**20:,.0f} without")
    assert expected_held - held > 0.9 * kept
