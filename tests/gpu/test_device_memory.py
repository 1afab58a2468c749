"""Memory of a trainer that leaves a real GPU between steps, its optimizer's while other work goes on.

pytest tests/gpu/test_device_memory.py
"""

from __future__ import annotations

import functools

import pytest
import torch

from gpu_needs import make_samples, needs, write_qwen3
from slime.trainer.backends.base import TRAINING, WEIGHTS
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.device_memory import PARTS, DeviceMemory
from slime.trainer.step.step import TrainStep
from slime.types.clients import SampleSummary

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS)
STEPS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_qwen3(
        tmp_path_factory.mktemp("model"),
        hidden_size=1024, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, head_dim=128,
        intermediate_size=3072, vocab_size=64000, tie_word_embeddings=True, max_position_embeddings=2048,
    )  # fmt: skip


def train(model: str, *, away: bool, late: bool = False) -> tuple[list[float], list[torch.Tensor]]:
    """(gradient norms, bfloat16 weights of the last step)."""
    settings = TrainerSettings(
        hf_checkpoint=model, bf16=True, lr=1e-3, use_dynamic_batch_size=True, max_tokens_per_gpu=2048, compile=False
    )
    ranks = Ranks(0, 1, "", 1, "cuda")
    backend = build_backend(settings, ranks, torch.device("cuda", 0))
    memory = DeviceMemory(backend, enabled=away)
    step = TrainStep(settings, backend, ranks, before_update=memory.arrive)
    planner, norms, weights = Planner(settings), [], []
    for number in range(STEPS):
        batch = make_samples(number, 64000)
        plan = planner.plan(number, [SampleSummary.of(sample) for sample in batch])
        memory.need(*PARTS, late=late)
        norms.append(step.run(plan, functools.partial(map, batch.__getitem__))["train/grad_norm"])
        held = torch.cuda.memory_allocated()
        memory.release(TRAINING, late=late)
        # Overwrites what was in memory that is free.
        filler = torch.full((1 << 28,), 1e30, device="cuda")
        weights = [weight.cpu() for _, weight in backend.named_weights(dtype=torch.bfloat16)]
        del filler
        memory.release(WEIGHTS)
        if away:
            # Weights in bfloat16 and float32, gradients, two moments.
            assert held - torch.cuda.memory_allocated() > 17 * backend.num_parameters
    return norms, weights


@pytest.mark.parametrize("late", [False, True], ids=["at once", "beside other work"])
def test_steps_with_memory_away_in_between_are_the_same_steps(model: str, late: bool) -> None:
    expected, expected_weights = train(model, away=False)
    found, weights = train(model, away=True, late=late)
    # Kernels that add up in another order each time round otherwise.
    assert found == pytest.approx(expected, rel=1e-3)
    apart = sum(float((a.float() - b.float()).abs().sum()) for a, b in zip(weights, expected_weights, strict=True))
    assert apart < 0.02 * sum(float(a.float().abs().sum()) for a in expected_weights)
