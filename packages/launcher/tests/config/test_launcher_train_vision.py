"""Runs of a Qwen3.5, which train what reads images where they have images, and flags of its original script."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from launcher_machines import CONFIG, write_rows, write_tokenizer

from slime.converters.families import find_family
from slime.converters.families.qwen_gated import with_vision
from slime.converters.megatron.model_scripts import model_config
from slime.launcher.config import run_config
from slime.launcher.config.advice import advice
from slime.launcher.config.run_config import RunConfig
from slime.launcher.plan.run_plan import Hardware, make_plan
from slime.types.errors import InvalidSetting, NotAvailable

IMAGES = ["--multimodal-keys", '{"image": "images"}']
SEEING = {
    "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 4, "out_hidden_size": 4096,
    "num_position_embeddings": 9,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3_5": model_config("qwen3.5-9B") | {"vision_config": SEEING},
    "qwen3_vl": {"model_type": "qwen3_vl", "text_config": CONFIG, "vision_config": SEEING},
    "qwen3": CONFIG,
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    for kind, config in CONFIGS.items():
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps(config))
        (tmp_path / kind / "preprocessor_config.json").write_text("{}")
        write_tokenizer(tmp_path / kind)
    return [
        "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--num-rollout", "5", "--rm-type", "math",
        "--label-key", "label", "--n-samples-per-prompt", "2", "--output-dir", str(tmp_path / "run"),
        "--hf-checkpoint", str(tmp_path / "qwen3_5"),
    ]  # fmt: skip


def of(kind: str, words: list[str]) -> list[str]:
    return [*words[:-1], str(Path(words[-1]).with_name(kind))]


def planned(config: RunConfig) -> int:
    return make_plan(config, Hardware((), None, "this machine")).parameters


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_reads_images_is_trained_in_runs_on_images(words: list[str], backend: str) -> None:
    words = [*words, "--train-backend", backend]
    config = CONFIGS["qwen3_5"]
    seeing = sum(
        math.prod(parameter.shape)
        for parameter in find_family(config).parameters(with_vision(config))
        if parameter.name.startswith("visual.")
    )
    text = run_config.parse(words)
    assert text.trainer.train_vision is None and text.buffer.text_only
    for flags in (IMAGES, ["--train-vision"], [*IMAGES, "--train-vision"]):
        images = run_config.parse([*words, *flags])
        assert images.trainer.train_vision is True and not images.buffer.text_only
        assert planned(images) - planned(text) == seeing > 0


@pytest.mark.parametrize(
    ("kind", "flags", "error", "message"),
    [
        ("qwen3_5", [*IMAGES, "--no-train-vision"], InvalidSetting,
         "--no-train-vision and --multimodal-keys cannot be used together"),
        ("qwen3_vl", ["--no-train-vision"], NotAvailable, "--no-train-vision of a qwen3_vl is not supported yet"),
        ("qwen3", ["--train-vision"], InvalidSetting, "--train-vision requires a model that reads images"),
        ("qwen3", IMAGES, InvalidSetting, "--multimodal-keys requires a model that reads images"),
    ],
)  # fmt: skip
def test_what_a_model_cannot_do_is_refused(
    words: list[str], kind: str, flags: list[str], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_config.parse([*of(kind, words), *flags])


def test_a_model_of_ones_own_does_not_see(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def model(pre_process, post_process):\n    return None\n")
    own = [*words, "--train-backend", "megatron", "--custom-model-provider-path", f"{tmp_path}/own.py:model"]
    run_config.parse(own)
    with pytest.raises(NotAvailable, match="--custom-model-provider-path with a qwen3_5 is not supported yet"):
        run_config.parse([*own, *IMAGES])


@pytest.mark.parametrize("layout", ["thd", "bshd"])
def test_rows_are_packed_whatever_layout_a_script_names(words: list[str], layout: str) -> None:
    config = run_config.parse([*words, "--train-backend", "megatron", "--qkv-format", layout])
    assert not [line for line in advice(config) if "qkv" in line]
    with pytest.raises(InvalidSetting, match="--qkv-format"):
        run_config.parse([*words, "--train-backend", "megatron", "--qkv-format", "sbhd"])
    with pytest.raises(InvalidSetting, match="--qkv-format"):
        run_config.parse([*words, "--train-backend", "fsdp", "--qkv-format", layout])
