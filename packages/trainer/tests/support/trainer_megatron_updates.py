"""Run by test_trainer_megatron_updates in two processes; see `trainer_processes.run_cases`."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from trainer_megatron_ranks import PP, SP, TP, batch_of
from trainer_processes import run_cases
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.backends.base import NonFiniteGradient
from slime.trainer.process.collective import Ranks
from slime.types.errors import SlimeError

SHARDED = {"use_distributed_optimizer": True}
ONLY = "only_train_params_name_list"
FREEZE = "freeze_params_name_list"

# name -> (Megatron's arguments, settings)
FROZEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "only-tensor": ({TP: 2, **SHARDED}, {ONLY: [r"layers\.1\.mlp", "final_layernorm"]}),
    "freeze-tensor": ({TP: 2}, {FREEZE: ["embedding", r"layers\.0\."]}),
    # The second stage has nothing that trains.
    "only-pipeline": ({PP: 2, **SHARDED}, {ONLY: [r"decoder\.layers\.0\.self_attention"]}),
    "freeze-pipeline": ({PP: 2}, {FREEZE: ["mlp", "output_layer"]}),
    "only-data-bf16": (SHARDED, {ONLY: ["linear_qkv"], "bf16": True}),
}
NOTHING = {"nothing-only": {ONLY: ["no_such_layer"]}, "nothing-freeze": {FREEZE: [""]}}
REFERENCE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reference": ({TP: 2}, {}),
    "reference-sharded": (SHARDED, {}),
    "reference-bf16": ({**SHARDED, TP: 2, SP: True}, {"bf16": True}),
    "reference-overlapped": ({**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}, {"bf16": True}),
}


def runner_of(ranks: Ranks, models: Path, megatron: dict[str, Any], values: dict[str, Any]) -> Runner:
    settings = make_settings(str(models / "dense"), train_backend="megatron", max_tokens_per_gpu=60, **values)
    return Runner(settings, ranks, megatron=megatron)


def moved(name: str, ranks: Ranks, models: Path) -> list[str]:
    """Names of weights that a step changed."""
    from slime.trainer.backends.megatron.model import parallel

    runner = runner_of(ranks, models, *FROZEN[name])
    before = runner.weights()
    runner.run(0, make_samples(groups=4, size=4))
    after = runner.weights()
    parallel.destroy()
    return sorted(n for n, weight in before.items() if not torch.equal(weight, after[n]))


def refused(name: str, ranks: Ranks, models: Path) -> str:
    try:
        runner_of(ranks, models, {PP: 2}, NOTHING[name])
    except SlimeError as error:
        return f"{error.field}: {error}"
    return "no error"


def not_finite(ranks: Ranks, models: Path) -> dict[str, Any]:
    """The error of a step whose loss is infinite for one token, what it changed, and the step after it."""
    runner = runner_of(ranks, models, {TP: 2, **SHARDED}, {"bf16": True})
    batches, _ = batch_of(runner)
    before = [parameter.clone() for parameter in _persistent(runner)]

    def loss(number: int, batch: Any, outputs: Any) -> torch.Tensor:
        value = (batch.weights * outputs.log_probs).sum()
        return value * (float("inf") if number == 1 else 1.0)

    runner.backend.forward_backward(batches, loss)
    try:
        runner.backend.optimizer_step()
        error = ""
    except NonFiniteGradient as failure:
        error = str(failure)
    same = all(torch.equal(a, b) for a, b in zip(before, _persistent(runner), strict=True))
    metrics = runner.run(0, make_samples(groups=4, size=4))
    fresh = runner_of(ranks, models, {TP: 2, **SHARDED}, {"bf16": True}).run(0, make_samples(groups=4, size=4))
    return {"error": error, "same": same, "norm": metrics["train/grad_norm"], "fresh": fresh["train/grad_norm"]}


def _persistent(runner: Runner) -> list[torch.Tensor]:
    """The model's tensors and the optimizer's float32 weights."""
    found = [t for chunk in runner.backend.models for t in chunk.state_dict().values() if torch.is_tensor(t)]
    groups = runner.backend.optimizer.wrapped.param_groups
    return found + [parameter for group in groups for parameter in group["params"]]


def reference(name: str, ranks: Ranks, models: Path) -> dict[str, Any]:
    """Checks that a pass of the reference leaves the policy alone, and that its log-probs stay what they were."""
    from slime.trainer.backends.megatron.model import parallel

    megatron, values = REFERENCE[name]
    runner = runner_of(ranks, models, megatron, values | {"use_kl_loss": True, "ref_load": str(models / "other")})
    backend = runner.backend
    batches, _ = batch_of(runner)
    first = backend.log_probs(batches, reference=True)
    runner.run(0, make_samples(groups=4, size=4))
    policy = backend.log_probs(batches)
    before = [tensor.clone() for tensor in _persistent(runner)]
    second = backend.log_probs(batches, reference=True)
    backend.optimizer.settle()
    result = {
        "policy_kept": all(torch.equal(a, b) for a, b in zip(before, _persistent(runner), strict=True)),
        "policy_says_the_same": _equal(policy, backend.log_probs(batches)),
        "reference_kept": _equal(first, second),
        "they_differ": not _equal(first, policy),
        "second_step": runner.run(1)["train/grad_norm"],
    }
    parallel.destroy()
    return result


def _equal(one: list[Any], other: list[Any]) -> bool:
    return all(a is b or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def precision(ranks: Ranks, models: Path) -> dict[str, Any]:
    """A step in bfloat16 and in float32 at TP 2, and the types in which gradients add up."""
    from slime.trainer.backends.megatron.model import parallel

    found: dict[str, Any] = {}
    for name, bf16 in (("bf16", True), ("fp32", False)):
        runner = runner_of(ranks, models, {TP: 2}, {"bf16": bf16})
        metrics = runner.run(0, make_samples(groups=4, size=4))
        found[name] = {key: metrics[f"train/{key}"] for key in ("grad_norm", "pg_loss", "entropy_loss")}
        parameters = list(runner.backend.models[0].parameters())
        found[name]["weights"] = sorted({str(p.dtype) for p in parameters})
        found[name]["gradients"] = sorted({str(p.main_grad.dtype) for p in parameters})
        parallel.destroy()
    return found


CASES: dict[str, Any] = {
    **{name: partial(moved, name) for name in FROZEN},
    **{name: partial(refused, name) for name in NOTHING},
    "not-finite": not_finite,
    **{name: partial(reference, name) for name in REFERENCE},
    "precision": precision,
}

if __name__ == "__main__":
    run_cases(CASES)
