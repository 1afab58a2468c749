"""Run by test_trainer_routing in one and in two processes; see `trainer_processes.run_cases`."""

import sys
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

LAYERS, TOP_K, EXPERTS = 2, 2, 4
WHOLE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# name -> (world size, settings, Megatron's arguments or None for fsdp)
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any] | None]] = {
    "fsdp": (1, {}, None),
    "fsdp-recomputed": (1, {"gradient_checkpointing": True}, None),
    "fsdp-compile": (1, {"compile": True}, None),
    "megatron": (1, {}, {}),
    "megatron-recomputed": (1, {}, WHOLE),
    "megatron-data": (2, {}, {}),
    "megatron-sequence": (2, {}, {TP: 2, SP: True}),
    "megatron-pipeline": (2, {}, {PP: 2}),
    "megatron-pipeline-recomputed": (2, {}, {PP: 2} | WHOLE),
    "megatron-virtual": (2, {}, {PP: 2, "num_layers_per_virtual_pipeline_stage": 1}),
    "megatron-context": (2, {}, {CP: 2}),
    "megatron-experts": (2, {}, {EP: 2}),
}


def samples(layers: int = LAYERS) -> list[Sample]:
    """4 groups of 2 with equal prompts. The engine did not route what a tool wrote at the end of the last."""
    random = np.random.default_rng(3)

    def routed(rows: int) -> np.ndarray:
        return np.stack([
            [random.permutation(EXPERTS)[:TOP_K] for _ in range(layers)] for _ in range(rows)
        ]).astype(np.int32)  # fmt: skip

    found = []
    for group in range(4):
        prompt, experts_of_prompt = random.integers(2, VOCAB, 4), routed(4)
        for i in range(2):
            length = 3 + i
            found.append(
                Sample(
                    index=2 * group + i, group_index=group, reward=float(i), response_length=length,
                    tokens=np.concatenate([prompt, random.integers(2, VOCAB, length)]).astype(np.int32),
                    rollout_routed_experts=np.concatenate([experts_of_prompt, routed(length - 1)]),
                )
            )  # fmt: skip
    assert found[-1].rollout_routed_experts is not None
    found[-1].rollout_routed_experts[-2:] = -1
    return found


def weight_of(position: int) -> float:
    return 1.0 - 0.3 * position


def runner_of(case: str, ranks: Ranks, models: Path, **flags: Any) -> Runner:
    _, settings, megatron = CASES[case]
    model = models / ("deep" if case == "megatron-virtual" else "experts")
    values = {"train_backend": "fsdp" if megatron is None else "megatron", "max_tokens_per_gpu": 20} | settings | flags
    return Runner(make_settings(str(model), **values), ranks, megatron=megatron)


def batches_of(runner: Runner) -> list[Any]:
    known = samples(4 if "deep" in runner.settings.hf_checkpoint else LAYERS)
    plan = Planner(runner.settings).plan(0, summarize(known))
    plan["updates"][0] |= {"train": list(range(len(known))), "skipped": []}
    backend = runner.backend
    share = assign(plan, 0, backend.replicas, runner.settings, backend.hidden_size, backend.micro_batch_multiple)
    return [
        pack(
            [known[p] for p in ps], ps, [0.0] * len(ps), [weight_of(p) for p in ps],
            share_prompts=backend.can_share_prompts, experts=backend.replayed_experts and backend.replayed_experts[:2],
        ) if ps else None
        for ps in share[backend.replica]
    ]  # fmt: skip


def by_position(batches: list[Any], values: list[Any]) -> dict[str, list[float]]:
    return {
        str(p): part.tolist()
        for batch, of_batch in zip(batches, values, strict=True)
        if batch is not None and of_batch is not None
        for p, part in zip(batch.positions, of_batch.split(batch.lengths), strict=True)
    }


def train(runner: Runner, batches: list[Any]) -> list[Any]:
    """Log-probs of the pass that trains, where this rank has them; the gradients are those of their weighted sum."""
    seen: list[Any] = [None] * len(batches)

    def loss(number: int, batch: Any, outputs: Any) -> torch.Tensor:
        seen[number] = outputs.log_probs.detach()
        return (outputs.log_probs * batch.weights).sum()

    runner.backend.forward_backward(batches, loss)
    return seen


def gradients_of(runner: Runner) -> dict[str, torch.Tensor]:
    backend: Any = runner.backend
    if backend.name == "megatron":
        return {name: tensor.clone() for name, tensor in backend.named_gradients()}
    return {name: gradient.clone() for name, gradient in backend._optimizer.gradients()}


def from_rollout(case: str, ranks: Ranks, models: Path) -> dict[str, Any]:
    """Log-probs with the experts of the samples, and of a reference, which chooses by itself; the gradient goes to
    MODELS/CASE.safetensors."""
    runner = runner_of(case, ranks, models, use_rollout_routing_replay=True, use_kl_loss=True)
    batches = batches_of(runner)
    scored = by_position(batches, runner.backend.log_probs(batches))
    compared = by_position(batches, runner.backend.log_probs(batches, reference=True))
    trained = by_position(batches, train(runner, batches))
    gradients = gradients_of(runner)
    if ranks.rank == 0:
        save_file({n: g for n, g in gradients.items() if "e_score" not in n}, models / f"{case}.safetensors")
    _destroy(runner)
    return {"scored": scored, "trained": trained, "compared": compared}


def recorded(case: str, ranks: Ranks, models: Path) -> dict[str, Any]:
    """Log-probs of a pass that records, and of one that trains with other routers: as they are, and replayed."""
    found: dict[str, Any] = {}
    for name, flags in (("free", {}), ("replayed", {"use_routing_replay": True})):
        runner = runner_of(case, ranks, models, **flags)
        batches = batches_of(runner)
        backend: Any = runner.backend
        before = by_position(batches, backend.log_probs(batches))
        modules = backend.models if backend.name == "megatron" else [backend.policy]
        with torch.no_grad():
            for module in modules:
                for key, parameter in module.named_parameters():
                    if key.endswith(("router.weight", "mlp.gate.weight")):
                        # Its rows in another order: other experts have the largest scores.
                        parameter.copy_(parameter.flip(0) * 1.5)
        found[name] = {"before": before, "after": by_position(batches, train(runner, batches))}
        _destroy(runner)
    return found


def _destroy(runner: Runner) -> None:
    if runner.backend.name == "megatron":
        from slime.trainer.backends.megatron.model import parallel

        parallel.destroy()


def cases(world_size: int) -> dict[str, Any]:
    chosen = [name for name, case in CASES.items() if case[0] == world_size]
    found: dict[str, Any] = {name: partial(from_rollout, name) for name in chosen}
    return found | {f"{name}+recorded": partial(recorded, name) for name in chosen}


if __name__ == "__main__":
    run_cases(cases(int(sys.argv[2])))
