"""An engine in bfloat16 and a trainer in float32: routing replay sends each token to the same experts in both."""

from __future__ import annotations

import asyncio
from argparse import Namespace

import numpy as np
import pytest
import torch

from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.trainer.backends.build import build_backend
from slime.trainer.batching.packing import check_experts, pack
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample

LAYERS, TOP_K, EXPERTS = 2, 2, 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Routers score experts in pairs that bfloat16 cannot tell apart, and float32 can."""
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_experts=EXPERTS, num_experts_per_tok=TOP_K,
        moe_intermediate_size=16, norm_topk_prob=True, initializer_range=0.3, pad_token_id=0, eos_token_id=1,
        bos_token_id=None,
    )  # fmt: skip
    policy = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for layer in policy.model.layers:
            layer.mlp.gate.weight[1::2] = layer.mlp.gate.weight[::2] * (1 + 1e-5)
    policy.save_pretrained(path)
    from tokenizers import Tokenizer, models

    core = Tokenizer(models.WordLevel({str(i): i for i in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=core, pad_token="0", eos_token="1").save_pretrained(path)
    return str(path)


def generated(model: str) -> list[Sample]:
    options = EmbeddedOptions(model_path=model, dtype="bfloat16", threads=1, enable_return_routed_experts=True)
    prompts = [[2 + i, 3, 4, 5] for i in range(8)]
    params = [{"temperature": 1.0, "max_new_tokens": 12, "sampling_seed": i, "ignore_eos": True} for i in range(8)]

    async def ask(url: str) -> list[dict]:
        async with EngineClient(url, "engine") as client:
            return await client.generate(prompts, params, return_logprob=True, return_routed_experts=True)

    with start_embedded(options) as process:
        answers = asyncio.run(ask(process.wait_ready(120).url))
    samples = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        sample = Sample(index=i, group_index=i, tokens=prompt, reward=0.0)
        log_probs = answer["meta_info"]["output_token_logprobs"]
        sample.append_response_tokens(
            Namespace(num_layers=LAYERS, moe_router_topk=TOP_K), tokens=[item[1] for item in log_probs],
            log_probs=[item[0] for item in log_probs], meta_info=answer["meta_info"],
        )  # fmt: skip
        check_experts(sample, LAYERS, TOP_K, EXPERTS)
        samples.append(sample)
    return samples


def differences(model: str, samples: list[Sample], *, replayed: bool) -> np.ndarray:
    """Differences of log-probs between trainer and engine, per token."""
    settings = TrainerSettings(hf_checkpoint=model, use_rollout_routing_replay=replayed, use_dynamic_batch_size=False)
    backend = build_backend(settings.on("cpu"), Ranks(0, 1, "", 1), torch.device("cpu"))
    experts = (LAYERS, TOP_K) if replayed else None
    batch = pack(samples, range(len(samples)), [0.0] * 8, [1.0] * 8, experts=experts)
    (found,) = backend.log_probs([batch])
    assert found is not None and batch.rollout_log_probs is not None
    return (found - batch.rollout_log_probs).abs().numpy()


def test_a_router_that_rounds_otherwise_changes_no_log_prob(model: str) -> None:
    samples = generated(model)
    free, replayed = (differences(model, samples, replayed=r) for r in (False, True))
    assert replayed.mean() < 0.3 * free.mean(), (replayed.mean(), free.mean())
    assert replayed.max() < 0.3 * free.max(), (replayed.max(), free.max())
