"""Flags of SGLang on the command line of a run, and --offload."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.catalogue import training_parser
from slime.launcher.config.run_config import RunConfig
from slime.types.errors import ConfigError, InvalidSetting, MissingFile, NotAvailable, UnknownFlag

BASE = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--num-rollout", "4"]


def parse(*words: str) -> RunConfig:
    return run_config.parse([*BASE, *words], check=False)


def test_flags_of_sglang_reach_the_rollout() -> None:
    config = parse(
        "--sglang-mem-fraction-static", "0.7", "--sglang-disable-cuda-graph", "--sglang-log-level=INFO",
        "--sglang-server-concurrency", "64", "--sglang-tp-size", "2",
    )  # fmt: skip
    assert config.rollout.sglang_args == {
        "mem_fraction_static": 0.7,
        "disable_cuda_graph": True,
        "log_level": "INFO",
    }
    assert config.rollout.sglang_server_concurrency == 64 and config.rollout.rollout_num_gpus_per_engine == 2
    assert config.flat["sglang_args"]["mem_fraction_static"] == 0.7


@pytest.mark.parametrize(
    "words, error, match",
    [
        (["--sglang-mem-fraction-statik", "0.7"], UnknownFlag, "did you mean --sglang-mem-fraction-static"),
        (["--sglang-mem-fraction-static", "most"], InvalidSetting, "--sglang-mem-fraction-static"),
        (["--sglang-model-path", "x"], InvalidSetting, "--hf-checkpoint"),
        (["--sglang-tensor-parallel-size", "2"], InvalidSetting, "--sglang-tensor-parallel-size cannot be set"),
        (["--sglang-tp", "2"], UnknownFlag, "unknown option --sglang-tp; did you mean --sglang-tp-size?"),
        (["--sglang-prot", "1"], UnknownFlag, "unknown option --sglang-prot; see --help"),
        (["--sglang-mem-fraction-static", "0.7", "--rollout-engine", "embedded"], InvalidSetting, "embedded"),
        (["--sglang-config", "none.yaml"], MissingFile, "--sglang-config"),
        (["--prefill-num-servers", "1"], InvalidSetting, "--prefill-num-servers 1 requires --rollout-num-gpus"),
        (["--sglang-disaggregation-mode", "prefill"], InvalidSetting, "worker_type in the file of --sglang-config"),
        (["--sglang-router-ip=x"], NotAvailable, "--sglang-router-ip is not supported yet"),
    ],
)
def test_what_sglang_would_not_take_is_refused(words: list[str], error: type[ConfigError], match: str) -> None:
    with pytest.raises(error, match=match):
        parse(*words)


def test_files_and_flags_of_sglang_add_up(tmp_path: Path) -> None:
    config_file, custom = tmp_path / "config.yaml", tmp_path / "custom.yaml"
    config_file.write_text("sglang_mem_fraction_static: 0.5\nsglang-attention-backend: triton\n")
    custom.write_text("sglang_attention_backend: fa3\nmine: 1\n")
    config = parse("--config", str(config_file), "--sglang-mem-fraction-static", "0.6")
    assert config.rollout.sglang_args == {"mem_fraction_static": 0.6, "attention_backend": "triton"}
    config = parse("--config", str(config_file), "--custom-config-path", str(custom))
    assert config.rollout.sglang_args == {"mem_fraction_static": 0.5, "attention_backend": "fa3"}
    assert config.flat["mine"] == 1
    for text, error in (("sglang_mem_fraction_statik: 0.7", UnknownFlag), ("sglang_router_ip: x", NotAvailable)):
        config_file.write_text(text)
        with pytest.raises(error):
            parse("--config", str(config_file))


def test_a_training_command_line_is_known_to_tools_too() -> None:
    assert "--sglang-mem-fraction-static" in training_parser().flag_names()


def test_offload_is_that_of_engines_and_trainer() -> None:
    config = parse("--offload")
    assert config.rollout.offload_rollout is config.trainer.offload_train is True
    assert parse("--colocate").rollout.offload_rollout is None and parse("--colocate").rollout.offloads
    for name in ("--no-offload-rollout", "--no-offload-train"):
        with pytest.raises(InvalidSetting, match=f"--offload and {name} cannot be used together"):
            parse("--offload", name)
