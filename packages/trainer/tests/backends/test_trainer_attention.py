"""Attention over the runs of a packed row, against a softmax in float64 and against sequences one by one."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_float64 import flash_backward, flash_forward

from slime.trainer.backends import shared_attention
from slime.trainer.backends.attention import attend
from slime.trainer.backends.cudnn_attention import Bounds
from slime.trainer.backends.fsdp.attention import packed_attention, use_packed_attention
from slime.trainer.backends.fsdp.model import load_model
from slime.trainer.batching.packing import pack
from slime.trainer.batching.runs import Runs
from slime.types import Sample
from slime.types.errors import NotAvailable

VOCAB = 40


def expected(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float) -> Tensor:
    """seen: [T, K] bool."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = (torch.einsum("qhd,khd->hqk", query, key) * scale).masked_fill(~seen, float("-inf"))
    return torch.einsum("hqk,khv->qhv", logits.softmax(-1), value)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Runs of T tokens: how long each is, and which earlier tokens it sees besides itself."""
    lengths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    before, held = [], 0
    for length in lengths:
        before.append(sorted(draw(st.sets(st.integers(0, held - 1), max_size=4)) if held else []))
        held += length
    return lengths, before


# No deadline: the first row of a process imports torch's compiler, and on a busy machine any row may take a second.
@settings(deadline=None)
@given(laid_out(), st.none() | st.integers(1, 6), st.integers(0, 100))
def test_attention_is_a_softmax_over_what_is_seen(
    layout: tuple[list[int], list[list[int]]], window: int | None, seed: int
):
    lengths, before = layout
    total = sum(lengths)
    generator = torch.Generator().manual_seed(seed)
    # Values narrower than keys, as in latent attention, and two queries to a key.
    shapes = ((total, 4, 8), (total, 2, 8), (total, 2, 6))
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    seen = torch.zeros(total, total, dtype=torch.bool)
    keys, start = [], 0
    for length, earlier in zip(lengths, before, strict=True):
        keys.append(np.array([*earlier, *range(start, start + length)]))
        for i in range(length):
            context = keys[-1][: len(earlier) + i + 1]
            seen[start + i, context if window is None else context[-window:]] = True
        start += length
    runs = Runs.gathered(lengths, keys, "cpu") if any(before) else Runs.apart(lengths, "cpu")
    output = attend(*tensors, runs, 0.3, window)
    reference = expected(*tensors, seen, 0.3)
    torch.testing.assert_close(output, reference)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    found = torch.autograd.grad((output * weights).sum(), tensors)
    for gradient, wanted in zip(found, torch.autograd.grad((reference * weights).sum(), tensors), strict=True):
        torch.testing.assert_close(gradient, wanted)


def refused(*args: object) -> None:
    raise AssertionError("another kernel was to be called")


class InCudnnsPlace:
    """Computes what a plan of cuDNN computes, with lse [T, h]."""

    def __init__(self, query: Tensor, key: Tensor, bounds: Bounds, causal: bool, scale: float) -> None:
        self.bounds, self.causal, self.scale = bounds, causal, scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, q_limits: Tensor, k_limits: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert self.bounds.runs == len(q_limits) - 1
        output, lse = flash_forward(
            query, key, value, q_limits, k_limits, *self.bounds[1:], self.causal, self.scale
        )  # fmt: skip
        return output, lse.t().contiguous()

    def backward(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        *saved, lse, q_limits, k_limits = tensors
        assert lse.shape == saved[1].shape[:2]
        found = flash_backward(*saved, lse.t(), q_limits, k_limits, *self.bounds[1:], self.causal, self.scale)
        # It does not say that it writes the gradients of keys that no query sees.
        for first, end, start, stop in zip(q_limits, q_limits[1:], k_limits, k_limits[1:], strict=False):
            if first == end:
                found[1][start:stop] = found[2][start:stop] = float("nan")
        return found


@st.composite
def sharing(draw: st.DrawFn) -> tuple[list[int], list[list[int]], list[int]]:
    """Lengths of prompts, of the responses of each, and of sequences that share nothing."""
    groups = draw(
        st.lists(st.tuples(st.integers(1, 5), st.lists(st.integers(0, 4), min_size=2, max_size=4)), max_size=3)
    )
    if not any(any(responses) for _, responses in groups):
        groups = [*groups, (3, [1, 2])]
    others = draw(st.lists(st.integers(1, 5), max_size=3))
    return [prompt for prompt, _ in groups], [responses for _, responses in groups], others


@settings(deadline=None)
@given(sharing(), st.integers(1, 4), st.integers(0, 100))
def test_responses_see_the_prompt_that_they_share(
    layout: tuple[list[int], list[list[int]], list[int]], spare: int, seed: int
):
    prompts, responses, others = layout
    runs = Runs.sharing(prompts, responses, others, "cpu")
    assert runs.shared is not None
    total = int(runs.q_limits[-1])
    generator = torch.Generator().manual_seed(seed)
    shapes = ((total, 4, 8), (total, 2, 8), (total, 2, 8))
    tensors = [torch.randn(*s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]
    seen = torch.zeros(total, total, dtype=torch.bool)
    prompt_start, end = 0, sum(prompts)
    spans = []
    for prompt, of_prompt in zip(prompts, responses, strict=True):
        for length in of_prompt:
            spans.append((end, length, range(prompt_start, prompt_start + prompt)))
            end += length
        prompt_start += prompt
    spans += [(sum(prompts[:i]), length, range(0)) for i, length in enumerate(prompts)]
    spans += [(end + sum(others[:i]), length, range(0)) for i, length in enumerate(others)]
    for start, length, before in spans:
        for i in range(length):
            seen[start + i, [*before, *range(start, start + i + 1)]] = True
    weights = torch.randn(total, 4, 8, generator=generator, dtype=torch.float64)
    reference = expected(*tensors, seen, 0.3)
    gradients = torch.autograd.grad((reference * weights).sum(), tensors)
    output = attend(*tensors, runs, 0.3)
    torch.testing.assert_close(output, reference)
    for gradient, wanted in zip(torch.autograd.grad((output * weights).sum(), tensors), gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)
    # Short runs in bfloat16 are rounded once, at the end.
    low = [tensor.bfloat16() for tensor in tensors]
    assert attend(*low, runs, 0.3).equal(attend(*(tensor.float() for tensor in low), runs, 0.3).bfloat16())
    # Equal to two calls of a kernel, with limits behind the last prompt as rows of a fixed shape have them; and of one
    # whose lse is [T, h].
    shared = runs.shared
    padded = [torch.cat([x, x[-1:].expand(spare)]) for x in (shared.q_limits, shared.k_limits)]
    fixed = dataclasses.replace(runs, shared=dataclasses.replace(shared, q_limits=padded[0], k_limits=padded[1]))
    for row in (fixed, dataclasses.replace(fixed, padded=True)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_attention, "_kernel", refused if row.padded else flash_forward)
            patch.setattr(shared_attention, "_backward_kernel", refused if row.padded else flash_backward)
            patch.setattr(shared_attention, "find_plan", InCudnnsPlace if row.padded else refused)
            output = shared_attention.attend_runs(*tensors, row, 0.3)
            # The parts are put together in float32.
            torch.testing.assert_close(output, reference, atol=1e-6, rtol=1e-6)
            found = torch.autograd.grad((output * weights).sum(), tensors)
        for gradient, wanted in zip(found, gradients, strict=True):
            torch.testing.assert_close(gradient, wanted, atol=1e-5, rtol=1e-5)


def test_the_gradients_of_hundreds_of_runs_add_up_in_bfloat16():
    # More keys than a run has in float32.
    trunk, answers = 300, 500
    paths = [np.arange(trunk), *(np.array([*range(trunk), trunk + number]) for number in range(answers))]
    runs = Runs.gathered([trunk, *[1] * answers], paths, "cpu")
    generator = torch.Generator().manual_seed(0)
    shapes = ((trunk + answers, 2, 8), (trunk + answers, 1, 8), (trunk + answers, 1, 8))
    low = [torch.randn(*shape, generator=generator).bfloat16().requires_grad_() for shape in shapes]
    high = [tensor.detach().double().requires_grad_() for tensor in low]
    for found, wanted in zip(*(torch.autograd.grad(attend(*t, runs).sum(), t) for t in (low, high)), strict=True):
        assert (found.double() - wanted).norm() < 0.01 * wanted.norm()


def write(path: Path, kind: str, **values: Any) -> str:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, kind)(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3, **values,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("LlamaConfig", {}),
        ("MistralConfig", {"sliding_window": 3}),
        ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
        ("Qwen3Config", {}),
        ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
        ("Glm4Config", {"pad_token_id": 0, "eos_token_id": 1}),
    ],
)
def test_a_packed_row_gives_what_transformers_gives_for_each_sample(tmp_path: Path, kind: str, values: dict[str, Any]):
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "model", kind, **values)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model = load_model(path, flag="--hf-checkpoint")
    random = np.random.default_rng(0)
    prompts = [random.integers(2, VOCAB, n).tolist() for n in (5, 5, 4)]
    prompts[1] = prompts[0]
    samples = [Sample(tokens=p + random.integers(2, VOCAB, 6).tolist(), response_length=6) for p in prompts]
    batch = pack(samples, [0, 1, 2], [0.0] * 3, [1.0] * 3)
    assert batch.runs.shared is not None
    logits = model(batch.tokens, position_ids=batch.position_ids, runs=batch.runs, logits_to_keep=batch.rows).logits[0]
    wanted = torch.cat([plain(torch.tensor([s.tokens])).logits[0, -7:-1] for s in samples])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=2e-5)


def test_attention_that_rows_cannot_have_is_refused_by_name(tmp_path: Path):
    tensor, one = torch.zeros(1, 2, 1, 8), Runs.apart([1], "cpu")
    with pytest.raises(NotAvailable, match="softcap"):
        packed_attention(torch.nn.Identity(), tensor, tensor, tensor, None, runs=one, softcap=30.0)
    model = load_model(write(tmp_path / "model", "LlamaConfig"), flag="--hf-checkpoint")
    with pytest.raises(NotAvailable, match="LlamaAttention does not tell its layers which tokens see which"):
        model(torch.zeros(1, 1, dtype=torch.int64))
    model._supports_attention_backend = False
    with pytest.raises(NotAvailable, match="LlamaForCausalLM does not call transformers' attention"):
        use_packed_attention(model, flag="--hf-checkpoint")
