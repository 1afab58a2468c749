"""Losses that a Megatron model adds by itself: of multi-token-prediction layers and of routers."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_losses import CASES
from trainer_processes import results_of
from trainer_tiny import (
    VOCAB,
    Runner,
    make_samples,
    make_settings,
    write_ahead_model,
    write_biased_model,
    write_model,
)  # fmt: skip

from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.trainer.checkpoints.checkpoint import write_model as write_hf

AHEAD = [name for name in CASES if name.startswith("ahead-")]
ROUTERS = [name for name in CASES if name.startswith("routers-")]
# In which the numbers are others.
DIFFERENT = {"ahead-heavier", "routers-heavier", "routers-one-row"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    write_ahead_model(directory / "ahead")
    write_model(directory / "experts", experts=4)
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for size in (1, 2):
        found |= results_of("trainer_megatron_losses.py", size, tmp_path_factory.mktemp(f"ranks{size}"), models)
    for name, of_ranks in found.items():
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks), name
    return {name: of_ranks[0] for name, of_ranks in found.items()}


def assert_gradients(found: Path, expected: Path, factor: float = 1.0) -> None:
    got, wanted = load_file(found), load_file(expected)
    assert got.keys() == wanted.keys()
    scale = factor * max(float(g.abs().max()) for g in wanted.values())
    assert scale > 0
    for name, gradient in wanted.items():
        assert float((got[name] - factor * gradient).abs().max()) <= 2e-5 * scale, name


@pytest.mark.parametrize("case", [name for name in AHEAD + ROUTERS if name not in DIFFERENT])
def test_the_losses_and_their_gradients_are_those_of_one_rank(results: dict[str, Any], models: Path, case: str):
    alone = case.split("-")[0]
    assert results[case]["losses"] == pytest.approx(results[alone]["losses"], rel=1e-5)
    assert_gradients(models / f"{case}.safetensors", models / f"{alone}.safetensors")
    assert results[case]["step"]["train/grad_norm"] == pytest.approx(
        results[alone]["step"]["train/grad_norm"], rel=1e-5
    )


@pytest.mark.parametrize("alone", ["ahead", "routers"])
def test_the_gradient_is_in_proportion_to_the_coefficient(results: dict[str, Any], models: Path, alone: str):
    assert results[f"{alone}-heavier"]["losses"] == pytest.approx(results[alone]["losses"], rel=1e-6)
    # The default of mtp_loss_scaling_factor is 0.2.
    assert_gradients(models / f"{alone}-heavier.safetensors", models / f"{alone}.safetensors", factor=3.0)


def test_layers_that_predict_ahead_add_their_mean_over_the_tokens_of_the_update(results: dict[str, Any]):
    # 6 of a sequence's 8 tokens have a token after the next; the metric is the mean of their losses.
    assert results["slope"]["gradient"] == pytest.approx(0.2 * results["slope"]["slope"] * 6 / 8, rel=1e-2)


def test_padding_of_the_vocabulary_is_no_token_to_predict(results: dict[str, Any], models: Path):
    # Where all logits are 0 the loss is that of VOCAB equal choices, among 128 rows of the output layer.
    settings = make_settings(str(models / "ahead"), train_backend="megatron", enable_mtp_training=True)
    runner = Runner(settings)
    with torch.no_grad():
        runner.backend.models[0].output_layer.weight.zero_()
    assert runner.run()["train/mtp_loss"] == pytest.approx(float(torch.tensor(VOCAB).log()), rel=1e-6)


def test_the_losses_are_metrics_of_the_step(results: dict[str, Any]):
    for case in CASES:
        for name, value in results[case]["losses"].items():
            assert results[case]["step"][f"train/{name}"] == pytest.approx(value, rel=1e-5), (case, name)
    assert set(results["ahead"]["losses"]) == {"mtp_loss"}
    assert set(results["routers"]["losses"]) == {"moe_aux_loss", "moe_z_loss"}
    # At its least, where all experts have equally much to do, it is 1.
    assert 1.0 <= results["routers"]["losses"]["moe_aux_loss"] < 4.0


def test_what_routers_add_depends_on_the_cut_into_micro_batches_alone(results: dict[str, Any]):
    # It is of each micro-batch: the product of two means over it. The z-loss is one mean.
    one, several = results["routers-one-row"]["losses"], results["routers"]["losses"]
    assert one["moe_z_loss"] == pytest.approx(several["moe_z_loss"], rel=1e-5)
    assert one["moe_aux_loss"] < several["moe_aux_loss"]


def test_without_training_them_layers_that_predict_ahead_stay_as_they_were(models: Path, tmp_path: Path):
    runner = Runner(make_settings(str(models / "ahead"), train_backend="megatron"))
    assert "train/mtp_loss" not in runner.run()
    names = {name for name, _ in runner.backend.named_weights()}
    assert not any("mtp_layers" in name for name in names)
    # A directory written for others to load has them as they were.
    sizes, left_out = runner.backend.weight_sizes(), runner.backend.untrained_weights()
    write_hf(tmp_path / "hf", runner.backend.named_weights(), sizes, torch.float32, models / "ahead", left_out)
    written, source = SafetensorsDir(tmp_path / "hf"), SafetensorsDir(models / "ahead")
    assert written.tensors.keys() == source.tensors.keys()
    assert left_out and all(torch.equal(written.load(name), source.load(name)) for name in left_out)
    trained = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(written.load(trained), source.load(trained))
    retrained = Runner(make_settings(str(tmp_path / "hf"), train_backend="megatron", enable_mtp_training=True))
    assert retrained.run()["train/mtp_loss"] > 0


ROUTED = {"moe_aux_loss_coeff": [0.5], "moe_router_load_balancing_type": ["aux_loss"]}
NO_OP = "def keep(args, rollout_id, rollout_data):\n    pass\n"


@pytest.mark.parametrize("equal", ["some", "all"])
@pytest.mark.parametrize("name, values, megatron", [
    ("ahead", {"train_backend": "megatron", "enable_mtp_training": True}, {}),
    ("experts", {"train_backend": "megatron"}, ROUTED),
    ("experts", {"train_backend": "fsdp"}, {}),
])  # fmt: skip
def test_equal_rewards_cost_no_loss_of_the_model(
    models: Path, tmp_path: Path, name: str, values: dict[str, Any], megatron: dict[str, Any], equal: str
):
    """The gradient is the one of feeding every sample, which a function that may change advantages forces."""
    (tmp_path / "hook.py").write_text(NO_OP)
    samples = make_samples()
    for sample in samples:
        sample.reward = 1.0 if equal == "all" or sample.group_index else sample.reward
    samples[0].remove_sample = True
    found = []
    for hook in (None, f"{tmp_path}/hook.py:keep"):
        settings = make_settings(str(models / name), rollout_data_postprocess_path=hook, max_tokens_per_gpu=10**6)
        settings = dataclasses.replace(settings, **values)
        runner = Runner(settings, megatron=megatron or None)
        found.append((runner.run(0, [dataclasses.replace(s) for s in samples]), runner.weights()))
    (metrics, weights), (expected, expected_weights) = found
    if values["train_backend"] == "megatron":
        assert metrics["train/skipped_samples"] == 0 and metrics["train/grad_norm"] > 1e-3
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5, abs=1e-7)
    for weight_name, weight in expected_weights.items():
        assert torch.allclose(weights[weight_name], weight, atol=1e-5), weight_name


def test_biases_of_routers_count_the_tokens_of_every_sample(tmp_path: Path):
    directory = write_biased_model(tmp_path / "biased")
    runner = Runner(make_settings(directory, train_backend="megatron"), megatron={"moe_router_bias_update_rate": 0.1})
    before = {n: w for n, w in runner.weights().items() if "e_score" in n}
    samples = make_samples()
    for sample in samples:
        sample.reward = 1.0
    runner.run(0, samples)
    assert any(not torch.equal(before[name], weight) for name, weight in runner.weights().items() if name in before)


def test_an_update_without_samples_reports_no_loss_of_the_update_before(models: Path):
    settings = make_settings(str(models / "experts"), train_backend="megatron", num_steps_per_rollout=2)
    runner = Runner(settings, megatron=ROUTED)
    samples = make_samples()
    plan = runner.plan(0, samples)
    plan["updates"][1] |= {"train": [], "skipped": plan["updates"][1]["train"]}
    of_first = []
    model_losses = runner.backend.model_losses
    runner.backend.model_losses = lambda: of_first.append(model_losses()) or of_first[-1]  # type: ignore[method-assign]
    runner.step(plan, samples)
    assert of_first[0]["moe_aux_loss"] > 0 and of_first[1] == {}
