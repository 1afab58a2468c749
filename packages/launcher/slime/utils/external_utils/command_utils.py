"""Compatibility: functions with which scripts and end-to-end tests prepare and start a training.

    import slime.utils.external_utils.command_utils as U

    U.execute_train(train_args="--hf-checkpoint ...", num_gpus_per_node=8, megatron_model_type="qwen3-4B")

Environment: SLIME_SCRIPT_EXTERNAL_RAY=1 submits to the Ray that runs on this machine; SLIME_SCRIPT_ENABLE_RAY_SUBMIT=0
runs the training as a process in place of a job; SLIME_SCRIPT_RAY_DASHBOARD_PORT is where jobs are submitted
(default: a free port, 8265 of an external Ray); SLIME_SCRIPT_MEGATRON_DIR is put on the path of the training.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from slime.launcher.platform.secret_variables import secrets_of, shown_command
from slime.launcher.platform.signals import terminate_as_interrupt
from slime.launcher.runner.flags import find_model_args
from slime.launcher.runner.ray_job import (
    LOOPBACK,
    RayHead,
    RunFailed,
    environment,
    module_path,
    run_attached,
    runtime_env_file,
)
from slime.types.errors import InvalidSetting

DASHBOARD_PORT = 8265
MEGATRON_PORT = 23456
TRUE, FALSE = ("1", "true"), ("0", "false")
# Programs of the original that are commands here, and need no checkout.
COMMANDS = {"train.py": "train", "train_async.py": "train-async"}


def repo_base_dir() -> Path:
    """Returns the checkout that this file is part of, or the current directory for an installed package."""
    for directory in Path(__file__).resolve().parents:
        if (directory / "scripts" / "models").is_dir():
            return directory
    return Path.cwd()


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Prints and runs a line of bash. Returns its standard output if `capture_output` is set, otherwise None.

    Raises RunFailed, a subprocess.CalledProcessError, if it ends with another exit code than 0.
    """
    print(f"EXEC: {shown_command(cmd)}", flush=True)
    done = subprocess.run(
        ["bash", "-c", cmd], env=environment(), text=True, stdout=subprocess.PIPE if capture_output else None
    )
    if capture_output:
        print(done.stdout, end="", flush=True)
    if done.returncode:
        raise RunFailed(f"`{shown_command(cmd)}`", done.returncode, ["bash", "-c", cmd])
    return done.stdout if capture_output else None


def hf_download_dataset(full_name: str, data_dir: str | os.PathLike[str] | None = None) -> str:
    """Downloads the data set OWNER/NAME of Hugging Face into DATA_DIR/NAME (default: ~/datasets); returns that path."""
    owner, slash, name = full_name.partition("/")
    if not (owner and slash and name):
        raise InvalidSetting.must_be("full_name", "OWNER/NAME", got=full_name)
    target = str(Path(data_dir or Path.home() / "datasets", name))
    exec_command(shlex.join(["hf", "download", "--repo-type", "dataset", full_name, "--local-dir", target]))
    return target


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Copies the content of a directory into another, which it creates if necessary."""
    source, target = shlex.quote(str(path_src).rstrip("/") + "/"), shlex.quote(str(path_dst))
    exec_command(f"mkdir -p {target} && rsync -a --info=progress2 {source} {target}")


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str | None,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str | os.PathLike[str] | None = None,
    hf_checkpoint: str | None = None,
) -> str:
    """Converts HF_CHECKPOINT (default: ~/models/MODEL_NAME) into DIR_DST/MODEL_NAME_torch_dist and returns that path.

    Keeps a checkpoint that was converted from the same files. dir_dst: default the home directory. num_gpus_per_node:
    number of ranks that share the work. multinode: share it with the other nodes of a Slurm job.
    """
    source = hf_checkpoint or str(Path.home() / "models" / model_name)
    target = str(Path(dir_dst or Path.home(), f"{model_name}_torch_dist"))
    python = [sys.executable]
    if num_gpus_per_node > 1 or multinode:
        nodes = _slurm_nodes() if multinode else []
        python += ["-m", "torch.distributed.run", "--nproc-per-node", str(max(1, num_gpus_per_node)), *nodes]
    model_args = find_model_args(megatron_model_type, repo_base_dir()) if megatron_model_type else []
    words = [*python, "-m", "slime.converters.cli", "hf-to-torch-dist", *model_args]
    exec_command(f"{shlex.join([*words, '--hf-checkpoint', source, '--save', target])} {extra_args}".rstrip())
    return target


def _slurm_nodes() -> list[str]:
    hosts = os.environ.get("SLURM_JOB_HOSTNAMES", "").split()
    rank = os.environ.get("SLURM_NODEID", "")
    if not hosts or not rank:
        raise InvalidSetting.requires(
            "multinode",
            "SLURM_JOB_HOSTNAMES and SLURM_NODEID in the environment",
            "run it in a Slurm job, with the hosts that `scontrol show hostnames` prints",
        )
    return [
        "--master-addr", hosts[0], "--master-port", str(MEGATRON_PORT), "--nnodes", str(len(hosts)), "--node-rank", rank
    ]  # fmt: skip


@dataclass
class ExecuteTrainConfig:
    """Settings of a script's own command line; scripts extend it.

    cuda_core_dump: whether a CUDA error leaves a core dump in the working directory.
    num_nodes: number of nodes of the cluster, for the script's own calculations.
    extra_env_vars: further variables of the training, `A=1 B=2` or a JSON object. Variables named like secrets (KEY,
        TOKEN, SECRET, PASSWORD, CREDENTIAL) are kept out of argument lists, except with an external Ray.
    """

    cuda_core_dump: bool = False
    num_nodes: int = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    extra_env_vars: str = ""


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], object] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Runs a training to its end, as a job of a Ray head that is started for it and stopped afterwards.

    train_args: flags as in a shell, on one line or several. megatron_model_type: a name in scripts/models, whose
    MODEL_ARGS come first; it selects Megatron unless `train_args` names another backend.
    before_ray_job_submit: called when Ray is running.

    Raises RunFailed if the training fails, and the errors of `find_model_args` and RayHead.
    """
    submits = get_bool_env_var("SLIME_SCRIPT_ENABLE_RAY_SUBMIT", "1")
    external = get_bool_env_var("SLIME_SCRIPT_EXTERNAL_RAY")
    port = os.environ.get("SLIME_SCRIPT_RAY_DASHBOARD_PORT")
    model_args = _megatron_args(megatron_model_type, train_args) if megatron_model_type else []
    train = f"{_program(train_script)} {shlex.join(model_args)} {_one_line(train_args)}"
    variables = _variables(config or ExecuteTrainConfig(), extra_env_vars or {})
    with terminate_as_interrupt(), ExitStack() as stack:
        access: Mapping[str, str] = {}
        if submits and not external:
            head = RayHead(
                num_gpus_per_node,
                host=os.environ.get("MASTER_ADDR", LOOPBACK),
                dashboard_port=_port(port),
                inherited=secrets_of(variables),
            )
            stack.enter_context(head)
            access, port = head.variables, str(head.dashboard_port)
        if before_ray_job_submit is not None:
            before_ray_job_submit()
        if not submits:
            joins = {"RAY_ADDRESS": os.environ.get("RAY_ADDRESS", "auto")} if external else {}
            print(f"EXEC: {shown_command(train)}", flush=True)
            run_attached(["bash", "-c", f"exec {train}"], "the training", variables | joins)
            return
        # With an external Ray, whose environment is fixed already, secrets have to be in the job's runtime environment.
        hidden = {} if external else secrets_of(variables)
        runtime_env = {"env_vars": {name: value for name, value in variables.items() if name not in hidden}}
        path = shlex.quote(stack.enter_context(runtime_env_file(runtime_env)))
        address = f"http://{LOOPBACK}:{port or DASHBOARD_PORT}"
        submit = f"ray job submit --address={address} --runtime-env={path} -- {train}"
        print(f"EXEC: {shown_command(submit)}", flush=True)
        run_attached(["bash", "-c", f"exec {submit}"], "the training job", {**access, **_no_proxy()})


def _one_line(words: str) -> str:
    # bash would end the command at a line break, and drop the rest after `exec`.
    return " ".join(line.rstrip().removesuffix("\\") for line in words.splitlines()).strip()


def _port(text: str | None) -> int:
    name = "SLIME_SCRIPT_RAY_DASHBOARD_PORT"
    if text and not (text.isdecimal() and int(text) < 65536):
        raise InvalidSetting.must_be(name, "a port", got=text)
    return int(text or 0)


def _megatron_args(model_type: str, train_args: str) -> list[str]:
    model_args = find_model_args(model_type, repo_base_dir())
    return model_args if "--train-backend" in train_args else ["--train-backend", "megatron", *model_args]


def _program(script: str) -> str:
    for path in (Path(script), repo_base_dir() / script):
        if path.is_file():
            return shlex.join(["python3", str(path.resolve())])
    if script in COMMANDS:
        return f"python3 -m slime.launcher.cli {COMMANDS[script]}"
    raise InvalidSetting(
        f"train_script: no {script} here or in {repo_base_dir()}", field="train_script", value=script,
        expected=f"a file, or one of {', '.join(COMMANDS)}",
    )  # fmt: skip


def _variables(config: ExecuteTrainConfig, extra: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables of the training, which override Ray's."""
    megatron = os.environ.get("SLIME_SCRIPT_MEGATRON_DIR", "")
    variables = {
        "PYTHONPATH": os.pathsep.join(path for path in (megatron, module_path()) if path),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **_no_proxy(),
    }
    if config.cuda_core_dump:
        variables |= {
            "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
            "CUDA_COREDUMP_FILE": str(Path.cwd() / "cuda_coredump_%h.%p.%t"),
        }
    return variables | dict(extra) | _parse_variables(config.extra_env_vars)


def _no_proxy() -> dict[str, str]:
    known = [host for host in os.environ.get("no_proxy", "").split(",") if host]
    hosts = ",".join(dict.fromkeys([*known, LOOPBACK, os.environ.get("MASTER_ADDR", LOOPBACK)]))
    return {"no_proxy": hosts, "NO_PROXY": hosts}


def _parse_variables(text: str) -> dict[str, str]:
    if text.lstrip().startswith("{"):
        try:
            return {str(name): str(value) for name, value in json.loads(text).items()}
        except ValueError as error:
            raise InvalidSetting(f"extra_env_vars: {error}", field="extra_env_vars") from None
    variables = {}
    for number, word in enumerate(shlex.split(text), 1):
        name, equals, value = word.partition("=")
        if not equals:
            # The word itself may be a secret.
            raise InvalidSetting(
                f"extra_env_vars: word {number} is not NAME=VALUE", field="extra_env_vars", expected="NAME=VALUE"
            )
        variables[name] = value
    return variables


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """Returns flags that log a test's run to W&B under its name; none without the package wandb or WANDB_API_KEY."""
    for reason, absent in (
        ("WANDB_API_KEY is not set", not os.environ.get("WANDB_API_KEY")),
        ("the package wandb is not installed", importlib.util.find_spec("wandb") is None),
    ):
        if absent:
            print(f"no logging to Weights & Biases: {reason}")
            return ""
    file = Path(test_file)
    name = file.stem if len(file.stem) >= 6 else f"{file.parent.name}_{file.stem}"
    parts = (run_name_prefix, run_id or create_run_id(), os.environ.get("GITHUB_COMMIT_NAME"))
    group = "_".join(part for part in parts if part)
    return shlex.join([
        "--use-wandb", "--wandb-project", f"slime-{name}", "--wandb-group", group, "--disable-wandb-random-suffix"
    ]) + " "  # fmt: skip


def create_run_id() -> str:
    """Returns the time (UTC) and three random digits."""
    return f"{datetime.now(UTC):%y%m%d-%H%M%S}-{random.SystemRandom().randint(0, 999):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Returns whether an environment variable is set to true or 1. Raises InvalidSetting for an unknown word."""
    value = (os.environ.get(name, "").strip() or default).lower()
    if value not in (*TRUE, *FALSE):
        raise InvalidSetting.one_of(name, TRUE + FALSE, got=value)
    return value in TRUE


def get_env_enable_infinite_run() -> bool:
    """Returns whether a test is to train without end."""
    return get_bool_env_var("SLIME_TEST_ENABLE_INFINITE_RUN")


def save_to_temp_file(text: str, ext: str) -> str:
    """Writes a file that stays, and returns its path."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="slime-", suffix=f".{ext.lstrip('.')}", encoding="utf-8", delete=False
    ) as file:
        file.write(text)
    print(f"wrote {file.name}:\n{text}")
    return file.name
