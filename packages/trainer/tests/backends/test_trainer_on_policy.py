"""Layers with an engine's values: log-probs are the engine's, and gradients those of the model's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_tiny import VOCAB, Runner, make_samples, make_settings
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from slime.trainer.algorithms.logprobs import token_log_probs
from slime.trainer.backends.attention import attend
from slime.trainer.backends.base import Outputs
from slime.trainer.backends.fsdp.on_policy import EngineForward
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.batching.runs import Runs
from slime.trainer.settings.checks import advice
from slime.trainer.settings.on_policy import check_engine_layers
from slime.types.errors import NotAvailable

SHAPE = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, pad_token_id=0, eos_token_id=1,
    bos_token_id=None,
)  # fmt: skip
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SHAPE, head_dim=16),
}


class TorchKernels:
    """The formulas in torch. stretch: a factor of every norm, by which this engine differs from transformers."""

    def __init__(self, stretch: float = 1.0, theta: float = 10000.0) -> None:
        self.stretch, self.theta = stretch, theta

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        return self.stretch * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return self.norm(x + residual, weight, epsilon), x + residual

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        assert int(positions.max()) < longest
        half = query.shape[-1] // 2
        angles = positions[:, None] * self.theta ** (-torch.arange(half, dtype=query.dtype) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        return tuple(  # type: ignore[return-value]
            torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (x.split(half, -1) for x in (query, key))
        )

    def attend(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
        apart = Runs(runs.q_lengths, runs.k_lengths, runs.q_limits, runs.k_limits, None, runs.max_q, runs.max_k)
        return attend(query, key, value, apart)

    def gated_silu(self, gate_and_up: Tensor) -> Tensor:
        gate, up = gate_and_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def log_softmax(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(-1)


@pytest.fixture(params=CONFIGS, scope="module")
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return str(path)


def runner(model: str, kernels: TorchKernels | None, dtype: torch.dtype = torch.float64) -> Runner:
    made = Runner(make_settings(model, rollout_temperature=0.8))
    backend: Any = made.backend
    backend.policy.to(dtype)
    if kernels is not None:
        engine = EngineForward(kernels)
        engine.attach(backend.policy)
        backend._engine = backend._passes._engine = engine
    return made


def batch(gather: bool) -> PackedBatch:
    samples = make_samples()
    numbers = [1.0] * len(samples)
    return pack(samples, range(len(samples)), numbers, numbers, gather=gather)


def outcome(made: Runner, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the log-probs of a row, and the gradients of their weighted sum."""
    found: list[Tensor] = []

    def loss(number: int, batch: PackedBatch, outputs: Outputs) -> Tensor:
        found.append(outputs.log_probs.detach())
        return (outputs.log_probs * torch.arange(len(batch.mask))).sum()

    made.backend.forward_backward([packed], loss)
    policy: Any = made.backend.policy
    gradients = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    return found[0], gradients


@pytest.mark.parametrize("gather", [True, False], ids=["shared prompts", "apart"])
def test_with_the_same_formulas_nothing_changes(family: str, gather: bool) -> None:
    packed = batch(gather)
    if not gather:
        samples = make_samples()
        numbers = [1.0] * len(samples)
        packed = pack(samples, range(len(samples)), numbers, numbers, share_prompts=False)
    expected, of_own = outcome(runner(family, None), packed)
    found, of_engine = outcome(runner(family, TorchKernels()), packed)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)
    for name, gradient in of_own.items():
        assert (of_engine[name] - gradient).norm() < 1e-5 * gradient.norm(), name


def test_values_are_the_engines_with_and_without_a_gradient(family: str) -> None:
    own, engine = runner(family, None), runner(family, TorchKernels(stretch=1.001))
    packed = batch(gather=True)
    trained, gradients = outcome(engine, packed)
    (scored,) = engine.backend.scores([packed])
    assert scored is not None and torch.equal(scored.log_probs, trained)
    plain, of_own = outcome(own, packed)
    assert (trained - plain).abs().max() > 1e-4
    # The gradient is the own layers', at values that are a little different.
    for name, gradient in of_own.items():
        assert 0 < (gradients[name] - gradient).norm() < 0.05 * gradient.norm(), name


def test_every_rounding_of_the_engine_shows_in_log_probs(family: str) -> None:
    """In bfloat16 the pair of tensors that a layer hands on is not its sum."""
    packed = batch(gather=True)

    class Rounding(TorchKernels):
        def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
            added = x.float() + residual.float()
            scaled = added * torch.rsqrt(added.pow(2).mean(-1, keepdim=True) + epsilon)
            return (scaled * weight).to(x.dtype), added.to(x.dtype)

    class RoundingTwice(Rounding):
        def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
            return super().add_norm((x.float() + residual.float()).to(x.dtype), torch.zeros_like(x), weight, epsilon)

    exact, twice = (runner(family, kernels, torch.bfloat16) for kernels in (Rounding(), RoundingTwice()))
    assert not torch.equal(outcome(exact, packed)[0], outcome(twice, packed)[0])


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 9),
    chunk=st.integers(-1, 10),
    temperature=st.sampled_from([1.0, 0.7, 1.3]),
)
@settings(max_examples=40, deadline=None)
def test_log_probs_and_their_gradients_do_not_depend_on_the_chunks(
    seed: int, rows: int, chunk: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 13, generator=generator).requires_grad_()
    targets = torch.randint(0, 13, (rows,), generator=generator)
    weights = torch.randn(rows, generator=generator)
    expected = token_log_probs(logits, targets, temperature)
    found = EngineForward(TorchKernels()).token_log_probs(logits, targets, temperature, chunk)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    of_expected, of_found = (torch.autograd.grad((values * weights).sum(), logits)[0] for values in (expected, found))
    torch.testing.assert_close(of_found, of_expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "values, reason",
    [
        ({"model_type": "gemma2"}, "its model_type is gemma2, and not one of llama, qwen3"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its layers have windows"),
        ({"sliding_window": 512}, "its layers have windows"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "its rope_type is llama3"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "its rope_type is yarn"),
        ({"hidden_act": "gelu"}, "its hidden_act is gelu"),
        ({"mlp_bias": True}, "its mlp_bias is on"),
        ({"head_dim": 64}, "its heads have 64 elements and not 128: while it generates"),
        ({"head_dim": None}, "its heads have 8 elements and not 128"),
    ],
)
def test_models_with_other_layers_are_refused_by_what_differs(values: dict[str, Any], reason: str) -> None:
    config = LlamaConfig(**SHAPE, head_dim=128).to_dict()
    check_engine_layers(config)
    with pytest.raises(NotAvailable, match=f"--hf-checkpoint: --true-on-policy-mode for this model is .*{reason}"):
        check_engine_layers(config | values)


def test_a_file_is_judged_as_the_config_that_transformers_reads_from_it() -> None:
    unused_windows = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 2}
    for values in ({}, unused_windows, unused_windows | {"use_sliding_window": True, "max_window_layers": 3}):
        check_engine_layers({"model_type": "qwen3", "num_hidden_layers": 3} | values)
        check_engine_layers(Qwen3Config(**SHAPE, **values).to_dict())
    used = unused_windows | {"use_sliding_window": True}
    for config in ({"model_type": "qwen3", "num_hidden_layers": 3} | used, Qwen3Config(**SHAPE, **used).to_dict()):
        with pytest.raises(NotAvailable, match="its layers have windows"):
            check_engine_layers(config)


def test_with_megatron_the_flag_says_that_log_probs_differ(model: str) -> None:
    (sentence,) = advice(make_settings(model, true_on_policy_mode=True, train_backend="megatron"))
    assert "--train-backend megatron only keeps to one update per iteration" in sentence
    assert not list(advice(make_settings(model, true_on_policy_mode=True)))


def test_on_a_cpu_the_trainer_says_that_log_probs_differ(
    model: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level("INFO"):
        made = Runner(make_settings(model, true_on_policy_mode=True))
    assert "log-probs differ from the engine's by rounding" in caplog.text
    assert made.run()["train/grad_norm"] > 0
