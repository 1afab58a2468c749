"""`slime train` of a model with experts, from the first weight update on: each backend with the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from slow_cases import slow
from tiny_runs import metrics, run_command, write_inputs

BACKENDS = {
    "fsdp": ("--train-backend", "fsdp"),
    "megatron": ("--train-backend", "megatron", "--expert-model-parallel-size", "2", "--use-rollout-routing-replay"),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's tokenizer and data with another model of as many tokens."""
    import torch
    from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

    directory = write_inputs(tmp_path_factory.mktemp("experts"))
    dense = AutoConfig.from_pretrained(directory / "model")
    torch.manual_seed(0)
    # With a pad token its row is 0, where a norm's gradient is huge, and transformers trains no such row.
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=None,
        eos_token_id=1, bos_token_id=None, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True, initializer_range=0.3,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(directory / "model")
    return directory


@pytest.mark.parametrize("backend", [pytest.param("fsdp", marks=slow), "megatron"])
def test_what_was_trained_is_what_generates(inputs: Path, tmp_path: Path, backend: str) -> None:
    saved = tmp_path / "saved"
    run_command(
        "train", inputs, tmp_path / "run", *BACKENDS[backend], "--actor-num-gpus-per-node", "2",
        "--num-rollout", "3", "--check-weight-update-equal",
        "--save", str(tmp_path / "checkpoints"), "--save-interval", "3", "--save-hf", str(saved / "{rollout_id}"),
    )  # fmt: skip
    steps = [row for row in metrics(tmp_path / "run") if "train/loss" in row]
    assert [row["rollout/weight_version_min"] for row in steps] == [0, 1, 2]
    for row in steps:
        assert row["train/train_rollout_logprob_abs_diff"] < 1e-5
    (model,) = saved.rglob("model.safetensors")
    assert _names(model) == _names(inputs / "model" / "model.safetensors")


def _names(file: Path) -> set[str]:
    with safe_open(file, "np") as opened:
        return set(opened.keys())
