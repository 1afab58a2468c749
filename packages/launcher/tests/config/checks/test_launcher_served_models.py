"""Checks of a run whose engines --sglang-config names: each group is held to what the flags of SGLang are held to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from slime.launcher.config import run_config
from slime.launcher.config.advice import advice
from slime.launcher.config.checks.served_models import check_served_models
from slime.launcher.doctor.preflight import check_start
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting

BASE = ["--prompt-data", "prompts.jsonl", "--num-rollout", "4"]
PLACE = r"^--sglang-config .*models\.yaml: sglang\[0\]\.server_groups\[0\]: "
PLAIN = '{"quantization_config": null}'


def words_of(directory: Path, overrides: dict[str, Any], *words: str, model: str = "policy", **group: Any) -> list[str]:
    """Returns the words of a run with these overrides for the engines of a model; the others have none."""
    groups = {name: {"num_gpus": 1} | (group | {"overrides": overrides} if name == model else {})
              for name in ("policy", "judge")}  # fmt: skip
    served = [
        {"name": "policy", "server_groups": [groups["policy"]]},
        {"name": "judge", "model_path": str(directory / "judge"), "server_groups": [groups["judge"]]},
    ]
    (directory / "models.yaml").write_text(json.dumps({"sglang": served}))
    return [*BASE, "--hf-checkpoint", str(directory), "--sglang-config", str(directory / "models.yaml"), *words]


@pytest.mark.parametrize(
    "overrides, words, message",
    [
        ({"pp_size": 2}, [], "--sglang-pp-size 2 requires --update-weight-transport disk"),
        ({"enable_lora": True}, ["--lora-rank", "4"], "--sglang-enable-lora and --lora-rank 4 cannot be used together"),
        ({"skip_tokenizer_init": True}, ["--multimodal-keys", '{"image": "images"}'],
         "--sglang-skip-tokenizer-init and --multimodal-keys cannot be used together"),
        ({"attention-backend": "triton"}, ["--true-on-policy-mode"],
         "--true-on-policy-mode and --sglang-attention-backend triton cannot be used together"),
        ({"enable_deterministic_inference": False}, ["--true-on-policy-mode"],
         "--true-on-policy-mode and --sglang-enable-deterministic-inference False cannot be used together"),
    ],
)  # fmt: skip
def test_overrides_of_the_trained_model_are_held_to_what_flags_are(
    tmp_path: Path, overrides: dict[str, Any], words: list[str], message: str
) -> None:
    with pytest.raises(InvalidSetting, match=PLACE + message):
        run_config.parse(words_of(tmp_path, overrides, *words, num_gpus_per_engine=1), check=False)
    # A judge gets no updates, and nobody compares its log-probs with the trainer's.
    run_config.parse(words_of(tmp_path, overrides, *words, model="judge"), check=False)


def test_a_flag_that_no_override_is_over_is_named_alone_and_may_be_taken_back(tmp_path: Path) -> None:
    stages = ["--sglang-pp-size", "2"]
    with pytest.raises(InvalidSetting, match="^--sglang-pp-size 2 requires --update-weight-transport disk"):
        run_config.parse(words_of(tmp_path, {}, *stages), check=False)
    run_config.parse(words_of(tmp_path, {"pp_size": 1}, *stages), check=False)


def test_engines_hold_the_layers_that_updates_have(tmp_path: Path) -> None:
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    for directory in (tmp_path, tmp_path / "judge"):
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"quantization_config": quantized}))
        (directory / "tokenizer.json").write_text("{}")

    def check(overrides: dict[str, Any], *words: str, model: str = "policy") -> None:
        config = run_config.parse(words_of(tmp_path, overrides, *words, model=model), check=False)
        check_served_models(config.rollout, config.flat)

    other, plain = ({"json_model_override_args": text} for text in ('{"rope_theta": 1}', PLAIN))
    none, flag = ["--update-weight-quantization", "none"], f"--sglang-json-model-override-args={PLAIN}"
    with pytest.raises(InvalidSetting, match=f"{PLACE}--sglang-json-.* requires --update-weight-quantization none"):
        check(plain)
    with pytest.raises(InvalidSetting, match=f"{PLACE}--update-weight-quantization none requires --sglang-json-model"):
        check(other, flag)
    with pytest.raises(InvalidSetting, match="^--update-weight-quantization none requires --sglang-json-model"):
        check(plain, *none, model="judge")
    check(plain, *none)
    check({}, flag)
    check(other, model="judge")
    check(plain, "--debug-rollout-only")


def test_warnings_about_the_context_know_the_overrides_of_the_trained_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')

    def said(overrides: dict[str, Any], *words: str, **more: Any) -> bool:
        words = ("--rollout-max-response-len", "65", *words)
        config = run_config.parse(words_of(tmp_path, overrides, *words, **more), check=False)
        return any("exceeds the 64 tokens" in text for text in advice(config))

    assert said({}) and said({"context_length": 99}, model="judge")
    assert not said({"context_length": 99}) and not said({"json-model-override-args": "{}"})
    assert not said({}, "--sglang-context-length", "99")


def test_a_start_asks_for_the_weights_that_an_engine_of_the_trained_model_loads(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())

    def asks(overrides: dict[str, Any], model: str = "policy") -> bool:
        # Only engines read the directory: there is no trainer.
        words = words_of(tmp_path, overrides, "--debug-rollout-only", "--dry-run", model=model)
        words += ["--rollout-function-path", "a.b", "--disable-rollout-global-dataset"]
        config = run_config.parse(words, check=False)
        return any("no .safetensors files" in note for note in check_start(config))

    assert asks({}) and asks({"load_format": "dummy"}, "judge") and asks({"load_format": "auto"})
    assert not asks({"load_format": "dummy"})


@pytest.mark.parametrize("model", ["policy", "judge"])
def test_overrides_hold_no_password(tmp_path: Path, model: str) -> None:
    place = rf"^--sglang-config .*: sglang\[{int(model == 'judge')}\]\.server_groups\[0\]\.overrides\.tokenizer_path"
    with pytest.raises(InvalidSetting, match=f"{place} must hold no password"):
        run_config.parse(words_of(tmp_path, {"tokenizer_path": "s3://me:secret@host/x"}, model=model), check=False)


def test_a_model_that_is_not_there_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "judge").mkdir()
    config = run_config.parse(words_of(tmp_path, {}), check=False)
    with pytest.raises(InvalidFile, match=r"--sglang-config .*: model judge: .*judge has no config.json"):
        check_served_models(config.rollout, config.flat)


@pytest.mark.parametrize(
    "groups, message",
    [
        ("{num_gpus: 2, num_gpus_per_engine: 2}", "num_gpus_per_engine 2"),
        ("{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}", "worker_type prefill"),
    ],
)
def test_the_trainers_log_probs_are_those_of_engines_with_one_gpu_each(
    tmp_path: Path, groups: str, message: str
) -> None:
    (tmp_path / "models.yaml").write_text(f"sglang: [{{name: policy, server_groups: [{groups}]}}]")
    words = [*BASE, "--hf-checkpoint", "model", "--sglang-config", str(tmp_path / "models.yaml")]
    run_config.parse(words, check=False)
    with pytest.raises(ConfigError, match=f"--true-on-policy-mode and {message} in --sglang-config .*: model policy"):
        run_config.parse([*words, "--true-on-policy-mode"], check=False)
