"""Sources of a setting's value and its other names: files, environment variables, flags of other systems."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.converters.megatron.flags import given
from slime.converters.megatron.model_scripts import model_config, model_flags
from slime.launcher.config import run_config
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, NotAvailable, UnknownFlag

Parse = Callable[..., run_config.RunConfig]
MODEL = model_config("qwen2.5-3B")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(MODEL))
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"input": "1 + 1"}\n')
    return path


@pytest.fixture
def parse(model: Path, prompts: Path) -> Parse:
    base = ["--hf-checkpoint", str(model), f"--prompt-data={prompts}", "--num-rollout", "4",
            "--n-samples-per-prompt", "2"]  # fmt: skip

    def run(*words: str, **variables: str) -> run_config.RunConfig:
        return run_config.parse([*base, *words], environment=variables)

    return run


def test_file_then_environment_then_flag(parse: Parse, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: 1e-5\neps_clip: 0.3\nrollout_batch_size: 16\ncolocate: true\n")
    variables = {"SLIME_EPS_CLIP": "0.4", "SLIME_ROLLOUT_BATCH_SIZE": "8", "SLIME_COLOCATE": "0"}
    config = parse(f"--config={path}", "--rollout-batch-size=64", **variables)
    assert (config.trainer.lr, config.trainer.eps_clip, config.rollout.rollout_batch_size) == (1e-5, 0.4, 64)
    assert config.launcher.colocate is False
    by_variable = parse(SLIME_CONFIG=str(path))
    assert by_variable.rollout.rollout_batch_size == 16 and by_variable.launcher.colocate


def test_variables_are_read_as_flags_are(parse: Parse) -> None:
    config = parse(
        SLIME_ROLLOUT_STOP="END 'THE END'",
        SLIME_TRAIN_ENV_VARS='{"A": "1"}',
        SLIME_DISABLE_REWARDS_NORMALIZATION="true",
        SLIME_NO_OFFLOAD_TRAIN="1",
        SLIME_SGLANG_MEM_FRACTION_STATIC="0.7",
        SLIME_SGLANG_DISABLE_CUDA_GRAPH="true",
        SLIME_TRAIN_BACKEND="megatron",
        SLIME_TENSOR_MODEL_PARALLEL_SIZE="2",
        SLIME_SEQUENCE_PARALLEL="True",
        SLIME_TIS_THRESHOLD="0.9",
    )
    assert config.rollout.rollout_stop == ["END", "THE END"] and config.launcher.train_env_vars == {"A": "1"}
    assert config.trainer.rewards_normalization is False and config.trainer.offload_train is False
    assert config.rollout.sglang_args == {"mem_fraction_static": 0.7, "disable_cuda_graph": True}
    assert given(config.megatron) == {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert config.trainer.tis_clip == 0.9


@pytest.mark.parametrize(
    "variable, value, error, words",
    [
        ("SLIME_LR", "fast", InvalidSetting, ["SLIME_LR", "--lr", "'fast'", "a number"]),
        ("SLIME_COLOCATE", "yes", InvalidSetting, ["SLIME_COLOCATE", "--colocate", "true, false, 1 or 0"]),
        ("SLIME_TRAIN_ENV_VARS", "{", InvalidSetting, ["SLIME_TRAIN_ENV_VARS", "--train-env-vars"]),
        ("SLIME_ROLLOUT_BACH_SIZE", "4", UnknownFlag, ["did you mean SLIME_ROLLOUT_BATCH_SIZE"]),
        (
            "SLIME_SGLANG_PROT",
            "4",
            UnknownFlag,
            ["unknown variable 'SLIME_SGLANG_PROT'; use one that `slime train --help-all` lists"],
        ),
        ("SLIME_RELEASE_TRAIN", "1", NotAvailable, ["SLIME_RELEASE_TRAIN", "--release-train is not supported yet"]),
    ],
)
def test_a_wrong_variable_is_named(
    parse: Parse, variable: str, value: str, error: type[ConfigError], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        parse(**{variable: value})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    "text, words",
    [
        ("custom_config_path: [a]", "--custom-config-path must be text, got"),
        ('output_dir: "a\\0"', "output_dir must be text without NUL"),
        ("eval_prompt_data: [[1, 2]]", "--eval-prompt-data must be pairs of NAME PATH, got '1 2'"),
        ("rollout_batch_size: [4]", "--rollout-batch-size must be"),
        ("train_env_vars: text", "--train-env-vars must be"),
    ],
)
def test_values_of_another_kind_in_a_file(parse: Parse, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        parse("--config", str(path))


def test_a_wrong_value_in_a_file_is_named_with_the_file(parse: Parse, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("lr: fast")
    with pytest.raises(ConfigError, match=f"^--config {path}: --lr must be a number, got 'fast'$"):
        parse("--config", str(path))


def test_variables_of_others_are_left_alone(parse: Parse) -> None:
    config = parse(SLIME_MEGATRON_FLAGS="own", SLIME_TEST_MODEL="x", SLIME_SOMETHING_ELSE="1", PATH="/bin", LR="1")
    assert config.trainer.lr == 1e-6


def test_both_flags_of_a_switch_are_keys(parse: Parse, tmp_path: Path) -> None:
    for text, expected in (("use_tensorboard: false", False), ("no_use_tensorboard: true", False),
                           ("no-use-tensorboard: false", True)):  # fmt: skip
        (tmp_path / "run.yaml").write_text(text)
        assert parse(f"--config={tmp_path / 'run.yaml'}").launcher.use_tensorboard is expected
    assert parse(SLIME_NO_USE_TENSORBOARD="1").launcher.use_tensorboard is False


def test_two_names_of_one_setting_may_not_disagree(parse: Parse, tmp_path: Path) -> None:
    assert parse("--sglang-tp-size", "2").rollout.rollout_num_gpus_per_engine == 2
    assert parse("--sglang-tp-size=2", "--rollout-num-gpus-per-engine=2").rollout.rollout_num_gpus_per_engine == 2
    assert parse("--use-tis", "--tis-threshold", "0.9").trainer.tis_clip == 0.9
    assert parse("--lr", "1", "--lr", "2").trainer.lr == 2, "of one name the last counts"
    with pytest.raises(InvalidSetting, match="--sglang-tp-size 4 and --rollout-num-gpus-per-engine 2 cannot"):
        parse("--rollout-num-gpus-per-engine", "2", "--sglang-tp-size", "4")
    with pytest.raises(InvalidSetting, match="--sglang-tp-size 2.*tensor-parallel size of 1"):
        parse("--sglang-tp-size", "2", "--sglang-dp-size", "2")
    path = tmp_path / "run.yaml"
    path.write_text("tis_clip: 1.0\ntis_threshold: 0.9\n")
    with pytest.raises(InvalidSetting, match="tis_threshold and tis_clip cannot be used together"):
        parse("--config", str(path))
    path.write_text("no name: 1\n")
    with pytest.raises(InvalidFile, match="--custom-config-path .*no name"):
        parse("--custom-config-path", str(path))


def test_modes_that_name_one_update_a_rollout(parse: Parse) -> None:
    assert parse("--true-on-policy-mode").trainer.num_steps_per_rollout == 1
    assert parse("--true-on-policy-mode", "--global-batch-size", "64").trainer.num_steps_per_rollout is None
    for extra in ("--global-batch-size 16", "--num-steps-per-rollout 2", "--partial-rollout"):
        with pytest.raises(InvalidSetting, match="--true-on-policy-mode and " + extra):
            parse("--true-on-policy-mode", *extra.split())
    assert parse("--use-dynamic-global-batch-size").trainer.use_dynamic_global_batch_size
    with pytest.raises(InvalidSetting, match="--use-dynamic-global-batch-size"):
        parse("--use-dynamic-global-batch-size", "--global-batch-size", "16")


def test_engines_of_true_on_policy_runs_have_the_kernels_that_the_trainer_computes_with(parse: Parse) -> None:
    kernels = {"enable_deterministic_inference": True, "attention_backend": "fa3"}
    assert parse("--true-on-policy-mode").rollout.sglang_args == kernels
    config = parse("--true-on-policy-mode", "--sglang-attention-backend", "fa3", "--sglang-mem-fraction-static", "0.5")
    assert config.rollout.sglang_args == kernels | {"mem_fraction_static": 0.5}
    for others in ("--train-backend megatron", "--rollout-engine embedded"):
        assert parse("--true-on-policy-mode", *others.split()).rollout.sglang_args == {}
    for extra in ("--sglang-attention-backend triton", "--rollout-num-gpus-per-engine 2"):
        with pytest.raises(InvalidSetting, match=f"--true-on-policy-mode and {extra} cannot be used together"):
            parse("--true-on-policy-mode", *extra.split())


def test_true_on_policy_runs_take_engines_that_the_file_of_models_counts_by_number(
    parse: Parse, tmp_path: Path
) -> None:
    def rollout(groups: str) -> RolloutSettings:
        (tmp_path / "models.yaml").write_text(f"sglang: [{{name: policy, server_groups: {groups}}}]\n")
        return parse("--true-on-policy-mode", "--sglang-config", str(tmp_path / "models.yaml")).rollout

    embedded = rollout("[{num_engines: 2}]")
    assert (embedded.rollout_engine, embedded.rollout_num_engines, embedded.sglang_args) == ("embedded", 2, {})
    on_gpus = rollout("[{num_gpus: 2}]")
    assert on_gpus.rollout_engine == "auto" and on_gpus.sglang_args["attention_backend"] == "fa3"
    for broken in ("{num_engines: 1}", "[num_engines]", "[{num_engines: many}]", "[", "3"):
        with pytest.raises(ConfigError, match="--sglang-config .*models.yaml"):
            rollout(broken)


def test_flags_that_need_others(parse: Parse, tmp_path: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidSetting, match="--megatron-to-hf-mode bridge requires --train-backend megatron"):
        parse("--megatron-to-hf-mode", "bridge", "--train-backend", "fsdp")
    with pytest.raises(InvalidSetting, match="--max-turns 5 requires --custom-generate-function-path"):
        parse("--max-turns", "5")
    plugin = tmp_path / "mine.py"
    plugin.write_text("async def generate(args, sample, sampling_params):\n    return sample\n")
    assert parse("--max-turns", "5", "--custom-generate-function-path", str(plugin)).flat["max_turns"] == 5
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus.*--rollout-external-engine-addrs"):
        parse("--rollout-num-gpus", "0")
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(
        NotAvailable,
        match="--rollout-data-transport nixl requires the package nixl: pip install .*slime-launcher.nixl.",
    ):
        parse("--rollout-data-transport", "nixl")
    evaluation = parse("--eval-prompt-data", "aime", str(prompts), "--eval-prompt-data", "gsm8k", str(prompts))
    assert list(evaluation.buffer.evaluation_sets()) == ["aime", "gsm8k"]


def test_a_data_source_takes_the_place_of_the_buffers_prompts(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("class Source:\n    def __init__(self, args):\n        self.args = args\n")
    words = ["--hf-checkpoint", str(model), "--num-rollout", "1", "--data-source-path", f"{source}:Source",
             "--n-samples-per-prompt", "2"]  # fmt: skip
    config = run_config.parse(words, environment={})
    assert config.buffer.rollout_global_dataset is False, "the buffer reads no prompts of its own"
    assert config.flat["rollout_global_dataset"] is True, "the class may"
    assert config.flat["checkpoint_dir"] == str(config.checkpoint_dir)


def test_the_command_line_of_a_runner_is_understood(parse: Parse, tmp_path: Path, model: Path) -> None:
    settings = tmp_path / "toolkit.yaml"
    settings.write_text("exp_id: one\ngateway_port: 9090\n")
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "def rollout(args, rollout_id, data_source, evaluation=False): ...\ndef rewards(args, samples): ..."
    )
    line = f"""--ref-load {model} --tensor-model-parallel-size 2 --rollout-num-gpus-per-engine 2 --input-key prompt
        --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 1024 --rollout-temperature 1.0
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl --entropy-coef 0.0
        --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 5e-07 --lr-decay-style constant --weight-decay 0.1
        --adam-beta1 0.9 --adam-beta2 0.98 --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d
        --use-precision-aware-optimizer --sequence-parallel --sglang-mem-fraction-static 0.7
        --sglang-cuda-graph-max-bs 32 --sglang-tool-call-parser qwen --sglang-log-level warning
        --sglang-log-level-http warning --attention-dropout 0.0 --hidden-dropout 0.0
        --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32 --attention-backend flash
        --actor-num-gpus-per-node 8 --colocate --megatron-to-hf-mode bridge --rollout-function-path {plugin}:rollout
        --custom-reward-post-process-path {plugin}:rewards --custom-config-path {settings}
        --use-dynamic-global-batch-size --use-dynamic-batch-size --max-tokens-per-gpu 9216 --sglang-context-length 8192
        --sglang-reasoning-parser qwen3 --sglang-data-parallel-size 1"""
    config = parse(*model_flags(MODEL), *line.split())
    assert config.trainer.train_backend == "megatron"
    assert config.flat["exp_id"] == "one" and config.trainer.use_dynamic_global_batch_size
    with pytest.raises(InvalidSetting, match="requires --train-backend megatron: this is --train-backend fsdp"):
        parse("--use-distributed-optimizer", "--attention-backend", "flash", "--train-backend", "fsdp")


def test_the_command_lines_of_a_guide_are_understood(parse: Parse, tmp_path: Path, model: Path, prompts: Path) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "async def generate(args, samples, evaluation=False):\n    return samples\n\n"
        "async def reward(args, sample, **kwargs):\n    return 1.0\n"
    )
    line = f"""--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --seq-length 4096 --micro-batch-size 1
        --global-batch-size 256 --tokenizer-type HuggingFaceTokenizer --sglang-mem-fraction-static 0.7
        --sglang-context-length 8192 --sglang-log-level INFO --sglang-tp-size 2 --sglang-disable-cuda-graph
        --actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --colocate
        --rollout-batch-size 32 --n-samples-per-prompt 8 --num-rollout 1000 --num-steps-per-rollout 1
        --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --calculate-per-token-loss --use-tis
        --tis-threshold 0.9 --true-on-policy-mode --custom-generate-function-path {plugin}:generate --max-turns 5
        --custom-rm-path {plugin}:reward --group-rm --eval-prompt-data aime {prompts} --eval-prompt-data gsm8k {prompts}
        --n-samples-per-eval-prompt 16 --eval-interval 50 --eval-temperature 0.0 --input-key prompt --label-key label
        --apply-chat-template"""
    config = parse(*model_flags(MODEL), *line.split())
    assert (config.trainer.tis_clip, config.rollout.max_turns, config.rollout.eval_temperature) == (0.9, 5, 0.0)
    ahead = parse("--async-buffer-size", "4", "--update-weights-interval", "2", "--rollout-num-gpus", "8")
    assert (ahead.launcher.async_buffer_size, ahead.launcher.update_weights_interval) == (4, 2)
