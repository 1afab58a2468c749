"""Run in two processes by test_trainer_ranks: `python trainer_ranks.py RANK WORLD_SIZE DIR MODEL REFERENCE`."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from trainer_tiny import Runner, make_samples, make_settings, turn_samples

from slime.trainer.backends.base import REFERENCE
from slime.trainer.checkpoints import checkpoint
from slime.trainer.process.collective import Ranks
from slime.trainer.step.device_memory import PARTS, DeviceMemory
from slime.trainer.step.old_policies import OldPolicies
from slime.trainer.trainer import pick_device
from slime.types.errors import DataLoss, InvalidField, NotFound, SlimeError

CASES = {
    "grpo": {"num_steps_per_rollout": 2},
    "kl": {"use_kl_loss": True, "kl_loss_coef": 0.1, "balance_data": True},
    "whitened": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1},
    # Fewer samples with a gradient than ranks could want: one rank has nothing to do.
    "idle": {"max_tokens_per_gpu": 1000},
    "passes": {
        "num_steps_per_rollout": 2, "log_probs_max_tokens_per_gpu": 14, "balance_by_flops": True,
        "data_pad_size_multiplier": 8, "recompute_loss_function": True, "use_rollout_entropy": True,
    },
    # The samples of a group are read by both ranks at first.
    "turns": {"max_tokens_per_gpu": 48, "num_steps_per_rollout": 1, "use_rollout_entropy": True},
    # Seven samples.
    "dynamic": {"use_dynamic_global_batch_size": True},
    # A log-prob that is not a number, on one rank, in the first of two updates.
    "skipping": {"num_steps_per_rollout": 2, "use_rollout_logprobs": True, "skip_nonfinite_updates": True},
    # In bfloat16 with parts of the optimizer, replayed rows' path included, and with parts of everything.
    "bf16": {"bf16": True, "lr": 1e-4, "num_steps_per_rollout": 2, "entropy_coef": 0.01},
    "bf16-rows": {"bf16": True, "lr": 1e-4, "compile": True},
    "bf16-idle": {"bf16": True, "lr": 1e-4, "max_tokens_per_gpu": 1000},
    "bf16-parts": {"bf16": True, "lr": 1e-4, "num_steps_per_rollout": 2, "fsdp_sharding": "parameters"},
    "ppo": {"advantage_estimator": "ppo", "lambd": 0.9, "num_steps_per_rollout": 2, "critic_lr": 2e-2},
    "bf16-ppo": {"advantage_estimator": "ppo", "bf16": True, "lr": 1e-4, "critic_lr": 1e-3},
    "lora": {"lora_rank": 4, "num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1},
    "bf16-lora": {"bf16": True, "lr": 1e-4, "lora_rank": 4, "num_steps_per_rollout": 2},
    # The reference model is the policy without adapters there.
    "bf16-lora-parts": {
        "bf16": True, "lr": 1e-4, "lora_rank": 4, "fsdp_sharding": "parameters", "use_kl_loss": True,
        "num_steps_per_rollout": 2, "kl_loss_coef": 0.1, "ref_load": None,
    },
    "bf16-lora-idle": {"bf16": True, "lr": 1e-4, "lora_rank": 4, "max_tokens_per_gpu": 1000},
    "moving": {"use_kl_loss": True, "kl_loss_coef": 0.1, "keep_old_actor": True, "reset_optimizer_states": True},
}  # fmt: skip


def drive(name: str, runner: Runner) -> dict[str, float]:
    """Runs a case and returns its metrics."""
    if name.endswith("idle"):
        samples = make_samples(groups=2, size=3)
        for sample in samples[1:]:
            sample.reward, sample.remove_sample = 0.0, True
        return runner.run(0, samples)
    if name == "turns":
        metrics = runner.run(0, turn_samples())
        return metrics | runner.ranks.add_numbers({"all/row_tokens": metrics["perf/row_tokens"]})
    if name == "dynamic":
        return runner.run(0, make_samples()[:7])
    if name == "skipping":
        samples = make_samples()
        samples[1].rollout_log_probs = [float("nan")] * samples[1].response_length
        return runner.run(0, samples)
    if name != "moving":
        return runner.run(0)
    # Between rollouts all memory is away, the reference becomes the policy, and old tokens come from the first weights.
    policies = runner._step.preparation.old_policies = OldPolicies(runner.backend, 0)
    memory = DeviceMemory(runner.backend, enabled=True, device_types=("cpu",))
    memory.release(*PARTS)
    memory.need(*PARTS)
    runner.run(0)
    runner.backend.keep(REFERENCE)
    policies.keep(1)
    memory.release(*PARTS)
    memory.need(*PARTS)
    samples = make_samples(1)
    for number, sample in enumerate(samples):
        sample.weight_versions = [str(number % 2)]
    return runner.run(1, samples)


def run(ranks: Ranks, directory: Path, model: str, reference: str) -> None:
    # Layers and log-probs as they are, in the place of compiled ones, which take minutes.
    torch.compile = lambda function: function
    for name, values in CASES.items():
        runner = Runner(make_settings(model, **({"ref_load": reference} | values)), ranks)
        metrics = drive(name, runner)
        weights = runner.weights()
        if ranks.rank == 0:
            (directory / f"{name}.json").write_text(json.dumps(metrics))
            save_file(weights, directory / f"{name}.safetensors")
        if name in ("grpo", "bf16", "lora", "bf16-lora"):
            state = checkpoint.TrainerState(step=0, updates=runner.backend.updates, weight_version=1)
            checkpoint.save_checkpoint(directory / f"checkpoint-{name}", runner.backend, ranks, state, Path(model))


def fail(ranks: Ranks, directory: Path, model: str) -> None:
    """An error on one rank reaches the other; so does one of the rank that writes."""
    runner = Runner(make_settings(model), ranks)
    samples = make_samples()
    if ranks.rank == 1:
        for sample in samples:
            sample.tokens = [token + 1000 for token in sample.tokens]
    errors = [_caught(lambda: runner.run(0, samples))]
    (directory / "file").write_text("")
    target = directory / "file" / "below-a-file"
    state = checkpoint.TrainerState()
    errors.append(_caught(lambda: checkpoint.save_checkpoint(target, runner.backend, ranks, state, Path(model))))
    errors.append(f"{runner.run(0)['train/grad_norm']:.6f}")
    errors.append(_caught(lambda: ranks.together(lambda: _lose(ranks.rank))))
    (directory / f"errors-{ranks.rank}.json").write_text(json.dumps(errors))


def _lose(rank: int) -> None:
    raise DataLoss("its samples are damaged") if rank == 1 else NotFound("the step is not sealed any more")


def _caught(work) -> str:
    try:
        work()
    except (SlimeError, OSError) as error:
        return (
            f"{type(error).__name__}: {error}"
            if not isinstance(error, InvalidField)
            else f"InvalidField[{error.field}]: {error}"
        )
    return "no error"


if __name__ == "__main__":
    rank, world_size, directory, model, reference = sys.argv[1:]
    torch.set_num_threads(1)
    if pick_device(int(rank)).type == "cuda":
        torch.cuda.set_device(pick_device(int(rank)))
    group = Ranks(int(rank), int(world_size), f"file://{directory}/rendezvous", 2, pick_device(int(rank)).type)
    run(group, Path(directory), model, reference)
    fail(group, Path(directory), model)
    group.close()
