"""Runs trainers of TRL on given samples, as `python parity_trl.py DIR` in an environment that has TRL.

Reads DIR/job.json (samples, cases) and the models DIR/policy, DIR/old and DIR/reference; writes of every case
DIR/trl-CASE.safetensors (gradients by parameter, and "loss", "advantages"). What is compared is TRL's own code from
rewards to the backward pass: only generation is replaced, by `rollout_func`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def run(directory: Path, job: dict[str, Any], name: str) -> None:
    case, samples = job["cases"][name], job["samples"]
    weights = {kind: load_file(directory / kind / "model.safetensors") for kind in ("policy", "old", "reference")}
    args = GRPOConfig(
        output_dir=str(directory / "trl"), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        gradient_checkpointing=False, per_device_train_batch_size=len(samples), gradient_accumulation_steps=1,
        num_generations=job["group_size"], max_completion_length=job["max_length"], disable_dropout=True,
        **{"scale_rewards": "none", "beta": 0.0} | case["trl"],
    )  # fmt: skip
    tokenizer = PreTrainedTokenizerFast.from_pretrained(directory / "policy")
    trainer = GRPOTrainer(
        model=str(directory / "policy"),
        reward_funcs=lambda **_: [sample["reward"] for sample in samples],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(samples))]),
        processing_class=tokenizer,
        rollout_func=lambda *_: {
            "prompt_ids": [s["prompt"] for s in samples],
            "completion_ids": [s["response"] for s in samples],
            "logprobs": [s["rollout_log_probs"] for s in samples],
            "env_mask": [s["mask"] for s in samples],
        },
    )
    if case["engine"]:
        # Only vLLM's correction of log-probs is used.
        trainer.use_vllm, trainer._last_loaded_step = True, trainer.state.global_step
    trainer.current_gradient_accumulation_steps = 1
    if trainer.ref_model is not None:
        trainer.ref_model.load_state_dict(weights["reference"])
    trainer.model.train()
    if case["off_policy"]:
        # Old log-probs are those of the weights that score; the loss is that of the policy.
        trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation = 1, 2
        trainer.model.load_state_dict(weights["old"])
    batch = trainer._generate_and_score_completions([{"prompt": str(i)} for i in range(len(samples))])
    trainer.args.steps_per_generation = 1
    assert ("old_per_token_logps" in batch) == (case["off_policy"] or case["engine"])
    trainer.model.load_state_dict(weights["policy"])
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    found = {key: p.grad.clone() for key, p in trainer.model.named_parameters() if p.grad is not None}
    found |= {"loss": loss.detach(), "advantages": batch["advantages"]}
    save_file({key: tensor.contiguous() for key, tensor in found.items()}, directory / f"trl-{name}.safetensors")


def run_rloo(directory: Path, job: dict[str, Any], name: str) -> None:
    """On policy. The loss is divided by the longest response, as the reducer on the other side does."""
    samples = job["samples"]
    args = RLOOConfig(
        output_dir=str(directory / "trl"), use_cpu=True, bf16=False, report_to=[], save_strategy="no",
        gradient_checkpointing=False, per_device_train_batch_size=len(samples), gradient_accumulation_steps=1,
        num_generations=job["group_size"], max_completion_length=job["max_length"], disable_dropout=True, beta=0.0,
    )  # fmt: skip
    trainer = RLOOTrainer(
        model=str(directory / "policy"),
        reward_funcs=lambda **_: [sample["reward"] for sample in samples],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": str(i)} for i in range(len(samples))]),
        processing_class=PreTrainedTokenizerFast.from_pretrained(directory / "policy"),
    )
    trainer._generate = lambda _: (
        [s["prompt"] for s in samples], [s["response"] for s in samples], ["" for _ in samples]
    )  # fmt: skip
    # RLOOTrainer has no masks of tokens that the policy did not write.
    longest = max(len(s["mask"]) for s in samples)
    mask = torch.tensor([s["mask"] + [0] * (longest - len(s["mask"])) for s in samples])
    compute = trainer._get_per_token_logps_and_entropies

    def masked(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        log_probs, *rest = compute(*args, **kwargs)
        return log_probs * mask, *rest

    trainer._get_per_token_logps_and_entropies = masked
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": str(i)} for i in range(len(samples))])
    loss = trainer._compute_loss(trainer.model, batch) / job["max_length"]
    loss.backward()
    found = {key: p.grad.clone() for key, p in trainer.model.named_parameters() if p.grad is not None}
    found |= {"loss": loss.detach(), "advantages": batch["advantages"]}
    save_file({key: tensor.contiguous() for key, tensor in found.items()}, directory / f"trl-{name}.safetensors")


def main() -> None:
    directory = Path(sys.argv[1])
    torch.set_num_threads(1)
    job = json.loads((directory / "job.json").read_text())
    for name in job["cases"]:
        (run_rloo if job["cases"][name]["trainer"] == "rloo" else run)(directory, job, name)


if __name__ == "__main__":
    main()
