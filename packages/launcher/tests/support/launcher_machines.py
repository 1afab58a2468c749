"""A machine on which everything is as it should be, as the doctor's probes tell it, and a model and data for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models

from slime.converters.families import find_family
from slime.converters.files.safetensors_dir import write
from slime.launcher.doctor import versions
from slime.launcher.platform import probes

GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def make_well(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """answers: of probes by name, in place of those of a machine that is well."""
    (combination, *_) = versions.table()["combinations"]
    installed = {name: str(version) for name, version in combination["packages"].items()} | {
        "numpy": "2.0", "pyyaml": "6.0.3", "pyarrow": "15.0", "tokenizers": "0.22.2", "safetensors": "0.6",
    }  # fmt: skip
    well: dict[str, Any] = {
        "python_version": lambda: "3.11.7",
        "package_version": installed.get,
        "gpus": lambda: [],
        "visible_devices": lambda: None,
        "torch_sees_gpus": lambda: False,
        "multiplies_bfloat16": lambda: True,
        "disk_free": lambda directory: (Path("/"), 500 * GIB),
        "writable": lambda directory: True,
        "shared_memory": lambda: 16 * GIB,
        "memory_available": lambda: 64 * GIB,
        "cpus": lambda: 8,
        "open_files_limit": lambda: (65536, 65536),
        "free_ports": lambda count: count,
        "port_is_free": lambda port: True,
        "answers": lambda host, port: True,
        "local_ray_address": lambda: None,
        "own_ray_addresses": set,
        "ray_without_token": lambda address: False,
    }
    for name, answer in (well | answers).items():
        monkeypatch.setattr(probes, name, answer)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def write_model(directory: Path, config: dict[str, Any] = CONFIG, shard_bytes: int = 6000) -> Path:
    """A Hugging Face directory of several shards."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {b.name: b.shape for p in find_family(config).parameters(config) for b in p.blocks}
    write(directory, ((name, torch.zeros(shape)) for name, shape in shapes.items()), shard_bytes=shard_bytes)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    # The letters of `write_rows`.
    vocabulary = {letter: number for number, letter in enumerate("?0123456789")}
    Tokenizer(models.BPE(vocabulary, [])).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def write_rows(path: Path, count: int = 3) -> Path:
    path.write_text("".join(json.dumps({"input": f"{n}?", "label": str(n)}) + "\n" for n in range(count)))
    return path
