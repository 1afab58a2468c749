"""Rows replayed as CUDA graphs train as the same rows without torch.compile.

pytest tests/gpu/test_row_graphs.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from gpu_needs import needs
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.plan import Planner
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step.step import TrainStep
from slime.types import Sample
from slime.types.clients import SampleSummary

NUM_GPUS = 1

pytestmark = needs(NUM_GPUS)


def write_model(path: Path) -> str:
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def make_samples(step: int, shared: bool) -> list[Sample]:
    """Groups of 4. shared: with one prompt each."""
    random = np.random.default_rng(step)
    if shared:
        prompts = random.integers(3, 512, (6, 90))
        return [
            Sample(
                index=i, group_index=i // 4, response_length=int(n), reward=float(i % 3),
                tokens=np.concatenate([prompts[i // 4], random.integers(3, 512, n)]).astype(np.int32),
            )
            for i, n in enumerate(random.integers(1, 60, 24))
        ]  # fmt: skip
    lengths = random.integers(16, 200, 24)
    return [
        Sample(
            index=i, group_index=i // 4, tokens=random.integers(3, 512, n).astype(np.int32),
            response_length=int(n) // 2, reward=float(i % 3),
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "shared"),
    [({}, False), ({"entropy_coef": 0.01}, False), ({"offload_train": True}, False), ({}, True)],
    ids=["plain", "entropy", "away", "shared"],
)
def test_replayed_rows_train_as_eager_ones(tmp_path: Path, values: dict[str, object], shared: bool):
    model = write_model(tmp_path)
    found = {}
    for compiled in (False, True):
        settings = TrainerSettings(
            hf_checkpoint=model, bf16=True, compile=compiled, lr=1e-4, use_dynamic_batch_size=True,
            max_tokens_per_gpu=1024, **values,
        )  # type: ignore[arg-type]  # fmt: skip
        ranks = Ranks(0, 1, "", 1, "cuda")
        backend = build_backend(settings, ranks, torch.device("cuda"))
        step, metrics = TrainStep(settings, backend, ranks), []
        for number in range(4):
            samples = make_samples(number, shared)
            plan = Planner(settings).plan(number, [SampleSummary.of(sample) for sample in samples])
            metrics.append(step.run(plan, lambda positions, samples=samples: (samples[p] for p in positions)))
        if compiled:
            assert not backend._compiler.failed
            assert backend._passes.rows.num_graphs > 0 or "offload_train" in values
            assert backend._passes.rows.num_graphs == 0 or "offload_train" not in values
        found[compiled] = metrics, dict(backend.named_weights())
    for before, after in zip(found[False][0], found[True][0], strict=True):
        assert after["train/grad_norm"] == pytest.approx(before["train/grad_norm"], rel=2e-2)
        assert after["train/entropy_loss"] == pytest.approx(before["train/entropy_loss"], rel=1e-3)
        assert after["train/loss"] == pytest.approx(before["train/loss"], abs=2e-3)
    for name, weight in found[False][1].items():
        assert (found[True][1][name] - weight).abs().mean() < 1e-4, name
