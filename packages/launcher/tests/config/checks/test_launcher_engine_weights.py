"""Engines get weights by a way that they take: deltas by kind, engines with pipeline stages from a directory."""

import json
from pathlib import Path
from typing import Any

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.checks.engine_weights import refuse_quantized
from slime.rollout.engines.registry import KINDS
from slime.types.errors import InvalidSetting, NotAvailable


def test_external_engines_get_no_pickle_of_what_to_load(tmp_path: Path) -> None:
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1"]
    words += ["--update-weight-mode", "delta", "--update-weight-transport", "disk"]
    words += ["--update-weight-disk-dir", str(tmp_path / "shared")]
    external = ["--rollout-external-engine-addrs", "http://127.0.0.1:30000"]
    assert run_config.parse([*words, *external], check=False).rollout.rollout_external_engine_addrs
    words += ["--update-weight-local-checkpoint-dir", str(tmp_path / "local")]
    with pytest.raises(InvalidSetting, match="--rollout-external-engine-addrs cannot be used together") as caught:
        run_config.parse([*words, *external], check=False)
    assert caught.value.field == "--update-weight-local-checkpoint-dir"


DISK = ["--update-weight-transport", "disk", "--update-weight-disk-dir", "shared"]


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (
            ["--colocate"],
            "requires --update-weight-transport disk, --update-weight-disk-dir and .* shares the",
        ),
        (
            ["--update-weight-transport", "tensor"],
            "tensor and --rollout-engine sglang .* by NCCL or from a disk",
        ),
        (DISK, "requires --update-weight-local-checkpoint-dir DIR: SGLang loads a whole checkpoint"),
        ([], ""),
        (["--update-weight-transport", "nccl"], ""),
        ([*DISK, "--update-weight-local-checkpoint-dir", "local"], ""),
    ],
)
def test_sglang_takes_deltas_from_a_disk_or_by_nccl(tmp_path: Path, words: list[str], needed: str) -> None:
    run = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1"]
    run += ["--update-weight-mode", "delta", *words, "--rollout-engine", "sglang"]
    if not needed:
        assert run_config.parse(run, check=False).trainer.update_weight_mode == "delta"
        return
    with pytest.raises(InvalidSetting, match=needed):
        run_config.parse(run, check=False)


def test_a_kind_that_takes_no_deltas_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1"]
    words += ["--update-weight-mode", "delta", "--rollout-engine", "embedded"]
    assert run_config.parse(words, check=False).trainer.update_weight_mode == "delta"
    monkeypatch.setattr(type(KINDS["embedded"]), "delta_carriers", ())
    with pytest.raises(NotAvailable, match="--update-weight-mode delta and --rollout-engine embedded cannot be used"):
        run_config.parse(words, check=False)


@pytest.mark.parametrize("transport", [[], ["--update-weight-transport", "nccl"], ["--update-weight-transport", "ipc"]])
def test_pipeline_stages_are_refused_where_weights_go_from_gpu_to_gpu(tmp_path: Path, transport: list[str]) -> None:
    base = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1"]
    engines = ["--rollout-engine", "sglang", "--rollout-num-gpus-per-engine", "2", "--sglang-pp-size", "2"]
    colocate = ["--colocate"] if "ipc" in transport else []
    with pytest.raises(InvalidSetting, match="--sglang-pp-size 2 requires --update-weight-transport disk") as caught:
        run_config.parse([*base, *engines, *transport, *colocate], check=False)
    assert caught.value.field == "--sglang-pp-size"
    disk = ["--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path)]
    assert run_config.parse([*base, *engines, *disk], check=False).rollout.sglang_args["pp_size"] == 2


FP8: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
INT4: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}


def words_for(directory: Path, config: dict[str, Any]) -> list[str]:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "prompts.jsonl").write_text('{"input": "1 + 1"}\n')
    words = ["--hf-checkpoint", str(directory), "--prompt-data", str(directory / "prompts.jsonl")]
    return [*words, "--num-rollout", "1", "--n-samples-per-prompt", "2"]


def int4(**weights: Any) -> dict[str, Any]:
    values = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    return INT4 | {"config_groups": {"group_0": {"targets": ["Linear"], "weights": values}}}


@pytest.mark.parametrize("inside", [(), ("text_config",)])
@pytest.mark.parametrize("quantization", [FP8, int4()], ids=["fp8", "int4"])
def test_quantized_weights_are_updated_in_sglang_only(
    tmp_path: Path, quantization: dict[str, Any], inside: tuple[str, ...]
) -> None:
    config: dict[str, Any] = {"quantization_config": quantization}
    for key in inside:
        config = {key: config}
    words = words_for(tmp_path, config)
    assert run_config.parse([*words, "--rollout-engine", "sglang"]).trainer.update_weight_quantization == "auto"
    embedded = [*words, "--rollout-engine", "embedded"]
    with pytest.raises(
        NotAvailable,
        match=rf"--hf-checkpoint .* and --rollout-engine embedded cannot be used .*\({quantization['quant_method']}\)",
    ) as caught:
        run_config.parse(embedded)
    assert caught.value.field == "--hf-checkpoint"
    # A kind that is chosen when the machine is known is refused then.
    run_config.parse(words)
    with pytest.raises(NotAvailable, match="--rollout-engine embedded cannot be used"):
        refuse_quantized(str(tmp_path), KINDS["embedded"])
    run_config.parse([*embedded, "--debug-rollout-only"])
    words_for(tmp_path, {})
    run_config.parse(embedded)


@pytest.mark.parametrize(
    "quantization",
    [INT4, int4(symmetric=False), int4(num_bits=8), FP8 | {"activation_scheme": "static"}, {"quant_method": "fp8"}],
)
def test_another_quantization_is_refused_where_updates_would_replace_it(
    tmp_path: Path, quantization: dict[str, Any]
) -> None:
    words = words_for(tmp_path, {"quantization_config": quantization})
    told = rf"with quantization_config \({quantization['quant_method']}\) is not supported yet"
    with pytest.raises(NotAvailable, match=told) as caught:
        run_config.parse(words)
    assert caught.value.field == "--hf-checkpoint"
    run_config.parse([*words, "--debug-rollout-only"])
    # The engines' weights are not what config.json says.
    plain = '--sglang-json-model-override-args={"quantization_config": null}'
    config = run_config.parse([*words, "--rollout-engine", "sglang", plain])
    assert config.trainer.update_weight_quantization == config.flat["update_weight_quantization"] == "none"
    with pytest.raises(InvalidSetting, match="--update-weight-quantization none requires --sglang-json-model-override"):
        run_config.parse([*words, "--rollout-engine", "sglang", "--update-weight-quantization", "none"])
    other = '--sglang-json-model-override-args={"rope_theta": 1}'
    with pytest.raises(NotAvailable, match=told):
        run_config.parse([*words, "--rollout-engine", "sglang", other])


@pytest.mark.parametrize(
    "flags",
    [
        ["--sglang-enable-lora"], ["--sglang-max-lora-rank", "16"], ["--sglang-max-loras-per-batch", "2"],
        ["--sglang-lora-paths", "a=b"], ["--sglang-experts-shared-outer-loras"],
    ],
)  # fmt: skip
def test_engines_that_get_merged_weights_have_no_adapters(tmp_path: Path, flags: list[str]) -> None:
    words = ["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", "--num-rollout", "1", *flags]
    words += ["--rollout-engine", "sglang"]
    assert run_config.parse(words, check=False).rollout.sglang_args
    with pytest.raises(InvalidSetting, match=f"^{flags[0]}.* and --lora-rank 4 cannot be used together: .* merged"):
        run_config.parse([*words, "--lora-rank", "4"], check=False)
