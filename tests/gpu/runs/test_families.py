"""Model families, and adapters, in whole runs: SGLang and the trainer compute one model, and updates bring all of it.

    pytest tests/gpu/runs/test_families.py

The models are random and small. SLIME_TEST_ATTENTION: see `--sglang-attention-backend`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_needs import needs, train_on_words, write_words, write_words_qwen3

NUM_GPUS = 1
WORDS = 1024
pytestmark = needs(NUM_GPUS, "sglang")

SIZES: dict[str, Any] = dict(
    vocab_size=WORDS, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    max_position_embeddings=2048, initializer_range=0.05, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    tie_word_embeddings=False,
)  # fmt: skip
# Class of the config, without "Config", and its values.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3.5": (
        "Qwen3_5Text",
        dict(
            intermediate_size=512, head_dim=128, full_attention_interval=2, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(
            intermediate_size=128, head_dim=128, num_local_experts=8, num_experts_per_tok=2, rotary_dim=64,
            use_qk_norm=True, qk_norm_type="per_layer", use_routing_bias=True, scoring_func="sigmoid",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
    ),
}  # fmt: skip


def write_family(path: Path, family: str) -> str:
    """Norms and biases of routers are random, too; returns the directory."""
    import torch
    import transformers

    name, values = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "e_score" in name:
                tensor += 0.1 * torch.randn_like(tensor)
    model.to(torch.bfloat16).save_pretrained(path)
    if "full_attention_interval" in values:
        # SGLang goes by this, which published models have, and transformers writes the kind of every layer.
        about = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(about | {"full_attention_interval": 2}))
    write_words(path, WORDS)
    return str(path)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_a_family_while_it_is_trained(family: str, backend: str, tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", family)
    for step in train_on_words(tmp_path, model, WORDS, train_backend=backend, lr=1e-4):
        # Two implementations in bfloat16; another gate or norm would make 0.3 and more.
        assert 0 < step["train/train_rollout_logprob_abs_diff"] < 0.1


def test_engines_get_the_merged_weights_of_adapters(tmp_path: Path) -> None:
    model = write_words_qwen3(tmp_path / "model", WORDS)
    adapters = {"lora_rank": 16, "lora_target_modules": "all-linear", "lr": 1e-3}
    steps = train_on_words(tmp_path, model, WORDS, **adapters)
    for step in steps:
        assert 0 < step["train/train_rollout_logprob_abs_diff"] < 0.1
