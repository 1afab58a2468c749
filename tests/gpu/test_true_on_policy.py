"""--true-on-policy-mode with a real SGLang engine: the trainer's log-probs are the engine's, bit for bit.

    pytest tests/gpu/test_true_on_policy.py

Models are small, with random weights.
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gpu_needs import needs, train_on_words, write_words
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.trainer.backends.base import Outputs
from slime.trainer.backends.fsdp.backend import FsdpBackend
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample

NUM_GPUS = 1

START_SECONDS = 400
WORDS, TOKENS, GROUP = 2048, 300, 4
SHAPE: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
    num_key_value_heads=4, head_dim=128, max_position_embeddings=2048, initializer_range=0.05, pad_token_id=0,
    eos_token_id=1, bos_token_id=None,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"llama": {"tie_word_embeddings": True}, "qwen3": {"rope_theta": 1000000.0}}
pytestmark = needs(NUM_GPUS, "sglang")


def write_model(path: Path, family: str) -> str:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE, **FAMILIES[family]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # Norms that differ, as trained ones do.
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.to(torch.bfloat16).save_pretrained(path)
    write_words(path, WORDS)
    return str(path)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def samples(model: str) -> list[Sample]:
    options = SGLangOptions(
        model_path=model, gpus=visible_gpus()[:NUM_GPUS], random_seed=1, deterministic=True,
        args={"attention_backend": "fa3", "mem_fraction_static": 0.3, "max_total_tokens": 32768},
    )  # fmt: skip
    with start_sglang(options) as engine:
        return asyncio.run(generate(engine.wait_ready(START_SECONDS)))


async def generate(engine: EngineProcess) -> list[Sample]:
    random = np.random.default_rng(0)
    prompts = [p for n in (3, 70, 140, 400) for p in [random.integers(3, WORDS, n).tolist()] * GROUP]
    params = [
        {"temperature": 1.0, "max_new_tokens": TOKENS - 17 * i, "ignore_eos": True, "sampling_seed": i}
        for i in range(len(prompts))
    ]
    async with EngineClient(engine.url, engine.name) as client:
        answers = await client.generate(prompts, params, return_logprob=True)
    samples = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sample = Sample(index=i, group_index=i // GROUP, tokens=prompt, reward=0.0)
        pairs = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            Namespace(), tokens=[p[1] for p in pairs], log_probs=[p[0] for p in pairs], meta_info=answer["meta_info"]
        )
        samples.append(sample)
    return samples


def trainer(model: str, true_on_policy: bool) -> FsdpBackend:
    settings = TrainerSettings(hf_checkpoint=model, bf16=True, compile=True, true_on_policy_mode=true_on_policy)
    return FsdpBackend(settings, Ranks(0, 1, "", 1, "cuda"), torch.device("cuda", 0))


def packed(backend: FsdpBackend, samples: list[Sample], share: bool) -> PackedBatch:
    numbers = [1.0] * len(samples)
    return pack(
        samples, range(len(samples)), numbers, numbers, share_prompts=share, gather=backend.gathers_keys,
        device=backend.device,
    )  # fmt: skip


@pytest.mark.parametrize("share", [True, False], ids=["shared prompts", "apart"])
def test_log_probs_are_the_engines_bit_for_bit(model: str, samples: list[Sample], share: bool) -> None:
    found: dict[bool, torch.Tensor] = {}
    for true_on_policy in (False, True):
        backend = trainer(model, true_on_policy)
        batch = packed(backend, samples, share)
        assert batch.rollout_log_probs is not None
        (log_probs,) = backend.log_probs([batch])
        assert log_probs is not None
        found[true_on_policy] = (log_probs - batch.rollout_log_probs).abs()
    print("largest difference", {mode: float(each.max()) for mode, each in found.items()})
    assert found[True].max() == 0
    # Otherwise nothing was shown.
    assert found[False].max() > 1e-3


def test_gradients_are_plain_ones_but_for_rounding(model: str, samples: list[Sample]) -> None:
    def loss(number: int, batch: PackedBatch, outputs: Outputs) -> torch.Tensor:
        weights = torch.arange(len(batch.mask), device=batch.mask.device) % 7 - 3.0
        return (outputs.log_probs * weights).mean()

    norms = {}
    gradients: dict[bool, list[torch.Tensor]] = {}
    for true_on_policy in (False, True):
        backend = trainer(model, true_on_policy)
        backend.forward_backward([packed(backend, samples, True)], loss)
        gradients[true_on_policy] = [gradient.float().flatten() for _, gradient in backend._optimizer.gradients()]
        norms[true_on_policy] = float(backend._optimizer.gradient_norm())
    plain, exact = torch.cat(gradients[False]), torch.cat(gradients[True])
    difference = float((exact - plain).norm() / plain.norm())
    print("gradient norms", norms, "difference", difference)
    assert difference < 0.05


def test_no_token_of_a_run_differs(model: str, tmp_path: Path) -> None:
    longer = {"rollout_max_response_len": 300, "max_tokens_per_gpu": 16384, "sglang_attention_backend": None}
    for step in train_on_words(tmp_path, model, WORDS, "true_on_policy_mode", lr=1e-4, **longer):
        assert step["train/train_rollout_logprob_abs_diff"] == 0


@needs(2, "sglang")
def test_no_token_of_a_run_on_several_gpus_differs(model: str, tmp_path: Path) -> None:
    """Two trainer ranks, each of which shares its GPU with an engine."""
    longer = {"rollout_max_response_len": 300, "max_tokens_per_gpu": 16384, "sglang_attention_backend": None}
    for step in train_on_words(
        tmp_path, model, WORDS, "true_on_policy_mode", lr=1e-4, actor_num_gpus_per_node=2, **longer
    ):
        assert step["train/train_rollout_logprob_abs_diff"] == 0
