"""Run by test_trainer_megatron_losses in one and in two processes; see `trainer_processes.run_cases`."""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from trainer_megatron_ranks import CP, EP, PP, SP, TP
from trainer_processes import run_cases
from trainer_tiny import VOCAB, Runner, make_settings, summarize

from slime.trainer.batching.packing import pack
from slime.trainer.batching.plan import Planner, assign
from slime.trainer.process.collective import Ranks
from slime.types import Sample

AUX = {"moe_aux_loss_coeff": [0.01], "moe_router_load_balancing_type": ["aux_loss"], "moe_z_loss_coeff": 0.001}

# name -> (world size, model, Megatron's arguments, tokens of a micro-batch)
CASES: dict[str, tuple[int, str, dict[str, Any], int]] = {
    "ahead": (1, "ahead", {}, 20),
    "ahead-heavier": (1, "ahead", {"mtp_loss_scaling_factor": 0.6}, 20),
    "ahead-one-row": (1, "ahead", {}, 1000),
    "ahead-recomputed": (1, "ahead", {"recompute_granularity": "full", "recompute_method": "uniform",
                                      "recompute_num_layers": 1}, 20),
    "ahead-data": (2, "ahead", {}, 20),
    "ahead-tensor": (2, "ahead", {TP: 2}, 20),
    "ahead-sequence": (2, "ahead", {TP: 2, SP: True}, 20),
    "ahead-pipeline": (2, "ahead", {PP: 2}, 20),
    "ahead-context": (2, "ahead", {CP: 2}, 20),
    "routers": (1, "experts", AUX, 20),
    "routers-heavier": (1, "experts", AUX | {"moe_aux_loss_coeff": [0.03], "moe_z_loss_coeff": 0.003}, 20),
    "routers-one-row": (1, "experts", AUX, 1000),
    "routers-recomputed": (1, "experts", AUX | {"recompute_granularity": "full", "recompute_method": "uniform",
                                                "recompute_num_layers": 1}, 20),
    "routers-data": (2, "experts", AUX, 20),
    "routers-tensor": (2, "experts", AUX | {TP: 2, SP: True}, 20),
    "routers-pipeline": (2, "experts", AUX | {PP: 2}, 20),
    "routers-context": (2, "experts", AUX | {CP: 2}, 20),
    "routers-experts": (2, "experts", AUX | {EP: 2}, 20),
}  # fmt: skip


def samples(length: int = 9) -> list[Sample]:
    """8 sequences that all train. Of 9 tokens 8 are fed: these need no padding, which routers would see."""
    random = np.random.default_rng(7)
    return [
        Sample(
            index=i, group_index=i // 4, tokens=random.integers(2, VOCAB, length).astype(np.int32), response_length=4,
            loss_mask=None, reward=float(i % 2),
        )
        for i in range(8)
    ]  # fmt: skip


def runner_of(case: str, ranks: Ranks, models: Path) -> Runner:
    _, model, megatron, tokens = CASES[case]
    settings = make_settings(
        str(models / model), train_backend="megatron", max_tokens_per_gpu=tokens, enable_mtp_training=model == "ahead"
    )
    return Runner(settings, ranks, megatron=megatron)


def accumulate(runner: Runner) -> dict[str, float]:
    """The gradient of the model's own losses alone, and those losses."""
    plan = Planner(runner.settings).plan(0, summarize(samples()))
    # Whatever its reward every sample is fed.
    plan["updates"][0] |= {"train": list(range(8)), "skipped": []}
    backend = runner.backend
    share = assign(plan, 0, backend.replicas, runner.settings, backend.hidden_size, backend.micro_batch_multiple)
    batches = [
        pack([samples()[p] for p in ps], ps, [0.0] * len(ps), [1.0] * len(ps), share_prompts=False) if ps else None
        for ps in share[backend.replica]
    ]
    runner.backend.forward_backward(batches, lambda number, batch, outputs: outputs.log_probs.sum() * 0.0)
    return backend.model_losses()


def measure(case: str, ranks: Ranks, models: Path) -> dict[str, Any]:
    """The losses; the gradient goes to MODELS/CASE.safetensors."""
    from slime.trainer.backends.megatron.model import parallel

    runner = runner_of(case, ranks, models)
    losses = accumulate(runner)
    gradients = {name: tensor.clone() for name, tensor in runner.backend.named_gradients()}
    if ranks.rank == 0:
        save_file({n: g for n, g in gradients.items() if "e_score" not in n}, models / f"{case}.safetensors")
    runner.backend.optimizer.zero_grad()
    step = runner.run(0, [dataclasses.replace(sample) for sample in samples()])
    parallel.destroy()
    return {"losses": losses, "step": {name: value for name, value in step.items() if name.startswith("train/")}}


def slope(ranks: Ranks, models: Path) -> dict[str, float]:
    """Change of the multi-token-prediction loss along its own gradient, scaled to length 1."""
    runner = runner_of("ahead", ranks, models)
    accumulate(runner)
    parameters = [p for p in runner.backend.models[0].parameters() if p.main_grad.abs().max() > 0]
    length = torch.sqrt(sum((p.main_grad**2).sum() for p in parameters))
    directions = [p.main_grad / length for p in parameters]
    found = []
    for distance in (-1e-2, 1e-2):
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=distance)
        runner.backend.optimizer.zero_grad()
        found.append(accumulate(runner)["mtp_loss"])
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(direction, alpha=-distance)
    return {"gradient": float(length), "slope": (found[1] - found[0]) / 2e-2}


def cases(world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: partial(measure, name) for name, case in CASES.items() if case[0] == world_size}
    return found | ({"slope": slope} if world_size == 1 else {})


if __name__ == "__main__":
    import sys

    run_cases(cases(int(sys.argv[2])))
