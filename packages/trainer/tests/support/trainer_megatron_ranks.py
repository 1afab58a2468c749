"""Run by test_trainer_megatron_layouts: `trainer_megatron_ranks.py RANK WORLD_SIZE DIR MODELS`; with `gated` at the end
by test_trainer_megatron_gated, with `families` by test_trainer_megatron_families, with `vision` by
test_trainer_megatron_vision, with `gated-vision` by test_trainer_megatron_gated_images.

MODELS: directory with the models `dense`, `tied` and `experts`. A case writes CASE.json and CASE.safetensors in DIR.
"""

import json
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from trainer_processes import run_ranks
from trainer_tiny import Runner, make_samples, make_settings, summarize
from trainer_tiny_vision import make_image_samples

from slime.trainer.batching.packing import pack
from slime.trainer.batching.plan import Planner, assign
from slime.trainer.process.collective import Ranks
from slime.trainer.trainer import pick_device
from slime.types import Sample

TP, PP, CP, EP = (
    f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")
)  # names of Megatron's arguments
SP = "sequence_parallel"
VIRTUAL = {PP: 2, "num_layers_per_virtual_pipeline_stage": 1}

# world size -> name -> (model, Megatron's arguments, settings of the trainer)
Cases = dict[int, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]]
CASES: Cases = {
    1: {
        "alone": ("dense", {}, {}),
        "alone-tied": ("tied", {}, {}),
        "alone-experts": ("experts", {}, {}),
        "recompute": ("dense", {"recompute_granularity": "full", "recompute_method": "uniform",
                                "recompute_num_layers": 1}, {}),
    },
    2: {
        "data": ("dense", {}, {}),
        "data-sharded-optimizer": ("dense", {"use_distributed_optimizer": True}, {}),
        "data-overlapped": ("dense", {"use_distributed_optimizer": True, "overlap_grad_reduce": True,
                                      "overlap_param_gather": True}, {}),
        "tensor": ("dense", {TP: 2}, {}),
        "tensor-tied": ("tied", {TP: 2}, {"log_probs_chunk_size": 3}),
        "tensor-sequence": ("dense", {TP: 2, SP: True}, {"entropy_coef": 0.01}),
        "tensor-experts": ("experts", {TP: 2, SP: True}, {}),
        "pipeline": ("dense", {PP: 2}, {"use_kl_loss": True, "kl_loss_coef": 0.1}),
        "pipeline-tied": ("tied", {PP: 2}, {}),
        "pipeline-virtual": ("dense", VIRTUAL, {}),
        "pipeline-passes": ("dense", {PP: 2}, {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_rollout_entropy": True,
                                               "log_probs_max_tokens_per_gpu": 40, "recompute_loss_function": True}),
        "tensor-padded": ("dense", {TP: 2}, {"data_pad_size_multiplier": 8, "recompute_loss_function": True,
                                             "use_rollout_entropy": True, "entropy_coef": 0.01}),
        "context": ("dense", {CP: 2}, {"entropy_coef": 0.01}),
        "tensor-nuclei": ("dense", {TP: 2, SP: True}, {"rollout_top_p": 0.9, "entropy_coef": 0.01}),
        "context-nuclei": ("tied", {CP: 2}, {"rollout_top_k": 20, "use_kl_loss": True, "kl_loss_coef": 0.1}),
        "experts": ("experts", {EP: 2}, {}),
        "experts-sharded-optimizer": ("experts", {EP: 2, "use_distributed_optimizer": True}, {}),
    },
    4: {
        "tensor-pipeline": ("dense", {TP: 2, PP: 2, SP: True}, {}),
        "tensor-context": ("dense", {TP: 2, CP: 2, SP: True}, {"data_pad_size_multiplier": 4}),
        "tensor-data": ("tied", {TP: 2, "use_distributed_optimizer": True}, {}),
        "pipeline-context": ("tied", {PP: 2, CP: 2}, {}),
        "everything-experts": ("experts", {TP: 2, EP: 2, SP: True, "expert_tensor_parallel_size": 1}, {}),
    },
}  # fmt: skip

# With gated models: `dense` is a Qwen3.5, `experts` a Qwen3-Next.
GATED_CASES: Cases = {
    1: {"alone": ("dense", {}, {}), "alone-experts": ("experts", {}, {})},
    2: {
        "tensor": ("dense", {TP: 2}, {}),
        "tensor-sequence": ("experts", {TP: 2, SP: True}, {}),
        "context": ("dense", {CP: 2}, {}),
        "pipeline": ("dense", {PP: 2}, {}),
        "experts-recompute": (
            "experts", {EP: 2, "recompute_granularity": "full", "recompute_method": "uniform",
                        "recompute_num_layers": 1}, {},
        ),
    },
    4: {
        "tensor-context": ("experts", {TP: 2, CP: 2, SP: True}, {"data_pad_size_multiplier": 4}),
        "pipeline-context": ("dense", {PP: 2, CP: 2}, {}),
    },
}  # fmt: skip

# With models of MiniMax-M2 and GLM-5; two ranks have the same key of `one-key`.
FAMILY_CASES: Cases = {
    1: {"alone": ("minimax", {}, {}), "alone-sparse": ("sparse", {}, {})},
    2: {
        "tensor": ("minimax", {TP: 2, SP: True, "use_distributed_optimizer": True}, {}),
        "tensor-one-key": ("one-key", {TP: 2, SP: True}, {}),
        "tensor-experts": ("minimax", {TP: 2, SP: True, EP: 2, "expert_tensor_parallel_size": 1}, {}),
        "context": ("minimax", {CP: 2}, {}),
        "pipeline-recompute": (
            "minimax", {PP: 2, "recompute_granularity": "full", "recompute_method": "uniform",
                        "recompute_num_layers": 1}, {},
        ),
        "tensor-sparse": ("sparse", {TP: 2, SP: True, "use_distributed_optimizer": True}, {}),
        "context-sparse": ("sparse", {CP: 2}, {}),
        "pipeline-sparse": ("sparse", {PP: 2, "recompute_granularity": "selective"}, {}),
    },
    4: {
        "tensor-pipeline": ("one-key", {TP: 2, PP: 2, SP: True}, {}),
        "tensor-context-sparse": ("sparse", {TP: 2, CP: 2, SP: True}, {"data_pad_size_multiplier": 4}),
    },
}  # fmt: skip
# With a Qwen3-VL of four layers, the first two of which see images; updates of its samples train on 1, 2 and no images.
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
VISION_CASES: Cases = {
    1: {"alone": ("untied", {}, {}), "recompute": ("untied", FULL, {})},
    2: {
        "data-overlapped": ("untied", {"use_distributed_optimizer": True, "overlap_grad_reduce": True,
                                       "overlap_param_gather": True}, {}),
        "tensor": ("tied", {TP: 2}, {}),
        "tensor-sequence": ("untied", {TP: 2, SP: True}, {"entropy_coef": 0.01}),
        "tensor-recompute": ("tied", {TP: 2, SP: True, **FULL}, {"use_kl_loss": True, "kl_loss_coef": 0.1}),
        "context": ("untied", {CP: 2}, {}),
        "pipeline": ("tied", {PP: 2}, {}),
        "pipeline-recompute": ("untied", {PP: 2, **FULL}, {}),
    },
    4: {
        "tensor-pipeline": ("untied", {TP: 2, PP: 2, SP: True}, {}),
        "tensor-context": ("untied", {TP: 2, CP: 2, SP: True}, {"data_pad_size_multiplier": 4}),
    },
}  # fmt: skip
# With a Qwen3.5 of four layers, whose embedding alone sees images.
_SEES = {"train_vision": True}
GATED_VISION_CASES: Cases = {
    2: {
        "tensor-sequence": ("images", {TP: 2, SP: True, **FULL}, _SEES),
        "context": ("images", {CP: 2}, _SEES),
        "pipeline": ("images", {PP: 2}, _SEES),
    },
}
OF_OTHERS = {
    "gated": GATED_CASES, "families": FAMILY_CASES, "vision": VISION_CASES, "gated-vision": GATED_VISION_CASES,
}  # fmt: skip


def samples_of(runner: Runner) -> list[Sample]:
    if runner.backend.vision is not None:
        return make_image_samples(runner.backend.vision.model_type)
    return make_samples(groups=4, size=4, nuclei=runner.settings.samples_from_nuclei)


def batch_of(runner: Runner) -> tuple[list[Any], list[Any]]:
    """This replica's micro-batches of the first update, and the positions in them."""
    samples = samples_of(runner)
    plan = Planner(runner.settings).plan(0, summarize(samples))
    backend = runner.backend
    share = assign(plan, 0, backend.replicas, runner.settings, backend.hidden_size, backend.micro_batch_multiple)
    return [
        pack([samples[p] for p in ps], ps, [plan["rewards"][p] for p in ps], [plan["weights"][p] for p in ps],
             share_prompts=backend.can_share_prompts, nuclei=runner.settings.samples_from_nuclei,
             vision=backend.vision, device=backend.device) if ps else None
        for ps in share[backend.replica]
    ], share[backend.replica]  # fmt: skip


def numbers(runner: Runner) -> dict[str, Any]:
    """Log-probs of every sample by its position, and the loss and the entropy of a fixed loss function."""
    batches, share = batch_of(runner)
    found: dict[str, Any] = {}
    for positions, batch, values in zip(share, batches, runner.backend.log_probs(batches), strict=True):
        if batch is not None:
            found |= {str(p): part.tolist() for p, part in zip(positions, values.split(batch.lengths), strict=True)}
    sums = {"loss": 0.0}

    def loss(number: int, batch: Any, outputs: Any) -> torch.Tensor:
        value = (batch.weights * (outputs.log_probs * outputs.log_probs.detach() + 0.1 * outputs.entropy)).sum()
        sums["loss"] += float(value.detach())
        return value

    runner.backend.forward_backward(batches, loss, entropy="gradient")
    everywhere: dict[str, Any] = {}
    for of_rank in runner.ranks.gather([found, runner.backend.leads_replica and sums["loss"]]):
        everywhere |= of_rank[0]
        everywhere["loss"] = everywhere.get("loss", 0.0) + float(of_rank[1])
    return everywhere


def run_layouts(factory: Any, models: Path, kind: str = "") -> dict[int, Path]:
    """Runs all cases of a kind of models, for a fixture; returns the directory of each world size."""
    directories = {size: factory.mktemp(f"ranks{size}") for size in (OF_OTHERS[kind] if kind else CASES)}
    for size, directory in directories.items():
        run_ranks("trainer_megatron_ranks.py", size, directory, str(models), *([kind] if kind else []))
    return directories


def of_one_rank(model: Path, **values: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns what `run` writes of a case, from one rank of fsdp: numbers, gradients, and the weights after a step."""
    settings = make_settings(str(model), max_tokens_per_gpu=60, **values)
    runner = Runner(settings)
    found = numbers(runner)
    gradients = {
        name: part.clone()
        for of, parameter in runner.backend.policy.named_parameters()
        if parameter.requires_grad
        for name, part in runner.backend._in_files(of, parameter.grad)
    }
    runner.backend._optimizer.clear_gradients()
    found["step"] = runner.run(0, samples_of(runner))
    return found, gradients, runner.weights()


def written(directory: Path, case: str) -> tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Returns the numbers, gradients and weights that `run` wrote of a case; fails with the errors of its ranks."""
    errors = [path.read_text() for path in sorted(directory.glob(f"{case}-*.error"))]
    assert not errors, errors[0][-3000:]
    found = json.loads((directory / f"{case}.json").read_text())
    return found, load_file(directory / f"{case}-gradients.safetensors"), load_file(directory / f"{case}.safetensors")


def assert_same_step(expected: tuple[Any, ...], got: tuple[Any, ...]) -> None:
    """Compares results of `of_one_rank` and `written`, of models with gated delta nets in float32: the loss, the
    log-probs of each sample, metrics, and gradients by their norms."""
    (numbers, gradients, _), (found, of_layout, _) = expected, got
    np.testing.assert_allclose(found["loss"], numbers["loss"], rtol=1e-4)
    for position, values in numbers.items():
        if position.isdigit():
            np.testing.assert_allclose(found[position], values, rtol=0, atol=1e-4, err_msg=position)
    for name in ("train/grad_norm", "train/entropy_loss"):
        np.testing.assert_allclose(found["step"][name], numbers["step"][name], rtol=1e-3, err_msg=name)
    assert of_layout.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (of_layout[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


def of_transformers(model: Path, samples: list[Any]) -> torch.Tensor:
    """Returns the log-probs of the samples' responses, end to end, as transformers computes them."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    for sample in samples:
        tokens = torch.tensor(np.asarray(sample.tokens), dtype=torch.int64)
        log_probs = plain(tokens[None]).logits[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
        found.append(log_probs[-sample.response_length :])
    return torch.cat(found)


def run(case: str, ranks: Ranks, directory: Path, models: Path, cases: Cases) -> None:
    from slime.trainer.backends.megatron.model import parallel

    model, megatron, values = cases[ranks.world_size][case]
    path = str(models / model)
    settings = make_settings(path, train_backend="megatron", max_tokens_per_gpu=60, **values)
    runner = Runner(settings, ranks, megatron=megatron)
    metrics = numbers(runner)
    gradients = {name: tensor.clone() for name, tensor in runner.backend.named_gradients()}
    runner.backend.optimizer.zero_grad()
    metrics["step"] = runner.run(0, samples_of(runner))
    weights = runner.weights()
    if ranks.rank == 0:
        (directory / f"{case}.json").write_text(json.dumps(metrics))
        save_file(gradients, directory / f"{case}-gradients.safetensors")
        save_file(weights, directory / f"{case}.safetensors")
    parallel.destroy()


def main() -> None:
    rank, world_size, directory, models = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    cases = OF_OTHERS[sys.argv[5]] if len(sys.argv) > 5 else CASES
    torch.set_num_threads(1)
    device = pick_device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ranks = Ranks(rank, world_size, f"file://{directory}/rendezvous", 2, device.type)
    for case in cases[world_size]:
        try:
            run(case, ranks, directory, models, cases)
        except Exception:
            # Whatever is left of the case on the other ranks would wait for this one.
            (directory / f"{case}-{rank}.error").write_text(traceback.format_exc())
            raise
    ranks.close()


if __name__ == "__main__":
    main()
