"""The critic of the Megatron backend: in every layout that of one rank of `fsdp`, and resumed bit for bit."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_megatron_critic import CASES, numbers, settings_of, steps
from trainer_processes import results_of
from trainer_tiny import Runner, alone, make_settings, write_model

from slime.trainer.backends.build import open_checkpoints
from slime.trainer.checkpoints.checkpoint import CRITIC_DIR, HuggingFaceCheckpoints, TrainerState, read_state
from slime.types.errors import InvalidFile

PPO: dict[str, Any] = {"advantage_estimator": "ppo"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each with a critic that fsdp has saved."""
    directory = tmp_path_factory.mktemp("models")
    write_model(directory / "dense", layers=4)
    write_model(directory / "tied", tied=True)
    write_model(directory / "experts", experts=4)
    for name in ("dense", "tied", "experts"):
        runner = Runner(make_settings(str(directory / name), **PPO))
        head = runner.critic.policy.get_output_embeddings().weight
        head.data.copy_(0.3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(5)))
        saved = directory / f"{name}-saved"
        HuggingFaceCheckpoints(runner.backend, alone(), directory / name, runner.critic).save(saved, TrainerState())
        shutil.move(saved / CRITIC_DIR, directory / f"{name}-critic")
    return directory


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, models: Path) -> dict[str, Any]:
    found: dict[str, list[Any]] = {}
    for size in (2, 4):
        found |= results_of("trainer_megatron_critic.py", size, tmp_path_factory.mktemp(f"ranks{size}"), models)
    return {name: of_ranks[0] for name, of_ranks in found.items()}


@pytest.fixture(scope="module")
def expected(models: Path) -> Any:
    """Returns what one rank of fsdp computes: numbers, gradients by name, metrics of three steps."""
    known: dict[str, Any] = {}

    def of(model: str) -> Any:
        if model not in known:
            runner = Runner(settings_of(models, model))
            found = numbers(runner)
            gradients = {name: p.grad.clone() for name, p in runner.critic.policy.named_parameters()}
            runner.critic._optimizer.clear_gradients()
            known[model] = found, gradients, steps(runner, 0, 1, 2)
        return known[model]

    return of


@pytest.mark.parametrize("case", CASES)
def test_values_losses_and_gradients_are_those_of_fsdps_critic(
    results: dict[str, Any], models: Path, expected: Any, case: str
):
    _, model, megatron, _ = CASES[case]
    (wanted, gradients, of_steps), found = expected(model), results[case]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    positions = [position for position in wanted if position.isdigit()]
    assert positions and all(found[p] == pytest.approx(wanted[p], abs=1e-5) for p in positions)
    got = load_file(models / f"{case}-gradients.safetensors")
    assert got["lm_head.weight"].shape == (1, 32)
    # A distributed optimizer leaves each rank a part of the summed gradient; fsdp stacks experts. The steps tell there.
    if not megatron.get("use_distributed_optimizer") and model != "experts":
        assert got.keys() == gradients.keys()
        scale = max(float(g.abs().max()) for g in gradients.values())
        for name, gradient in gradients.items():
            assert float((got[name] - gradient).abs().max()) <= 1e-5 * scale, name
    for number, metrics in enumerate(of_steps):
        names = [name for name in metrics if name.startswith("train/critic-")]
        for name in [*names, "train/loss", "train/grad_norm"] if number else names:
            assert found["steps"][number][name] == pytest.approx(metrics[name], rel=2e-3, abs=1e-4), (number, name)
    assert of_steps[0]["train/critic-grad_norm"] == pytest.approx(found["steps"][0]["train/critic-grad_norm"], rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_policy_and_critic_resume_as_if_they_had_not_stopped(results: dict[str, Any], case: str):
    found = results[case]
    assert found["updates"] == [1, 2]
    assert found["resumed"] == found["steps"][2:] and found["differing"] == []


@pytest.mark.parametrize("case", ["tensor-sequence", "pipeline-virtual"])
def test_another_layout_resumes_what_several_ranks_saved(results: dict[str, Any], models: Path, case: str):
    saved = models / case
    assert read_state(str(saved / "iter_0000001" / CRITIC_DIR)).updates == 2
    assert [p.name for p in saved.iterdir() if p.name.startswith(".")] == []
    settings = settings_of(models, "dense", train_backend="megatron", load=str(saved))
    runner = Runner(settings, weights=settings.load)
    open_checkpoints(settings, runner.backend, alone(), models / "dense", runner.critic).load(
        str(saved), read_state(str(saved))
    )
    (metrics,), (wanted,) = steps(runner, 2), results[case]["resumed"]
    for name in ("train/critic-value_loss", "train/critic-grad_norm", "train/grad_norm"):
        assert metrics[name] == pytest.approx(wanted[name], rel=1e-4), name


def test_a_critic_begins_with_a_saved_critic_or_with_zeros_for_any_other_model(
    results: dict[str, Any], models: Path, tmp_path: Path
):
    def critic(**values: Any) -> dict[str, torch.Tensor]:
        settings = make_settings(str(models / "dense"), train_backend="megatron", **PPO, **values)
        return dict(Runner(settings).critic.named_weights())

    saved = models / "data" / "iter_0000001"
    head = "lm_head.weight"
    assert not critic()[head].any()
    assert not critic(critic_load=str(models / "data"))[head].any(), "the policy's output layer is not a value head"
    assert not critic(load=str(models / "dense"), critic_load=str(models / "dense"))[head].any()
    assert critic(critic_load=str(saved / CRITIC_DIR))[head].any()
    assert torch.equal(
        critic(critic_load=str(models / "dense-critic"))[head],
        load_file(models / "dense-critic/model.safetensors")[head],
    )


def test_a_critic_of_other_shapes_is_refused(models: Path):
    settings = make_settings(str(models / "dense"), train_backend="megatron", critic_load=str(models / "tied"), **PPO)
    with pytest.raises(
        InvalidFile, match="--critic-load: .*model.layers.2.*a critic of --train-backend megatron has the shapes"
    ):
        Runner(settings)


def test_lists_of_parameters_and_hooks_are_the_policys(models: Path, tmp_path: Path):
    (tmp_path / "hooks.py").write_text("def step(args, rollout, update, chunks, *_):\n    assert chunks\n")
    settings = make_settings(
        str(models / "tied"), train_backend="megatron", only_train_params_name_list=["layers.1"],
        custom_megatron_before_train_step_hook_path=f"{tmp_path}/hooks.py:step", num_critic_only_steps=1, **PPO,
    )  # fmt: skip
    runner = Runner(settings)
    before = {name: weight.clone() for name, weight in runner.critic.named_weights()}
    # While the head is 0, so are the gradients of all other weights.
    for step in range(2):
        runner.run(step)
    after = dict(runner.critic.named_weights())
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
    assert not torch.equal(before["model.layers.0.mlp.up_proj.weight"], after["model.layers.0.mlp.up_proj.weight"])
