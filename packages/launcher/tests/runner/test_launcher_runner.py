"""SlimeRunner: its fields, the command lines that it makes of them, and what it starts."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from slime.launcher import SlimeRunner
from slime.launcher.config import run_config
from slime.launcher.runner import runner
from slime.launcher.runner.flags import ModelScriptNotFound, available, cpu_flags
from slime.launcher.runner.ray_job import RayHead, RunFailed
from slime.types.errors import InvalidSetting, MissingFile, PortInUse

LOCAL = dict(exp_id="exp-1", model_dir="/models/small", data_path="/data/math.jsonl", model_type="qwen2.5-3B")
AGENT = LOCAL | dict(agent_runtime_arn="arn:aws:bedrock-agentcore:us-west-2:111122223333:runtime/a", s3_bucket="b-1")
FIRST = ["exp_id", "agent_runtime_arn", "s3_bucket", "model_dir", "data_path", "model_type"]
DEFAULTS = dict(
    num_gpus=8, tp_size=2, rollout_gpus_per_engine=2, slime_dir="/root/slime", megatron_dir="/root/Megatron-LM",
    cuda_home=None, model_id="default", acr_timeout=900, acr_tps_limit=25, max_concurrent=100,
    max_pool_connections=100, gateway_port=9090, reward_postprocessing="grpo", sglang_tool_call_parser="qwen",
    sglang_reasoning_parser=None, sglang_data_parallel_size=1, cumulative_token_mode=False, renderer_family="auto",
    gateway_log_level="warning", rollout_batch_size=32, n_samples_per_prompt=8, rollout_max_response_len=1024,
    rollout_temperature=1.0, lr=1e-6, eps_clip=0.2, eps_clip_high=0.28, weight_decay=0.1, adam_beta2=0.98,
    sglang_mem_fraction_static=0.7, sglang_context_length=None, max_tokens_per_gpu=9216, wandb_project=None,
    wandb_group=None, extra_flags=[],
)  # fmt: skip


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)


def value(words: list[str], flag: str) -> str:
    assert words.count(flag) == 1
    return words[words.index(flag) + 1]


def command(made: SlimeRunner, num_rollout: int = 1) -> list[str]:
    return made._build_slime_flags(num_rollout=num_rollout, model_args=[], config_path="/tmp/c.yaml")


def test_fields_order_and_defaults() -> None:
    made = SlimeRunner(**AGENT)
    names = [field.name for field in dataclasses.fields(SlimeRunner)]
    assert names == [*FIRST, *DEFAULTS]
    assert {name: getattr(made, name) for name in DEFAULTS} == DEFAULTS
    assert list(inspect.signature(SlimeRunner).parameters)[:6] == FIRST
    assert SlimeRunner(*(AGENT[name] for name in FIRST)) == made
    assert SlimeRunner(**LOCAL).extra_flags is not SlimeRunner(**LOCAL).extra_flags


@pytest.mark.parametrize("path", [LOCAL, AGENT], ids=["local", "agent"])
@pytest.mark.parametrize("name", FIRST)
def test_a_missing_field_is_named(path: dict[str, str], name: str) -> None:
    given = {key: value for key, value in path.items() if key != name}
    if given == path:
        SlimeRunner(**given)
        return
    with pytest.raises(InvalidSetting, match=f"{name} is required") as caught:
        SlimeRunner(**given)
    assert caught.value.field == name


def test_an_agent_that_is_called_directly_needs_no_bucket() -> None:
    words = command(SlimeRunner(**LOCAL, agent_runtime_arn="http://127.0.0.1:8080/invocations"))
    assert "--rollout-function-path" in words


def test_the_model_type_may_be_left_out_on_the_cpu() -> None:
    made = SlimeRunner(exp_id="e", model_dir="m", data_path="d", num_gpus=0)
    assert made._source_model_script() == []


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("num_gpus", -1, "num_gpus must be at least 0, got -1"),
        ("num_gpus", "8", "num_gpus must be an integer, got '8'"),
        ("num_gpus", 3, "tp_size must be a divisor of num_gpus 3, got 2"),
        ("tp_size", 3, "tp_size must be a divisor of num_gpus 8, got 3"),
        ("rollout_gpus_per_engine", 3, "rollout_gpus_per_engine must be a divisor of num_gpus 8, got 3"),
        ("rollout_temperature", 0, "rollout_temperature must be at least 1e-06, got 0"),
        ("lr", "fast", "lr must be a number, got 'fast'"),
        ("lr", float("nan"), "lr must be"),
        ("lr", 0, "lr must be greater than 0, got 0"),
        ("rollout_temperature", 0, "rollout_temperature must be at least 1e-06, got 0"),
        ("reward_postprocessing", "gpro", "did you mean grpo"),
        ("extra_flags", "--seed 1", "extra_flags must be a list, got '--seed 1'"),
        ("gateway_port", 70000, "at most 65535"),
        ("exp_id", 7, "exp_id must be text, got 7"),
        ("slime_dir", None, "slime_dir must be text, got None"),
    ],
)
def test_a_wrong_value_is_named(name: str, wrong: object, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        SlimeRunner(**(AGENT | {name: wrong}))


def test_from_yaml_reads_the_fields(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(AGENT | {"num_gpus": 4, "lr": 5e-7}))
    made = SlimeRunner.from_yaml(file)
    assert (made.exp_id, made.num_gpus, made.lr) == ("exp-1", 4, 5e-7)


def test_from_yaml_takes_numbers_that_yaml_reads_as_text(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(LOCAL) + "lr: 2e-6\n")
    assert SlimeRunner.from_yaml(file).lr == 2e-6


def test_from_yaml_names_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(LOCAL | {"rollout_batchsize": 4}))
    with pytest.raises(InvalidSetting, match="unknown key in .*: 'rollout_batchsize'; did you mean rollout_batch_size"):
        SlimeRunner.from_yaml(file)
    with pytest.raises(MissingFile, match=r"absent\.yaml"):
        SlimeRunner.from_yaml(tmp_path / "absent.yaml")


def test_runtime_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SlimeRunner(**AGENT, megatron_dir="/src/megatron")
    plain = {"PYTHONPATH": "/src/megatron", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert made._build_runtime_env() == {"env_vars": plain}
    # Ray shows it in the arguments of processes: keys are inherited.
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    assert made._build_runtime_env() == {"env_vars": plain}


def test_one_cuda_toolkit_is_pinned_for_job_and_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda-12.4/lib64:/lib/mine:/usr/local/cuda/lib64:")
    made = SlimeRunner(**AGENT, cuda_home="/toolkits/cuda-13")
    variables = made._build_runtime_env()["env_vars"]
    assert variables["CUDA_HOME"] == "/toolkits/cuda-13"
    assert variables["LD_LIBRARY_PATH"].split(":")[-2:] == ["/toolkits/cuda-13/lib64", "/lib/mine"]
    assert "/usr/local/cuda" not in variables["LD_LIBRARY_PATH"]
    trainer = yaml.safe_load(value(command(made), "--train-env-vars"))
    assert trainer == {name: variables[name] for name in ("CUDA_HOME", "LD_LIBRARY_PATH")}
    assert "--train-env-vars" not in command(SlimeRunner(**AGENT))


def test_fields_reach_the_command_line() -> None:
    made = SlimeRunner(**AGENT, tp_size=4, lr=5e-7, rollout_batch_size=16)
    words = made._build_slime_flags(num_rollout=10, model_args=["--num-layers", "2"], config_path="/tmp/c.yaml")
    assert words[:2] == ["--num-layers", "2"]
    expected = {
        "--num-rollout": "10", "--tensor-model-parallel-size": "4", "--lr": "5e-07", "--rollout-batch-size": "16",
        "--custom-config-path": "/tmp/c.yaml", "--hf-checkpoint": "/models/small", "--ref-load": "/models/small",
        "--prompt-data": "/data/math.jsonl", "--input-key": "prompt", "--advantage-estimator": "grpo",
        "--kl-loss-type": "low_var_kl", "--actor-num-gpus-per-node": "8", "--megatron-to-hf-mode": "bridge",
        "--sglang-cuda-graph-max-bs": "32", "--max-tokens-per-gpu": "9216", "--attention-backend": "flash",
        "--rollout-function-path": "slime.rollout.agents.rollout.generate_rollout",
        "--custom-reward-post-process-path": "slime.rollout.agents.rewards.normalize_episode_rewards",
    }  # fmt: skip
    assert {flag: value(words, flag) for flag in expected} == expected
    switches = {
        "--use-kl-loss", "--colocate", "--use-dynamic-global-batch-size", "--use-dynamic-batch-size",
        "--sequence-parallel", "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d",
        "--use-precision-aware-optimizer", "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32",
    }  # fmt: skip
    assert switches <= set(words)


def test_optional_flags_of_the_engines() -> None:
    plain = command(SlimeRunner(**AGENT))
    assert value(plain, "--sglang-data-parallel-size") == "1"
    assert "--sglang-reasoning-parser" not in plain
    assert "--sglang-context-length" not in plain
    more = command(
        SlimeRunner(**AGENT, sglang_data_parallel_size=4, sglang_reasoning_parser="qwen3", sglang_context_length=4096)
    )
    assert value(more, "--sglang-data-parallel-size") == "4"
    assert value(more, "--sglang-reasoning-parser") == "qwen3"
    assert value(more, "--sglang-context-length") == "4096"


def test_extra_flags_come_last_as_they_are() -> None:
    extra = ["--num-epoch", "3", "--note=a b $X '", "--lr", "1"]
    for gpus in (8, 0):
        assert command(SlimeRunner(**AGENT, num_gpus=gpus, extra_flags=extra))[-5:] == extra


def test_weights_and_biases_only_with_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SlimeRunner(**AGENT, wandb_project="p", wandb_group="g")
    assert not [word for word in command(made) if "wandb" in word]
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    words = command(made)
    assert "--use-wandb" in words
    assert (value(words, "--wandb-project"), value(words, "--wandb-group")) == ("p", "g")
    assert "abc" not in words


def test_rewards_of_the_local_path() -> None:
    words = command(SlimeRunner(**LOCAL))
    assert (value(words, "--rm-type"), value(words, "--label-key")) == ("math", "label")
    assert "--rollout-function-path" not in words
    own = command(SlimeRunner(**LOCAL, extra_flags=["--custom-rm-path=my.reward", "--label-key", "answer"]))
    assert "--rm-type" not in own
    assert own.count("--label-key") == 1


@pytest.mark.parametrize("path", [LOCAL, AGENT], ids=["local", "agent"])
@pytest.mark.parametrize("gpus", [8, 0])
def test_slime_train_takes_the_whole_command_line(path: dict[str, str], gpus: int) -> None:
    made = SlimeRunner(**path, num_gpus=gpus, sglang_reasoning_parser="qwen3", sglang_context_length=4096)
    with made._write_toolkit_config() as config_path:
        words = made._build_slime_flags(3, made._source_model_script(), config_path)
        config = run_config.parse(words, check=False)
    assert config.launcher.num_rollout == 3
    assert config.launcher.run_name == "exp-1"
    assert config.launcher.train_backend == ("megatron" if gpus else "fsdp")
    assert config.rollout.rollout_batch_size == 32
    assert config.flat["exp_id"] == "exp-1"
    assert config.flat["acr_timeout"] == 900


def test_toolkit_config_lives_as_long_as_its_context() -> None:
    made = SlimeRunner(**AGENT, model_id="served")
    with made._write_toolkit_config() as path:
        assert Path(path).name.startswith("slime-runner-")
        assert path.endswith(".yaml")
        data = yaml.safe_load(Path(path).read_text())
    assert len(data) == 13
    assert data["model_id"] == "served"
    assert {name: data[name] for name in ("agent_runtime_arn", "s3_bucket", "exp_id")} == {
        name: AGENT[name] for name in ("agent_runtime_arn", "s3_bucket", "exp_id")
    }
    assert not os.path.exists(path)
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), made._write_toolkit_config() as path:
            raise error
        assert not os.path.exists(path)


def test_model_arguments_come_from_the_checkout_first(tmp_path: Path) -> None:
    scripts = tmp_path / "scripts" / "models"
    scripts.mkdir(parents=True)
    (scripts / "mine.sh").write_text('echo noise\nN=3\nMODEL_ARGS=(\n  --num-layers $N\n  --note "a b"\n)\n')
    made = SlimeRunner(**(LOCAL | {"model_type": "mine"}), slime_dir=tmp_path)
    assert made._source_model_script() == ["--num-layers", "3", "--note", "a b"]
    known = SlimeRunner(**LOCAL, slime_dir=tmp_path)
    assert known._source_model_script()[:2] == ["--num-layers", "36"]


def test_an_unknown_model_type_is_an_absent_file(tmp_path: Path) -> None:
    made = SlimeRunner(**(LOCAL | {"model_type": "qwen25-3B"}), slime_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="did you mean qwen2.5-3B") as caught:
        made._source_model_script()
    assert isinstance(caught.value, ModelScriptNotFound | MissingFile)
    assert pickle.loads(pickle.dumps(caught.value)).field == "model_type"


def test_a_key_of_weights_and_biases_without_its_package_stops_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "abc")
    made = SlimeRunner(**LOCAL, wandb_project="p", num_gpus=0, extra_flags=["--seed", "1"])
    words = command(made)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert available(made, words) == [word for word in words if word not in ("--use-wandb", "--wandb-project", "p")]
    assert "pip install 'slime-launcher[wandb]'" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert available(made, words) == words


def submitted(monkeypatch: pytest.MonkeyPatch, made: SlimeRunner, code: int = 0) -> list[str]:
    seen: list[list[str]] = []

    def run(words: list[str], check: bool, env: dict[str, str]) -> None:
        file = Path(words[4].removeprefix("--runtime-env="))
        assert file.stat().st_mode & 0o777 == 0o600
        seen.append([*words[:4], file.read_text(), *words[5:]])
        if code:
            raise subprocess.CalledProcessError(code, words)

    monkeypatch.setattr(subprocess, "run", run)
    made._submit_ray_job(2, ["--num-layers", "1"], made._build_runtime_env(), "/tmp/c.yaml")
    return seen[0]


def test_the_job_is_submitted_to_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").touch()
    made = SlimeRunner(**AGENT, slime_dir=tmp_path, megatron_dir="/m")
    words = submitted(monkeypatch, made)
    assert words[:4] == ["ray", "job", "submit", "--address=http://127.0.0.1:8265"]
    assert words[4] == '{"env_vars": {"PYTHONPATH": "/m", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}}'
    assert words[5:8] == ["--", "python3", str(tmp_path / "train.py")]
    assert words[8:] == made._build_slime_flags(2, ["--num-layers", "1"], "/tmp/c.yaml")


def test_without_a_checkout_the_installed_program_is_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = submitted(monkeypatch, SlimeRunner(**AGENT, slime_dir=tmp_path / "absent"))
    assert words[5:10] == ["--", "python3", "-m", "slime.launcher.cli", "train"]


def test_a_failed_job_is_an_error_that_shows_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    with pytest.raises(subprocess.CalledProcessError, match="the training job ended with exit code 3") as caught:
        submitted(monkeypatch, SlimeRunner(**AGENT), code=3)
    assert isinstance(caught.value, RunFailed)
    assert caught.value.returncode == 3
    assert "secret-key" not in f"{caught.value!r} {caught.value} {caught.value.cmd}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def on_machine(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr("slime.rollout.engines.gpus.visible_gpus", lambda: [str(i) for i in range(gpus)])


def record_steps(monkeypatch: pytest.MonkeyPatch, made: SlimeRunner) -> list[str]:
    steps: list[str] = []
    monkeypatch.setattr(made, "_start_ray", lambda: steps.append("start"))
    monkeypatch.setattr(made, "_submit_ray_job", lambda *_: steps.append("cpu" if made._cpu else "gpu"))
    monkeypatch.setattr(made, "_stop_ray", lambda: steps.append("stop"))
    return steps


def test_a_run_starts_and_stops_its_own_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 8)
    made = SlimeRunner(**LOCAL)
    steps = record_steps(monkeypatch, made)
    made.train(num_rollout=3)
    assert steps == ["stop", "start", "gpu", "stop"]


def test_a_machine_without_gpus_trains_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_machine(monkeypatch, 0)
    made = SlimeRunner(**LOCAL)
    steps = record_steps(monkeypatch, made)
    made.train()
    assert steps[2] == "cpu"
    assert "no GPU here: training on the CPU" in capsys.readouterr().err
    with pytest.raises(InvalidSetting, match="num_gpus must be at most the 0 GPUs of this machine"):
        SlimeRunner(**LOCAL, num_gpus=4).train()


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
def test_a_wrong_number_of_rollouts_starts_nothing(wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    made = SlimeRunner(**LOCAL, num_gpus=0)
    steps = record_steps(monkeypatch, made)
    with pytest.raises(InvalidSetting, match="num_rollout"):
        made.train(num_rollout=wrong)
    assert steps == []


def test_a_model_type_that_is_unknown_starts_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 8)
    made = SlimeRunner(**(LOCAL | {"model_type": "nobody"}))
    steps = record_steps(monkeypatch, made)
    with pytest.raises(FileNotFoundError):
        made.train()
    assert "start" not in steps


def test_a_foreign_ray_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    on_machine(monkeypatch, 8)
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        port = foreign.getsockname()[1]
        monkeypatch.setattr(runner, "DASHBOARD_PORT", port)
        with pytest.raises(PortInUse, match=f"127.0.0.1:{port}.*ray stop"):
            SlimeRunner(**LOCAL).train()
        with pytest.raises(PortInUse):
            RayHead(0, dashboard_port=port).start()
        socket.create_connection(("127.0.0.1", port), timeout=60).close()


def test_the_cpu_command_line_asks_for_no_gpu() -> None:
    words = cpu_flags(SlimeRunner(**LOCAL, num_gpus=0), 1, "/tmp/c.yaml")
    assert value(words, "--rollout-engine") == "embedded"
    assert value(words, "--rollout-engine-device") == "cpu"
    assert not [word for word in words if word.startswith("--sglang-") or "parallel" in word]


def test_importing_the_runner_loads_nothing_heavy() -> None:
    program = (
        "import sys; import slime.launcher; from slime.launcher import SlimeRunner\n"
        "heavy = {'torch', 'ray', 'transformers', 'boto3', 'tensorboard', 'megatron'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
