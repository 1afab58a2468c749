"""A step of the embedded engine that fails: everybody who waited for it learns it, and nobody else."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from slime.rollout.engines.embedded.endpoints.generate import make_response
from slime.rollout.engines.embedded.model.dense import DenseModel
from slime.rollout.engines.embedded.model.kv_cache import KvCache
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.scheduler import Scheduler
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.types.errors import InvalidField

VOCABULARY = 60


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    return Loaded(Qwen2ForCausalLM(config).eval().requires_grad_(False), None, VOCABULARY, 256, frozenset([1]))


@pytest.fixture
def scheduler(loaded: Loaded) -> Iterator[Scheduler]:
    running = Scheduler(loaded, EmbeddedOptions(model_path=".", random_seed=0))
    yield running
    running.stop()


def submit(scheduler: Scheduler, loaded: Loaded, count: int = 3) -> Future[Any]:
    response = make_response(loaded, [2, 3], SamplingParams(temperature=0, max_new_tokens=count), "", "input_ids")
    return scheduler.submit([response]).done


def test_those_who_join_a_step_that_fails_are_told(
    scheduler: Scheduler, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(cache: KvCache, *sizes: object) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(KvCache, "reserve", refuse)
        with pytest.raises(MemoryError, match="no room"):
            submit(scheduler, loaded).result(timeout=10)
    assert submit(scheduler, loaded).result(timeout=10) is None
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_a_response_that_may_have_no_token_is_refused(loaded: Loaded) -> None:
    params = SamplingParams(min_new_tokens=1, stop_token_ids=frozenset(range(VOCABULARY)) - loaded.eos_ids)
    with pytest.raises(InvalidField, match="stop_token_ids"):
        make_response(loaded, [2], params, "", "input_ids")


def test_linear_layers_of_another_kind_are_left_to_transformers(loaded: Loaded) -> None:
    class Quantized(torch.nn.Linear):
        pass

    assert DenseModel.supports(loaded.model)
    mlp = loaded.model.model.layers[0].mlp
    linear, mlp.down_proj = mlp.down_proj, Quantized(32, 16, bias=False)
    try:
        assert not DenseModel.supports(loaded.model)
    finally:
        mlp.down_proj = linear
