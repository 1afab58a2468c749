"""Run by test_trainer_megatron_critic in several processes; see `trainer_processes.run_cases`."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trainer_megatron_ranks import CP, EP, PP, SP, TP, VIRTUAL, batch_of
from trainer_processes import quick_cases, run_cases
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.backends.build import open_checkpoints
from slime.trainer.checkpoints.checkpoint import TrainerState
from slime.trainer.process.collective import Ranks
from slime.trainer.step.critic import clipped_value_loss

SHARDED = {"use_distributed_optimizer": True}
# name -> (world size, model, Megatron's arguments, settings of the trainer)
EVERY_CASE: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "data": (2, "dense", SHARDED, {"async_save": True}),
    "data-whole": (2, "dense", {}, {}),
    "tensor": (2, "tied", {TP: 2}, {}),
    "tensor-sequence": (2, "dense", {TP: 2, SP: True}, {"recompute_loss_function": True}),
    "context": (2, "tied", {CP: 2}, {}),
    "pipeline": (2, "tied", {PP: 2}, {}),
    "pipeline-virtual": (2, "dense", VIRTUAL, {}),
    "experts": (2, "experts", {EP: 2}, {}),
    "tensor-context": (4, "dense", {TP: 2, CP: 2, SP: True}, {}),
    "tensor-data": (4, "tied", {TP: 2} | SHARDED, {}),
}
CASES = quick_cases(EVERY_CASE, {"data-whole", "tensor", "pipeline", "tensor-data"})


def settings_of(directory: Path, model: str, **values: Any) -> Any:
    """The critic begins with that of MODEL-critic, whose head is not zero."""
    return make_settings(
        str(directory / model), advantage_estimator="ppo", gamma=0.95, lambd=0.9, num_critic_only_steps=1,
        critic_lr=2e-2, max_tokens_per_gpu=60, critic_load=str(directory / f"{model}-critic"), **values,
    )  # fmt: skip


def numbers(runner: Runner) -> dict[str, Any]:
    """Values of every sample by its position, and the loss of fixed returns, whose gradient is added up."""
    batches, share = batch_of(runner)
    found: dict[str, Any] = {}
    for positions, batch, outputs in zip(share, batches, runner.critic.scores(batches), strict=True):
        if batch is not None:
            parts = outputs.values.split(batch.lengths)
            found |= {str(p): part.tolist() for p, part in zip(positions, parts, strict=True)}
    sums = {"loss": 0.0}

    def loss(number: int, batch: Any, outputs: Any) -> torch.Tensor:
        old = torch.full_like(outputs.values, 0.1)
        of_tokens, _ = clipped_value_loss(outputs.values, old, torch.ones_like(old), 0.5)
        value = (batch.weights * of_tokens).sum()
        sums["loss"] += float(value.detach())
        return value

    runner.critic.forward_backward(batches, loss)
    everywhere: dict[str, Any] = {"loss": 0.0}
    for of_rank in runner.ranks.gather([found, runner.critic.leads_replica and sums["loss"]]):
        everywhere |= of_rank[0]
        everywhere["loss"] += float(of_rank[1])
    return everywhere


def steps(runner: Runner, *numbers: int) -> list[dict[str, float]]:
    found = [runner.run(step, make_samples(step, groups=4, size=4)) for step in numbers]
    return [{name: value for name, value in metrics.items() if name.startswith("train/")} for metrics in found]


def measure(case: str, ranks: Ranks, models: Path) -> dict[str, Any]:
    """Gradients go to MODELS/CASE-gradients.safetensors, a checkpoint after two steps to MODELS/CASE."""
    from slime.trainer.backends.megatron.model import parallel

    _, model, megatron, values = CASES[case]
    settings = settings_of(models, model, train_backend="megatron", **values)
    runner = Runner(settings, ranks, megatron=megatron)
    found = numbers(runner)
    gradients = {name: tensor.clone() for name, tensor in runner.critic.named_gradients()}
    if ranks.rank == 0:
        save_file(gradients, models / f"{case}-gradients.safetensors")
    runner.critic.optimizer.zero_grad()
    found["steps"] = steps(runner, 0, 1)
    source, path = models / model, models / case
    checkpoints = open_checkpoints(settings, runner.backend, ranks, source, runner.critic)
    checkpoints.save(path / "iter_0000001", TrainerState(step=1, updates=runner.backend.updates))
    found["steps"] += steps(runner, 2)
    assert checkpoints.finish(wait=True) == 1
    weights = {f"critic {name}": weight.clone() for name, weight in runner.critic.named_weights()} | runner.weights()
    parallel.destroy()
    settings = dataclasses.replace(settings, load=str(path))
    resumed = Runner(settings, ranks, weights=settings.load, megatron=megatron)
    again = open_checkpoints(settings, resumed.backend, ranks, source, resumed.critic)
    again.load(str(path), TrainerState(step=1, updates=1))
    found["updates"] = [resumed.backend.updates, resumed.critic.updates]
    found["resumed"] = steps(resumed, 2)
    weights_again = {f"critic {name}": weight.clone() for name, weight in resumed.critic.named_weights()}
    weights_again |= resumed.weights()
    found["differing"] = [name for name, weight in weights.items() if not torch.equal(weight, weights_again[name])]
    parallel.destroy()
    return found


if __name__ == "__main__":
    import sys

    run_cases({name: partial(measure, name) for name, case in CASES.items() if case[0] == int(sys.argv[2])})
