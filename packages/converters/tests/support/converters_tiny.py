"""A Hugging Face directory of random weights, from a family's own table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slime.converters.families import find_family
from slime.converters.files.safetensors_dir import write

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MOE: dict[str, Any] = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
MINIMAX: dict[str, Any] = QWEN3 | {
    "model_type": "minimax_m2",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rotary_dim": 4,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
}


def random_tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {b.name: b.shape for p in find_family(config).parameters(config) for b in p.blocks}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def hf_directory(
    path: Path,
    config: dict[str, Any] = QWEN3,
    tensors: dict[str, torch.Tensor] | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = 20_000,
) -> Path:
    path.mkdir(parents=True)
    write(path, (tensors or random_tensors(config, dtype)).items(), shard_bytes=shard_bytes)
    (path / "config.json").write_text(json.dumps(config, indent=3))
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    return path


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def all_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
