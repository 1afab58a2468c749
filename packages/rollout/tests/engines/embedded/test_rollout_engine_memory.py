"""Memory for keys and values in the embedded engine: what is planned, what is kept to, and how engines share it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.rollout.engines.embedded.dense.kv_cache import tokens_in_memory
from slime.rollout.engines.embedded.endpoints.generate import make_response
from slime.rollout.engines.embedded.model import response as response_module
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.padded import PaddedBatch, token_bytes
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.response import Response
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.embedded.scheduling.scheduler import Scheduler
from slime.rollout.engines.registry import KINDS
from slime.rollout.settings.rollout import RolloutSettings

VOCABULARY = 60
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0,
    "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4}


def model(kind: str) -> Any:
    import transformers as hf

    torch.manual_seed(0)
    made = {
        "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**SHAPE, head_dim=8, sliding_window=None)),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=3, n_head=2)),
        "experts": lambda: hf.Qwen3MoeForCausalLM(
            hf.Qwen3MoeConfig(**SHAPE, head_dim=6, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8)
        ),
        "latent": lambda: hf.DeepseekV3ForCausalLM(
            hf.DeepseekV3Config(
                **SHAPE | {"num_key_value_heads": 4}, **LATENT, n_routed_experts=2, n_group=1, topk_group=1,
                num_experts_per_tok=1, moe_intermediate_size=8, first_k_dense_replace=1,
            )
        ),
    }[kind]()  # fmt: skip
    return made.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded(model("mistral"), None, VOCABULARY, 256, frozenset([1]))


@pytest.mark.parametrize("kind", ["mistral", "gpt2", "experts", "latent"])
def test_the_planned_bytes_of_a_token_are_those_that_it_takes(kind: str) -> None:
    made = model(kind)
    cache = made(torch.tensor([[2, 3, 4]]), use_cache=True).past_key_values
    taken = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert token_bytes(made) * 3 == taken


def responses(loaded: Loaded, count: int) -> list[Response]:
    params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True)
    return [make_response(loaded, [2, *range(3, 3 + n)], params, "", "input_ids") for n in range(1, 7)]


def test_a_padded_batch_keeps_to_its_memory_and_changes_no_token(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone, together = responses(loaded, 20), responses(loaded, 20)
    free = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0))
    # Few tokens ahead are planned for, so that sequences outgrow what they were admitted with.
    monkeypatch.setattr(response_module, "TOKENS_AHEAD", 3)
    held: list[int] = []
    step = PaddedBatch.step

    def watched(batch: PaddedBatch) -> None:
        step(batch)
        held.append(batch._cache.layers[0].keys.shape[0] * batch._cache.get_seq_length())
        assert batch.used_tokens == held[-1]

    bounded = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0, max_total_tokens=70))
    try:
        for each in alone:
            free.submit([each]).done.result(timeout=60)
        monkeypatch.setattr(PaddedBatch, "step", watched)
        bounded.submit(together).done.result(timeout=60)
    finally:
        free.stop()
        bounded.stop()
    assert 50 < max(held) <= 70 and len(held) > 20
    assert not any(r.retractions for r in alone) and 0 < sum(r.retractions for r in together)
    assert (bounded.max_tokens, bounded.used_tokens) == (70, 0)
    assert [r.output_ids for r in together] == [r.output_ids for r in alone]
    assert all(np.allclose(a.log_probs, b.log_probs, atol=1e-5) for a, b in zip(together, alone, strict=True))


def test_a_sequence_longer_than_the_memory_runs_alone(loaded: Loaded) -> None:
    scheduler = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0, max_total_tokens=4))
    chosen = responses(loaded, 6)[:2]
    try:
        scheduler.submit(chosen).done.result(timeout=60)
    finally:
        scheduler.stop()
    assert [len(r.output_ids) for r in chosen] == [6, 6]


def planned(gpus: int = 0, **settings: Any) -> list[EmbeddedOptions]:
    starts = KINDS["embedded"].starts(
        RolloutSettings(hf_checkpoint="none", **settings), [str(i) for i in range(gpus)]
    )  # fmt: skip
    return [start.args[0] for start in starts]  # type: ignore[attr-defined]


def test_engines_on_one_machine_share_half_of_its_memory() -> None:
    assert [options.memory_fraction for options in planned(rollout_num_engines=4)] == [0.125] * 4
    assert [options.memory_fraction for options in planned(2, rollout_num_engines=4)] == [0.25] * 4
    assert [options.memory_fraction for options in planned(2, rollout_num_engines=2)] == [0.5] * 2
    on_cpu = planned(2, rollout_num_engines=2, rollout_engine_device="cpu")
    assert [options.memory_fraction for options in on_cpu] == [0.25] * 2
    assert abs(tokens_in_memory(1000, 0.5) - 4 * tokens_in_memory(1000, 0.125)) <= 4


def test_a_run_bounds_the_tokens_of_its_engines() -> None:
    assert planned(rollout_engine_max_total_tokens=5000)[0].max_total_tokens == 5000
    assert planned()[0].max_total_tokens is None
