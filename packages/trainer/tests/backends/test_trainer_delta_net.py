"""Gated delta nets over packed rows, against the recurrence token by token and transformers sample by sample."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from trainer_float64 import compare_rows, samples_of_lengths
from trainer_tiny import (
    GATED_KINDS,
    Runner,
    alone,
    make_samples,
    make_settings,
    write_gated_model,
    write_model,
)

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.trainer.backends.delta_net import packed_delta_net
from slime.trainer.backends.delta_rule import causal_convolution, gated_delta_rule
from slime.trainer.backends.fsdp.model import load_model
from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.batching.runs import Runs
from slime.trainer.checkpoints.checkpoint import TrainerState, save_checkpoint
from slime.trainer.checkpoints.checkpoint import write_model as write_trained
from slime.types import Sample
from slime.types.errors import NotAvailable

KINDS_OF_TEXT = [kind for kind, (_, images) in GATED_KINDS.items() if not images]


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """The recurrence of one sample."""
    query, key = (t * torch.rsqrt((t * t).sum(-1, keepdim=True) + 1e-6) for t in (query, key))
    heads = [head * key.shape[1] // value.shape[1] for head in range(value.shape[1])]
    query, key = query[:, heads] * query.shape[-1] ** -0.5, key[:, heads]
    state = value.new_zeros(len(heads), key.shape[2], value.shape[2])
    outputs = []
    for t in range(len(value)):
        state = state * decay[t].exp()[:, None, None]
        wrong = value[t] - torch.einsum("hd,hdv->hv", key[t], state)
        state = state + torch.einsum("hd,hv->hdv", key[t], wrong * beta[t][:, None])
        outputs.append(torch.einsum("hd,hdv->hv", query[t], state))
    return torch.stack(outputs)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 140), min_size=1, max_size=5), st.integers(0, 3))
def test_rule_and_convolution_begin_with_every_run(lengths: list[int], empty: int):
    generator, tokens = torch.Generator().manual_seed(sum(lengths)), sum(lengths)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)

    inputs = [draw(2, 4), draw(2, 4), draw(4, 3), -draw(4).abs(), draw(4).sigmoid()]
    inputs = [tensor.requires_grad_() for tensor in inputs]
    runs = Runs.apart(lengths, "cpu")
    # A padded row has only limits, and runs without tokens at its end.
    limits = F.pad(runs.q_limits, (0, empty), value=tokens)
    padded = Runs([], [], limits, limits, None, runs.max_q, runs.max_q)
    expected = torch.cat(list(map(token_by_token, *(tensor.split(lengths) for tensor in inputs))))
    gradient = draw(4, 3)
    wanted = torch.autograd.grad(expected, inputs, gradient)
    for row in (runs, padded):
        found = gated_delta_rule(*inputs, row)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
        for ours, reference in zip(torch.autograd.grad(found, inputs, gradient), wanted, strict=True):
            torch.testing.assert_close(ours, reference, rtol=1e-8, atol=1e-9)

    values, weight = draw(6), torch.randn(6, 4, generator=generator, dtype=torch.float64)
    parts = [F.conv1d(F.pad(part.t(), (3, 0)), weight[:, None], groups=6).t() for part in values.split(lengths)]
    for row in (runs, padded):
        torch.testing.assert_close(causal_convolution(values, weight, row), torch.cat(parts))


def test_low_precision_is_computed_in_float32():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(90, 2, 8, generator=generator).bfloat16() for _ in range(3))
    decay, beta = -torch.rand(90, 2, generator=generator), torch.rand(90, 2, generator=generator)
    found = gated_delta_rule(query, key, value, decay, beta, Runs.apart([70, 20], "cpu"))
    exact = gated_delta_rule(query.float(), key.float(), value.float(), decay, beta, Runs.apart([70, 20], "cpu"))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0)


def tokens_apart(groups: int = 2) -> int:
    """Tokens of rows in which each sample has its prompt. The last group trains nothing: its rewards are equal."""
    return sum(len(s.array("tokens")) - 1 for s in make_samples()[: 4 * groups])


@pytest.mark.parametrize("kind", GATED_KINDS)
def test_rows_of_gated_models_have_the_logits_and_gradients_of_each_sample_alone(tmp_path: Path, kind: str):
    from transformers import AutoModelForCausalLM

    path = write_gated_model(tmp_path / "model", kind)
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model = load_model(path, flag="--hf-checkpoint")
    compare_rows(model, plain, samples_of_lengths(3, 70, 1, 4))


@pytest.mark.parametrize("kind", KINDS_OF_TEXT)
def test_steps_of_gated_models_do_not_depend_on_the_rows(tmp_path: Path, kind: str):
    path = write_gated_model(tmp_path / "model", kind)
    metrics = []
    for values in (
        {"max_tokens_per_gpu": 1000},
        {"use_dynamic_batch_size": False, "micro_batch_size": 1},
        {"max_tokens_per_gpu": 40, "gradient_checkpointing": True},
    ):
        runner = Runner(make_settings(path, lr=1e-4, **values))
        metrics.append(runner.run(0))
        # Each sample has its prompt.
        assert not runner.backend.can_share_prompts
        assert metrics[-1]["perf/row_tokens"] == tokens_apart()
        assert metrics[-1]["train/grad_norm"] == pytest.approx(metrics[0]["train/grad_norm"], rel=1e-3)
        assert metrics[-1]["train/entropy_loss"] == pytest.approx(metrics[0]["train/entropy_loss"], rel=1e-4)


def test_prompts_are_not_shared_where_any_model_of_the_run_has_a_state(tmp_path: Path, model: str):
    gated = write_gated_model(tmp_path / "gated", "Qwen3_5TextConfig")
    compared = Runner(make_settings(model, ref_load=gated, use_kl_loss=True, kl_loss_coef=0.1))
    assert not compared.backend.can_share_prompts
    critic = Runner(make_settings(model, critic_load=gated, advantage_estimator="ppo"))
    assert critic.backend.can_share_prompts
    # A critic trains on all samples.
    assert compared.run(0)["perf/row_tokens"] == critic.run(0)["perf/row_tokens"] == tokens_apart(3)
    batch = pack(make_samples()[:4], range(4), [0.0] * 4, [1.0] * 4)
    with pytest.raises(NotAvailable, match="recurrent state cannot read a prompt that samples share"):
        load_model(gated, flag="--hf-checkpoint")(batch.tokens, position_ids=batch.position_ids, runs=batch.runs)


def test_delta_nets_that_rows_cannot_have_are_refused_by_name(tmp_path: Path):
    from transformers import AutoConfig

    path = write_gated_model(tmp_path / "model", "Qwen3_5TextConfig")
    layer = load_model(path, flag="--hf-checkpoint").model.layers[0].linear_attn
    with pytest.raises(NotAvailable, match="Qwen3_5GatedDeltaNet is not told where samples begin"):
        packed_delta_net(layer, torch.zeros(1, 3, 32))
    other = write_model(tmp_path / "other")
    config = AutoConfig.from_pretrained(other)
    config.layer_types = ["linear_attention", "full_attention"]
    config.save_pretrained(other)
    with pytest.raises(NotAvailable, match="layer_types linear_attention is not supported yet"):
        load_model(other, flag="--hf-checkpoint")


@pytest.mark.parametrize("kind", ["Qwen3_5Config", "Qwen3NextConfig"])
def test_what_is_not_trained_is_written_as_it_was(tmp_path: Path, kind: str):
    path = write_gated_model(tmp_path / "model", kind)
    source = SafetensorsDir(path)
    backend = Runner(make_settings(path, lr=1e-4)).backend
    left_out = backend.untrained_weights()
    assert all(name.startswith("model.visual.") for name in left_out) and bool(left_out) == (kind == "Qwen3_5Config")
    weights, sizes = backend.named_weights(), backend.weight_sizes()
    write_trained(tmp_path / "export", weights, sizes, torch.float32, Path(path), left_out)
    save_checkpoint(tmp_path / "saved", backend, alone(), TrainerState(step=0, updates=0), Path(path), optimizer=False)
    for written in ("export", "saved"):
        found = SafetensorsDir(tmp_path / written)
        assert found.tensors.keys() == source.tensors.keys()
        for name, tensor in found:
            torch.testing.assert_close(tensor, source.load(name), rtol=0, atol=0, msg=name)


def test_compiled_gated_models_train_as_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Traced and differentiated as ever, without the minutes that code for a CPU takes.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    path = write_gated_model(tmp_path / "model", "Qwen3NextConfig", num_hidden_layers=2, num_experts=0,
                             layer_types=["linear_attention", "full_attention"])  # fmt: skip
    samples = [s for i, s in enumerate(make_samples()) if i % 4 == 0]
    with torch.compiler.set_stance("default"):
        found: list[dict[str, Any]] = []
        for compile in (False, True):
            runner = Runner(make_settings(path, lr=1e-4, max_tokens_per_gpu=64, compile=compile,
                                          rewards_normalization=False))  # fmt: skip
            found.append(runner.run(0, [Sample(**{**vars(copy.copy(s)), "reward": float(i)})
                                        for i, s in enumerate(samples)]))  # fmt: skip
    assert not runner.backend._compiler.failed  # type: ignore[attr-defined]
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-6), name


def test_a_row_of_a_gated_model_may_be_padded(tmp_path: Path):
    path = write_gated_model(tmp_path / "model", "Qwen3_5TextConfig")
    samples = samples_of_lengths(5, 9)

    def log_probs(multiple: int) -> tuple[Tensor, PackedBatch]:
        batch = pack(samples, range(2), [0.0] * 2, [1.0] * 2, share_prompts=False, multiple=multiple)
        (outputs,) = Runner(make_settings(path)).backend.scores([batch])
        return outputs.log_probs, batch

    (plain, shorter), (padded, longer) = log_probs(1), log_probs(32)
    assert longer.tokens.shape[1] > shorter.tokens.shape[1]
    torch.testing.assert_close(padded, plain)
