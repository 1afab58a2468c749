"""`command_utils`, by which scripts and end-to-end tests start what they need."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import slime.utils.external_utils.command_utils as U
from slime.launcher.runner.flags import ModelScriptNotFound
from slime.launcher.runner.ray_job import RunFailed, module_path
from slime.types.errors import InvalidSetting

# Starts a program that writes to argv[1] when it is told to stop, and waits for it.
DRIVER = """
import sys
from slime.launcher.runner.ray_job import run_attached
run_attached([sys.executable, "-c", sys.argv[2], sys.argv[1]], "the program")
"""
PROGRAM = """
import pathlib, signal, subprocess, sys
def stop(*_):
    pathlib.Path(sys.argv[1]).write_text("stopped in order")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"])
print(child.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would run, as words."""
    seen: list[list[str]] = []
    monkeypatch.setattr(U, "exec_command", lambda line: seen.append(shlex.split(line)))
    return seen


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Collects what trainings without Ray's jobs would run: (words, environment)."""
    seen: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setenv("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "0")
    monkeypatch.setattr(U, "run_attached", lambda words, what, extra: seen.append((shlex.split(words[2]), extra)))
    return seen


def test_a_command_is_printed_and_runs_in_bash(capfd: pytest.CaptureFixture[str]) -> None:
    assert U.exec_command('A=(1 2); echo "${A[@]}"') is None
    assert capfd.readouterr().out == 'EXEC: A=(1 2); echo "${A[@]}"\n1 2\n'
    assert U.exec_command("printf x; printf y >&2", capture_output=True) == "x"


def test_a_command_that_fails_is_an_error() -> None:
    with pytest.raises(RunFailed, match="`exit 3` ended with exit code 3") as caught:
        U.exec_command("exit 3")
    assert isinstance(caught.value, subprocess.CalledProcessError)
    assert caught.value.returncode == 3


def test_the_interpreter_of_this_process_is_python3() -> None:
    told = U.exec_command("python3 -c 'import sys; print(sys.prefix)'", capture_output=True)
    assert Path(told.strip()) == Path(sys.prefix)


def test_an_interrupt_stops_a_program_in_order_and_all_that_it_started(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    environment = os.environ | {"PYTHONPATH": module_path()}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(mark), PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment,
    )  # fmt: skip
    assert driver.stdout is not None
    stubborn = psutil.Process(int(driver.stdout.readline()))
    driver.send_signal(signal.SIGINT)
    driver.communicate(timeout=60)
    assert mark.read_text() == "stopped in order"
    stubborn.wait(timeout=120)
    assert driver.returncode != 0


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: elsewhere a child is not told of its parent's death")
def test_a_program_stops_in_order_where_the_process_that_runs_it_is_killed(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(mark), PROGRAM], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": module_path()},
    )  # fmt: skip
    assert driver.stdout is not None
    stubborn = psutil.Process(int(driver.stdout.readline()))
    program = stubborn.parent()
    driver.kill()
    try:
        assert program is not None
        program.wait(timeout=120)
        assert mark.read_text() == "stopped in order"
    finally:
        stubborn.kill()
        driver.communicate(timeout=120)


@pytest.mark.parametrize(("text", "expected"), [("1", True), ("TRUE", True), ("0", False), ("false", False)])
def test_boolean_variables(text: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SWITCH", text)
    assert U.get_bool_env_var("A_SWITCH") is expected
    monkeypatch.setenv("SLIME_TEST_ENABLE_INFINITE_RUN", text)
    assert U.get_env_enable_infinite_run() is expected


def test_a_boolean_variable_that_is_empty_or_absent_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("A_SWITCH", raising=False)
    assert U.get_bool_env_var("A_SWITCH", "1")
    monkeypatch.setenv("A_SWITCH", "")
    assert not U.get_bool_env_var("A_SWITCH")
    monkeypatch.setenv("A_SWITCH", "maybe")
    with pytest.raises(InvalidSetting, match="A_SWITCH must be one of 1, true, 0, false, got 'maybe'"):
        U.get_bool_env_var("A_SWITCH")


def test_a_temporary_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = Path(U.save_to_temp_file("a: 1\n", "yaml"))
    assert path.read_text() == "a: 1\n"
    assert path.suffix == ".yaml"
    assert path != Path(U.save_to_temp_file("", ".yaml"))


def test_run_ids_differ_from_second_to_second() -> None:
    assert len(U.create_run_id()) == len("yymmdd-hhmmss-000")


def test_data_sets_are_downloaded_by_name(ran: list[list[str]], tmp_path: Path) -> None:
    assert U.hf_download_dataset("owner/a-set", tmp_path) == str(tmp_path / "a-set")
    assert ran == [["hf", "download", "--repo-type", "dataset", "owner/a-set", "--local-dir", str(tmp_path / "a-set")]]
    with pytest.raises(InvalidSetting, match="full_name must be OWNER/NAME"):
        U.hf_download_dataset("a-set")


def test_copying_quotes_its_paths(ran: list[list[str]]) -> None:
    U.rsync_simple("/a b/", "/c d")
    assert ran == [["mkdir", "-p", "/c d", "&&", "rsync", "-a", "--info=progress2", "/a b/", "/c d"]]


def test_checkpoints_are_converted_with_the_arguments_of_their_model(ran: list[list[str]], tmp_path: Path) -> None:
    target = U.convert_checkpoint(
        "m", "qwen2.5-0.5B", 1, dir_dst=tmp_path, hf_checkpoint="/models/m", extra_args="--dtype float32"
    )
    assert target == str(tmp_path / "m_torch_dist")
    words = ran[0]
    assert words[1:4] == ["-m", "slime.converters.cli", "hf-to-torch-dist"]
    assert words[words.index("--num-layers") + 1] == "24"
    assert words[-6:] == ["--hf-checkpoint", "/models/m", "--save", target, "--dtype", "float32"]
    U.convert_checkpoint("m", None, 4, dir_dst=tmp_path, hf_checkpoint="/models/m")
    assert ran[1][1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "4"]


def test_conversion_on_several_nodes_needs_to_know_them(ran: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_HOSTNAMES", raising=False)
    with pytest.raises(InvalidSetting, match="SLURM_JOB_HOSTNAMES"):
        U.convert_checkpoint("m", None, 8, multinode=True)
    monkeypatch.setenv("SLURM_JOB_HOSTNAMES", "one\ntwo")
    monkeypatch.setenv("SLURM_NODEID", "1")
    U.convert_checkpoint("m", None, 8, multinode=True)
    assert ["--master-addr", "one"] == ran[0][5:7]
    assert ["--nnodes", "2", "--node-rank", "1"] == ran[0][9:13]


def test_wandb_flags_only_with_a_key_and_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert U.get_default_wandb_args("tests/test_short.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "secret-key")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert U.get_default_wandb_args("tests/test_short.py") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setenv("GITHUB_COMMIT_NAME", "abc")
    words = shlex.split(U.get_default_wandb_args("tests/test_short.py", run_name_prefix="ci", run_id="7"))
    assert words[:5] == ["--use-wandb", "--wandb-project", "slime-test_short", "--wandb-group", "ci_7_abc"]
    assert "secret-key" not in words


def test_training_without_ray_jobs_runs_the_same_command(
    direct: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    program = tmp_path / "train.py"
    program.touch()
    called: list[str] = []
    U.execute_train(
        "--lr 1e-6 --note 'a b'",
        num_gpus_per_node=0,
        megatron_model_type="qwen2.5-0.5B",
        train_script=str(program),
        before_ray_job_submit=lambda: called.append("before"),
        extra_env_vars={"A": "1"},
        config=U.ExecuteTrainConfig(extra_env_vars="B=2 'C=3 4'"),
    )
    words, variables = direct[0]
    assert words[:7] == ["exec", "python3", str(program), "--train-backend", "megatron", "--num-layers", "24"]
    assert words[-4:] == ["--lr", "1e-6", "--note", "a b"]
    assert called == ["before"]
    assert {name: variables[name] for name in "ABC"} == {"A": "1", "B": "2", "C": "3 4"}
    assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "127.0.0.1" in variables["no_proxy"].split(",")


@pytest.mark.parametrize("ending", ["\n", " \\\n", "\r\n"])
def test_flags_may_be_on_several_lines(
    direct: list[tuple[list[str], dict[str, str]]], tmp_path: Path, ending: str
) -> None:
    (tmp_path / "train.py").touch()
    flags = f"{ending}--lr 1e-4{ending}--seed '1'{ending}   --eps-clip 0.1{ending}"
    U.execute_train(flags, 1, train_script=str(tmp_path / "train.py"))
    assert direct[0][0][-6:] == ["--lr", "1e-4", "--seed", "1", "--eps-clip", "0.1"]


def test_a_port_that_is_none_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("SLIME_SCRIPT_RAY_DASHBOARD_PORT", "http")
    with pytest.raises(InvalidSetting, match="SLIME_SCRIPT_RAY_DASHBOARD_PORT must be a port, got 'http'"):
        U.execute_train("", 1, train_script=str(tmp_path / "train.py"))


def test_core_dumps_are_asked_for(direct: list[tuple[list[str], dict[str, str]]], tmp_path: Path) -> None:
    U.execute_train("", 0, None, str(_touch(tmp_path)), config=U.ExecuteTrainConfig(cuda_core_dump=True))
    assert direct[0][1]["CUDA_ENABLE_COREDUMP_ON_EXCEPTION"] == "1"


def test_variables_may_be_json_and_wrong_ones_are_named(
    direct: list[tuple[list[str], dict[str, str]]], tmp_path: Path
) -> None:
    config = U.ExecuteTrainConfig(extra_env_vars='{"B": 2}')
    U.execute_train("", 0, None, str(_touch(tmp_path)), config=config)
    assert direct[0][1]["B"] == "2"
    for wrong in ("B", '{"B"'):
        with pytest.raises(InvalidSetting, match="extra_env_vars"):
            U.execute_train("", 0, None, str(_touch(tmp_path)), config=U.ExecuteTrainConfig(extra_env_vars=wrong))


def test_what_is_not_there_is_named_before_anything_starts(direct: list[tuple[list[str], dict[str, str]]]) -> None:
    with pytest.raises(ModelScriptNotFound, match=r"did you mean qwen2\.5-0\.5B"):
        U.execute_train("", 0, "qwen25-0.5B")
    with pytest.raises(InvalidSetting, match="train_script: no trian.py"):
        U.execute_train("", 0, None, "trian.py")
    assert direct == []


def _touch(directory: Path) -> Path:
    path = directory / "train.py"
    path.touch()
    return path
