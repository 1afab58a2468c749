"""The embedded engine's own forward pass, and its running batch: the numbers are those of transformers."""

from __future__ import annotations

import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.engines.embedded.dense import kv_cache, matrices
from slime.rollout.engines.embedded.dense import model as dense_module
from slime.rollout.engines.embedded.dense.kv_cache import KvCache
from slime.rollout.engines.embedded.dense.model import DenseModel, _Layer
from slime.rollout.engines.embedded.model.continuous import ContinuousBatch
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.params import SamplingParams
from slime.rollout.engines.embedded.model.response import Response

VOCABULARY = 300
SHAPE = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, pad_token_id=0, bos_token_id=None,
    eos_token_id=1,
)  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
SHORT, LONG = [7, 8, 9], [int(t) for t in np.random.default_rng(3).integers(2, VOCABULARY, 90)]


def model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    made = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
        "llama3": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3, attention_bias=True)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
    }[kind]()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return made.to(dtype).eval().requires_grad_(False)


@pytest.fixture(scope="module", params=["torch", "loops"], autouse=True)
def ops(request: pytest.FixtureRequest) -> Iterator[str]:
    """Makes all models here compute with torch alone, or with compiled loops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense_module, "LOOPS_FROM", 1 << 60 if request.param == "torch" else 0)
        yield request.param


@pytest.fixture(scope="module", params=["llama", "llama3", "qwen2", "qwen3"])
def any_model(request: pytest.FixtureRequest) -> Any:
    return model(request.param)


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return model("qwen3")


def batch(model: Any, dense: DenseModel | None = None, max_tokens: int | None = None) -> ContinuousBatch:
    dense = dense or DenseModel(model)
    dense.pack(0)
    loaded = Loaded(model, None, VOCABULARY, 512, frozenset([1]))
    return ContinuousBatch(loaded, dense, np.random.default_rng(0), max_tokens)


def greedy(prompt: list[int], count: int) -> Response:
    return Response("", list(prompt), SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True))


def resident() -> int:
    """Returns the bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(running: ContinuousBatch) -> None:
    while not running.done:
        running.step()


def check(model: Any, response: Response) -> None:
    """The tokens are the likeliest ones of transformers' forward pass, and the log-probs are its."""
    ids, start = torch.tensor([response.prompt_ids + response.output_ids]), len(response.prompt_ids)
    log_probs = model(ids).logits[0, start - 1 : -1].float().log_softmax(-1)
    assert response.output_ids == log_probs.argmax(-1).tolist()
    assert response.log_probs == pytest.approx(log_probs.max(-1).values.tolist(), abs=1e-4)


def test_it_takes_dense_models_without_a_window(any_model: Any) -> None:
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    assert DenseModel.supports(any_model)
    windowed = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=0)
    scaled = Qwen2Config(**SHAPE, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    experts = Qwen3MoeConfig(**SHAPE, head_dim=16, num_experts=2, moe_intermediate_size=8)
    other = GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1)
    others = [
        Qwen2ForCausalLM(windowed),
        Qwen2ForCausalLM(scaled),
        Qwen3MoeForCausalLM(experts),
        GPT2LMHeadModel(other),
    ]
    assert not any(DenseModel.supports(model) for model in others)


def test_greedy_tokens_and_log_probs_are_those_of_transformers(any_model: Any) -> None:
    running = batch(any_model)
    responses = [greedy(SHORT, 70), greedy(LONG, 50), greedy([5], 20), greedy(SHORT, 3), greedy(LONG, 41)]
    running.add(responses)
    run(running)
    for response in responses:
        check(any_model, response)


@settings(max_examples=15, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 12), st.sampled_from([SHORT, LONG, [5], [7, 8]]), st.integers(1, 20)),
        min_size=1, max_size=10,
    )
)  # fmt: skip
def test_sequences_may_join_whenever_they_come(qwen3: Any, arrivals: list[tuple[int, list[int], int]]) -> None:
    running = batch(qwen3)
    responses = [(step, greedy(prompt, count)) for step, prompt, count in arrivals]
    for now in range(13):
        running.add([response for step, response in responses if step == now])
        if not running.done:
            running.step()
    run(running)
    for _, response in responses:
        check(qwen3, response)


def test_what_is_ended_from_outside_leaves_the_others_alone(qwen3: Any) -> None:
    running = batch(qwen3)
    responses = [greedy(prompt, 30) for prompt in (SHORT, LONG, [5], LONG, [7, 8])]
    running.add(responses)
    running.step()
    for ended in (0, 2, 4):
        responses[ended].finish({"type": "abort"})
        running.step()
    running.add([late := greedy(LONG, 9)])
    run(running)
    assert [len(r.output_ids) for r in responses] == [1, 30, 2, 30, 3]
    for response in [*responses, late]:
        check(qwen3, response)


def test_a_prompt_is_computed_once_also_for_those_who_come_later(qwen3: Any) -> None:
    running = batch(qwen3)
    first, second, later = greedy(LONG, 20), greedy(LONG, 20), greedy(LONG, 20)
    running.add([first, second])
    running.step()
    running.add([later])
    run(running)
    assert [r.cached_tokens for r in (first, second, later)] == [0, len(LONG), len(LONG) - 1]
    assert first.output_ids == second.output_ids == later.output_ids
    check(qwen3, later)


def test_new_weights_count_from_the_next_step_and_old_prompts_are_not_shared() -> None:
    changed = model("qwen3")
    dense = DenseModel(changed)
    running = batch(changed, dense)
    running.add([first := greedy(LONG, 40)])
    running.step()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.1)
    dense.pack(1)
    running.add([later := greedy(LONG, 10)])
    run(running)
    assert later.cached_tokens == 0
    check(changed, later)
    assert len(first.output_ids) == 40


def test_a_retracted_stream_goes_on_from_its_tokens(qwen3: Any) -> None:
    whole = greedy(LONG, 12)
    running = batch(qwen3)
    running.add([whole])
    run(running)
    rest = greedy(LONG, 12)
    rest.output_ids, rest.log_probs = whole.output_ids[:5], whole.log_probs[:5]
    again = batch(qwen3)
    again.add([rest])
    run(again)
    assert rest.output_ids == whole.output_ids


def test_seeded_tokens_do_not_depend_on_the_batch(qwen3: Any) -> None:
    def response(seed: int) -> Response:
        return Response("", LONG[: 5 + seed], SamplingParams(sampling_seed=seed, max_new_tokens=12))

    together = [response(seed) for seed in range(9)]
    running = batch(qwen3)
    running.add(together)
    run(running)
    for seed in (0, 4, 8):
        alone = batch(qwen3)
        alone.add([one := response(seed)])
        run(alone)
        assert one.output_ids == together[seed].output_ids


def test_bfloat16_weights_are_sampled_close_to_float32_and_the_log_probs_are_of_what_was_sampled() -> None:
    exact, half = model("qwen3"), model("qwen3", torch.bfloat16)
    exact.load_state_dict(half.state_dict())  # the rounded weights, computed with exactly
    running = batch(half)
    running.add([sampled := Response("", LONG, SamplingParams(max_new_tokens=40, sampling_seed=1, ignore_eos=True))])
    run(running)
    ids = torch.tensor([LONG + sampled.output_ids])
    log_probs = exact(ids).logits[0, len(LONG) - 1 : -1].log_softmax(-1)
    exact_log_probs = log_probs.gather(-1, ids[0, len(LONG) :, None])[:, 0]
    assert sampled.log_probs == pytest.approx(exact_log_probs.tolist(), abs=0.3)
    assert float((torch.tensor(sampled.log_probs) - exact_log_probs).abs().mean()) < 0.05


def test_a_cache_that_grows_keeps_what_rows_have_and_takes_no_memory_for_the_rest() -> None:
    cache = KvCache(1, 1, 4, torch.float32)
    for kind in cache.layer(0).unbind(1):
        kind.fill_(7.0)
    cache.reserve(9, 65, [3, 0, 64])
    assert cache.room == (16, 128)
    for kind in cache.layer(0).unbind(1):
        filled = (kind[:, 0, :, 0] == 7.0).sum(-1)
        assert filled.tolist() == [3, 0, 64] + [0] * 13
        assert float(kind.abs().sum()) == 7.0 * 67 * 4


def test_memory_follows_what_rows_hold_and_not_their_longest() -> None:
    cache = KvCache(24, 8, 64, torch.bfloat16)
    before = resident()
    cache.reserve(256, 8192, [])  # 96 GiB of address space
    for index in range(24):
        for kind in cache.layer(index).unbind(1):
            kind[0, :, :512] = 1.0
            kind[1:33, :, :2] = 1.0
    taken = resident() - before
    assert taken < 100 << 20  # 512 tokens of 48 KiB, and a page for each head of each layer of 32 others
    cache.release(0, 512)
    assert resident() - before < taken - (20 << 20)
    assert float(cache.layer(23)[0, 1].abs().sum()) == 0.0


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the kernel has no huge pages")
@pytest.mark.parametrize(("planned", "flag"), [(1 << 30, "hg"), (64 << 20, "nh")], ids=["small", "planned for less"])
def test_a_cache_that_is_small_for_what_is_planned_has_huge_pages(planned: int, flag: str) -> None:
    cache = KvCache(24, 8, 64, torch.bfloat16)
    cache.planned = planned
    before = resident()
    cache.reserve(8, 1024, [])  # 384 MiB
    for index in range(24):
        cache.layer(index)[:, :, :, :2] = 1.0
    assert resident() - before < 64 << 20 or flag == "hg"
    assert flag in flags_of_memory(cache.layer(0).data_ptr())
    for row in range(8):
        cache.release(row, 2)
    assert all(not cache.layer(index).any() for index in range(24))


def flags_of_memory(address: int) -> list[str]:
    """Returns what the system was told about the memory at an address, in the words of proc(5)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match("[0-9a-f]+-", line):
            first, last = (int(number, 16) for number in line.split()[0].split("-"))
            inside = first <= address < last
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no memory at {address:x}")


def test_a_batch_tells_its_cache_what_is_planned(qwen3: Any) -> None:
    running = batch(qwen3, max_tokens=100)
    assert running._cache.planned == 100 * running._cache.token_bytes


def test_another_system_and_processor_generate_the_same(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr(kv_cache, "LINUX", False)
    dense = DenseModel(qwen3)
    running = batch(qwen3, dense)
    first, second = greedy(SHORT, 4), greedy(LONG, 12)
    running.add([first, second])
    run(running)
    running.add([again := greedy(SHORT, 8)])
    run(running)
    for response in (first, second, again):
        check(qwen3, response)


def test_sequences_leave_where_memory_is_full_and_go_on_from_their_tokens(qwen3: Any) -> None:
    running = batch(qwen3, max_tokens=200)
    responses = [greedy(LONG, 40), greedy(LONG[:60], 70), greedy(SHORT, 60)]
    running.add(responses)
    left: list[Response] = []
    while not running.done:
        running.step()
        assert sum(row.cached for row in running._rows) <= 200
        left += running.take_back()
        if len(running.running) == 1 and left:
            running.add([left.pop(0)])
    running.add(left)
    run(running)
    for response in responses:
        check(qwen3, response)


def test_the_last_weights_are_gone_before_new_ones_are_packed(qwen3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    dense, packed = DenseModel(qwen3), 0
    dense.pack(0)
    last = weakref.ref(dense._layers[0])

    class Layer(_Layer):
        def __init__(self, *given: Any) -> None:
            nonlocal packed
            assert last() is None
            packed += 1
            super().__init__(*given)

    monkeypatch.setattr(dense_module, "_Layer", Layer)
    dense.pack(1)
    assert packed == SHAPE["num_hidden_layers"]


@given(st.integers(1, 100_000))
def test_passes_have_few_sizes_and_little_filling(count: int) -> None:
    size = dense_module.filled_up(count)
    assert count <= size <= count * (1 + 1 / 16) and dense_module.filled_up(size) == size


def test_matrices_see_few_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # oneDNN compiles its kernels for each number, and keeps them: hundreds of MiB in a process that meets all of them.
    dense = DenseModel(model("llama"))
    dense.pack(0)
    seen, multiply = set[int](), matrices.TorchMatrix.__call__

    def noting(matrix: Any, x_NI: torch.Tensor, *out: torch.Tensor) -> torch.Tensor:
        seen.add(len(x_NI))
        return multiply(matrix, x_NI, *out)

    monkeypatch.setattr(matrices.TorchMatrix, "__call__", noting)
    cache = dense.cache()
    cache.reserve(257, 4, [])
    for count in range(1, 257):
        run = dense_module.Pass()
        for row in range(count):
            run.decode(row, row % 4)
        run.prefill(count, SHORT)
        hidden = dense.forward(run, cache)
        assert len(hidden) == count + 3 and len(dense.logits(hidden[:count])) == count
    assert len(seen) <= 90 and max(seen) == 272
