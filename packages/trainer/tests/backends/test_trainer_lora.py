"""LoRA: steps against float64, merged weights, the reference inside the policy, and what is refused."""

import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from trainer_float64 import LORA_LAYERS, Lora64, reference_log_probs, write_adapter
from trainer_tiny import (
    Runner,
    alone,
    make_samples,
    make_settings,
    write_fp8_model,
    write_gated_model,
    write_model,
)

from slime.trainer.backends.base import REFERENCE
from slime.trainer.backends.fsdp.lora import LoraLinear
from slime.trainer.batching.packing import pack
from slime.trainer.checkpoints import checkpoint
from slime.trainer.settings.sharding import whole_bytes
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable

RANK = 4


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch):
    """torch.compile that hands functions back: what is around them is tested without the minutes that it takes."""
    monkeypatch.setattr(torch, "compile", lambda function: function)


@examples(max_examples=30, deadline=None)
@given(rank=st.integers(1, 9), alpha=st.floats(0.1, 64), seed=st.integers(0, 99), bias=st.booleans())
def test_a_layer_is_its_weight_and_an_update_of_low_rank(rank: int, alpha: float, seed: int, bias: bool):
    generator = torch.Generator().manual_seed(seed)
    linear = torch.nn.Linear(7, 5, bias=bias)
    layer, x = LoraLinear(linear, rank, alpha / rank, generator), torch.randn(3, 7, generator=generator)
    assert torch.equal(layer(x), linear(x))
    # Kaiming's uniform numbers with a = sqrt(5), as in peft, are at most 1 / sqrt(n).
    assert 0 < layer.lora_A.weight.abs().max() <= 7**-0.5
    with torch.no_grad():
        layer.lora_B.weight.copy_(torch.randn(5, rank, generator=generator))
    merged = linear.weight + alpha / rank * layer.lora_B.weight @ layer.lora_A.weight
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, merged, linear.bias), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"max_tokens_per_gpu": 13, "gradient_checkpointing": True},
        {"compile": True, "clip_grad": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.5, "kl_loss_type": "k3"},
        {"lora_target_modules": ["q_proj", "mlp.up_proj", "lm_head"]},
        {"lora_target_modules": ["all-linear", "lm_head"], "lora_rank": 2},
    ],
    ids=lambda values: next(iter(values), "plain"),
)
def test_a_step_equals_its_float64_reference(model: str, tmp_path: Path, values: dict[str, Any]):
    s = make_settings(model, **{"lora_rank": RANK, "lora_alpha": 6.0} | values)
    names = {name.rpartition(".")[2] for name in s.lora_target_modules}
    start = write_adapter(tmp_path / "adapter", s, ends=(*(LORA_LAYERS if "all-linear" in names else ()), *names))
    reference = Lora64(model, load_file(Path(start) / "adapter_model.safetensors"), 6.0 / s.lora_rank)
    runner, samples, loss = Runner(s, weights=start), make_samples(), 0.0
    metrics = runner.run(0, samples)
    for sample in samples:
        group = [x.reward for x in samples if x.group_index == sample.group_index]
        reward = (sample.reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6)
        mask, log_probs = torch.tensor(sample.loss_mask).double(), reference_log_probs(reference, sample)
        token_loss = -(log_probs - log_probs.detach()).exp() * reward
        if s.use_kl_loss:
            gap = reference_log_probs(reference.base, sample).detach() - log_probs
            token_loss = token_loss + s.kl_loss_coef * (gap.exp() - gap - 1)
        loss = loss + (mask * token_loss).sum() / mask.sum() / len(samples)
    loss.backward()
    adapter = list(reference.adapter.values())
    norm = torch.nn.utils.clip_grad_norm_(adapter, s.clip_grad)
    torch.optim.AdamW(adapter, lr=1e-2, weight_decay=0.1).step()
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), abs=5e-6)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert sum(p.requires_grad for p in runner.backend.policy.parameters()) == len(adapter)
    expected = reference.weights()
    for name, weight in runner.weights().items():
        # One step of AdamW moves a weight by lr * sign(g): where g is about 0, float32 may not know its sign.
        assert ((weight.double() - expected[name]).abs() > 1e-4).double().mean() < 0.02, name


def test_log_probs_are_those_of_the_merged_weights(model: str, tmp_path: Path):
    s = make_settings(model, lora_rank=RANK)
    start = write_adapter(tmp_path / "adapter", s)
    reference = Lora64(model, load_file(Path(start) / "adapter_model.safetensors"), s.lora_alpha / RANK)
    samples = make_samples()
    runner = Runner(s, weights=start)
    n = len(samples)
    batch = pack(samples, range(n), [0.0] * n, [1.0] * n, share_prompts=True, device=runner.backend.device)
    (got,) = runner.backend.log_probs([batch])
    expected = torch.cat([reference_log_probs(reference, sample) for sample in samples])
    torch.testing.assert_close(got.double(), expected * batch.mask, atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
def test_weights_are_merged_from_the_frozen_base_every_time(model: str, bf16: bool):
    dtype = torch.bfloat16 if bf16 else torch.float32
    runner = Runner(make_settings(model, lora_rank=RANK, bf16=bf16, lora_alpha=8.0))
    backend = runner.backend
    base = {name: tensor.to(dtype) for name, tensor in load_file(Path(model) / "model.safetensors").items()}
    for step in range(2):
        runner.run(step)
        held = dict(backend.policy.named_parameters())
        sent = dict(backend.named_weights(dtype=dtype))
        assert sent.keys() == base.keys() == backend.weight_sizes().keys()
        for name, weight in base.items():
            # The base is held in the type that is computed with, and nothing moves it.
            assert torch.equal(held[name], weight) and held[name].dtype == dtype
            a, b = (held.get(f"{name.removesuffix('weight')}{part}.weight") for part in ("lora_A", "lora_B"))
            merged = weight if a is None else (weight.float() + 2.0 * b.float() @ a.float()).to(dtype)
            torch.testing.assert_close(sent[name], merged, rtol=8e-3 if bf16 else 1e-6, atol=1e-6)
            assert torch.equal(sent[name], weight) == (a is None)
        again = dict(backend.named_weights(dtype=dtype))
        assert all(torch.equal(again[name], weight) for name, weight in sent.items())


@pytest.mark.parametrize("kind", ["dense", "experts", "Qwen3_5Config"])
def test_an_export_adds_updates_to_the_frozen_weights_of_the_files(kind: str, model: str, tmp_path: Path):
    if kind == "experts":
        model = write_model(tmp_path / "experts", experts=4)
    elif kind != "dense":
        # Its files have other names than the model that is trained.
        model = write_gated_model(tmp_path / "nested", kind)
    runner = Runner(make_settings(model, lora_rank=RANK, bf16=True, lora_alpha=8.0))
    runner.run()
    adapter, base = runner.backend.adapter(), load_file(Path(model) / "model.safetensors")
    updates = dict(adapter.weights)
    # Computed with in bfloat16, and exported in the type of the files.
    assert {p.dtype for p in runner.backend.policy.parameters() if not p.requires_grad} == {torch.bfloat16}
    sent = dict(runner.backend.named_weights(dtype=torch.bfloat16))
    exported = runner.weights()
    assert exported.keys() == sent.keys() == base.keys() - set(runner.backend.untrained_weights())
    assert len(updates) >= 16
    for name in exported:
        weight = base[name]
        a, b = (updates.get(f"{name.removesuffix('weight')}{part}.weight") for part in ("lora_A", "lora_B"))
        expected = weight if a is None else weight + 2.0 * b @ a
        torch.testing.assert_close(exported[name], expected, rtol=1e-6, atol=1e-6 if a is not None else 0)
        assert sent[name].dtype == torch.bfloat16


@pytest.mark.parametrize("bf16", [False, True])
def test_only_adapters_have_gradients_master_weights_and_moments(model: str, bf16: bool):
    runner = Runner(make_settings(model, lora_rank=RANK, bf16=bf16))
    runner.run()
    layers = [p for n, p in runner.backend.policy.named_parameters() if "_proj.weight" in n]
    adapter = sum(RANK * sum(p.shape) for p in layers)
    assert len(layers) == 14 and sum(runner.backend.optimizer_sizes().values()) == 2 * adapter
    training = sum(tensor.numel() for tensor, _ in runner.backend.device_tensors("training"))
    # Two moments, and in bfloat16 gradients and float32 weights; beside them, counts of updates and padding.
    assert (2 + 2 * bf16) * adapter <= training < (2.2 + 2 * bf16) * adapter


def test_adapters_begin_the_same_for_a_seed_and_differ_between_seeds(model: str):
    def adapter(seed: int) -> torch.Tensor:
        backend = Runner(make_settings(model, lora_rank=RANK, seed=seed)).backend
        return backend.policy.get_parameter("model.layers.1.mlp.up_proj.lora_A.weight")

    assert torch.equal(adapter(1), adapter(1)) and not torch.equal(adapter(1), adapter(2))


@pytest.mark.parametrize("values", [{}, {"bf16": True}, {"use_routing_replay": True, "num_steps_per_rollout": 2}])
def test_the_reference_is_the_policy_without_adapters(model: str, tmp_path: Path, values: dict[str, Any]):
    if "use_routing_replay" in values:
        model = write_model(tmp_path / "experts", experts=4)
    kl = {"use_kl_loss": True, "kl_loss_coef": 0.1, **values}
    lora = Runner(make_settings(model, lora_rank=RANK, ref_load=model, **kl))
    assert lora.backend.reference is None
    loaded = Runner(make_settings(shutil.copytree(model, tmp_path / "copy"), lora_rank=RANK, ref_load=model, **kl))
    # Another directory is another model, as far as settings tell.
    assert loaded.backend.reference is not None
    for step in range(3):
        got, expected = lora.run(step), loaded.run(step)
        assert got["train/kl_loss"] == expected["train/kl_loss"]
        assert (got["train/kl_loss"] != 0.0) == (step > 0 or "num_steps_per_rollout" in values)
    weights = loaded.weights()
    assert all(torch.equal(weights[name], weight) for name, weight in lora.weights().items())


def test_the_policy_becomes_the_reference(model: str):
    runner = Runner(make_settings(model, lora_rank=RANK, use_kl_loss=True, ref_update_interval=1))
    runner.run(0)
    assert runner.run(1)["train/kl_loss"] != pytest.approx(0.0, abs=1e-6)
    runner.backend.keep(REFERENCE)
    assert runner.run(2)["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert runner.run(3)["train/kl_loss"] != pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("bf16", [False, True])
def test_older_adapters_score_as_they_did(model: str, bf16: bool):
    runner, samples = Runner(make_settings(model, lora_rank=RANK, bf16=bf16)), make_samples()
    n = len(samples)
    batch = pack(samples, range(n), [0.0] * n, [1.0] * n, share_prompts=True, device=runner.backend.device)
    runner.run(0)
    before = runner.backend.log_probs([batch])[0]
    runner.backend.keep("old")
    runner.run(1)
    weights = runner.weights()
    (old,) = runner.backend.scores([batch], of="old")
    assert torch.equal(old.log_probs, before) and not torch.equal(runner.backend.log_probs([batch])[0], before)
    assert all(torch.equal(weights[name], weight) for name, weight in runner.weights().items())


def test_a_critic_beside_adapters_trains_all_of_its_weights(model: str, tmp_path: Path):
    s = make_settings(model, lora_rank=RANK, advantage_estimator="ppo", num_steps_per_rollout=2)
    runner = Runner(s)
    before = {name: weight.clone() for name, weight in runner.critic.named_weights()}
    runner.run(0)
    assert not any(torch.equal(before[name], weight) for name, weight in runner.critic.named_weights())
    state = checkpoint.TrainerState(step=0, updates=runner.backend.updates)
    checkpoint.save_checkpoint(tmp_path / "c", runner.backend, alone(), state, Path(model), critic=runner.critic)
    assert (tmp_path / "c" / "adapter_config.json").is_file() and not (tmp_path / "c" / "model.safetensors").exists()
    assert load_file(tmp_path / "c" / "critic" / "model.safetensors").keys() == before.keys()


def test_experts_stay_as_they_are_and_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    runner = Runner(make_settings(write_model(tmp_path / "m", experts=4), lora_rank=RANK))
    assert "LoRA trains no experts of this model, but its other linear layers: k_proj, o_proj" in caplog.text
    before = runner.weights()
    runner.run()
    changed = {
        name.split(".")[-2] for name, weight in runner.weights().items() if not torch.equal(before[name], weight)
    }
    assert {"q_proj", "v_proj"} <= changed <= {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_whole_weights_take_less_room_with_adapters():
    assert whole_bytes(1000, 2) == 1000 * (2 + 4 + 6)
    assert whole_bytes(1000, 2, 0, 10) == 2 * 1000 + 10 * (6 + 6)
    assert whole_bytes(1000, 2, 1, 10) == 4 * 1000 + 10 * (6 + 6)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0 requires --lora-rank R"),
        ({"lora_target_modules": ["q_proj"]}, "--lora-target-modules q_proj requires --lora-rank R"),
        ({"lora_rank": 4, "train_backend": "megatron"}, "--lora-rank 4 requires --train-backend fsdp"),
        ({"lora_rank": 4, "true_on_policy_mode": True}, "--lora-rank 4 and --true-on-policy-mode cannot be used"),
        (
            {"lora_rank": 4, "use_kl_loss": True, "ref_update_interval": 2, "ref_load": "other"},
            "--ref-update-interval 2 and --ref-load other cannot be used together",
        ),
    ],
)
def test_settings_that_contradict_lora_are_named(values: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        make_settings("model", **values)


def test_models_and_layers_that_get_no_adapters_are_named(model: str, tied_model: str, tmp_path: Path):
    with pytest.raises(
        InvalidSetting,
        match="--lora-target-modules must be all-linear, or names of .* by spaces: down_proj .* got 'w1'",
    ):
        Runner(make_settings(model, lora_rank=RANK, lora_target_modules=["q_proj", "w1"]))
    with pytest.raises(NotAvailable, match="lm_head for this model is not supported yet: its output layer shares"):
        Runner(make_settings(tied_model, lora_rank=RANK, lora_target_modules=["lm_head"]))
    with pytest.raises(NotAvailable, match="--lora-rank 4 for this model is not supported yet: .* quantized weights"):
        Runner(make_settings(str(write_fp8_model(tmp_path / "fp8")), lora_rank=RANK))


def test_another_adapter_than_the_settings_describe_is_refused(model: str, tmp_path: Path):
    s = make_settings(model, lora_rank=RANK)
    start = write_adapter(tmp_path / "adapter", s)
    for values, words in (
        ({"lora_rank": 8}, "--lora-rank 8 and --load .*: that adapter has 4"),
        ({"lora_rank": 4, "lora_alpha": 5.0}, "--lora-alpha 5 and --load .*: that adapter has 32"),
        ({"lora_rank": 4, "lora_target_modules": ["q_proj"]}, "--lora-target-modules and .*: only that adapter has"),
        ({}, "--load .*adapter requires --lora-rank [0-9]+ --lora-alpha [0-9.]+: it holds a LoRA adapter"),
    ):
        with pytest.raises(InvalidSetting, match=words):
            Runner(make_settings(model, **values), weights=start)
    with pytest.raises(InvalidSetting, match="--lora-rank 4 and --load .*: that directory has no adapter_config.json"):
        Runner(s, weights=model)
    file = Path(start) / "adapter_model.safetensors"
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file(tensors | {name: torch.zeros(1, 1)}, file)
    with pytest.raises(InvalidFile, match=r"lora_A.weight has shape \(1, 1\)"):
        Runner(s, weights=start)
    config = json.loads((Path(start) / "adapter_config.json").read_text())
    (Path(start) / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(InvalidFile, match="expected use_dora False, got True"):
        Runner(s, weights=start)
