"""`SlimeRunner`: starts a training run from Python with a handful of fields.

    SlimeRunner(exp_id="first", model_dir="Qwen3-0.6B", data_path="math.jsonl", model_type="qwen3-0.6B").train(100)

Without `agent_runtime_arn` and `s3_bucket` it trains on the local path: our own rollout, and rewards by
`--rm-type math` against the label of each row, unless `extra_flags` say otherwise. With both, agents behind the ARN
produce the episodes. An agent that is called directly, by a URL `http://HOST:PORT/invocations`, needs no bucket.

With GPUs, Megatron and SGLang share them, as a job of a Ray head that `train` starts and stops. `num_gpus=0` trains on
the CPU; so does a machine without a GPU where `num_gpus` has its default.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.launcher.platform.signals import terminate_as_interrupt
from slime.launcher.runner import flags as runner_flags
from slime.launcher.runner.fields import DEFAULT_GPUS, RunnerFields
from slime.launcher.runner.ray_job import (
    LOOPBACK,
    RayHead,
    RunFailed,
    environment,
    in_use,
    listens,
    module_path,
    run_attached,
    runtime_env_file,
)
from slime.types.config_files import read_config
from slime.types.errors import InvalidSetting
from slime.types.setting_values import check

DASHBOARD_PORT = 8265

TOOLKIT_KEYS = (
    "agent_runtime_arn", "s3_bucket", "exp_id", "gateway_port", "acr_timeout", "model_id", "acr_tps_limit",
    "max_concurrent", "max_pool_connections", "reward_postprocessing", "cumulative_token_mode", "renderer_family",
    "gateway_log_level",
)  # fmt: skip


@dataclass
class SlimeRunner(RunnerFields):
    """One training run. The constructor checks every field: InvalidSetting names the field.

    Lengths are in tokens, times in seconds. `extra_flags` are appended to the command line as they are, and win.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if field.metadata:
                setattr(self, field.name, _checked(field, hints[field.name], getattr(self, field.name)))
        self._check_path()
        self._check_gpus()
        self._head: RayHead | None = None
        self._cpu = self.num_gpus == 0

    def _check_path(self) -> None:
        pair = {"agent_runtime_arn": self.agent_runtime_arn, "s3_bucket": self.s3_bucket}
        absent = [name for name, value in pair.items() if not value]
        called_directly = str(self.agent_runtime_arn).startswith(("http://", "https://"))
        if len(absent) == 1 and not called_directly:
            other = next(name for name in pair if name not in absent)
            raise InvalidSetting.required(absent[0], f"{other} needs it; set neither to train without remote agents")
        needed = ["exp_id", "model_dir", "data_path", *(["model_type"] if self.num_gpus else [])]
        missing = [name for name in needed if not getattr(self, name)]
        if missing:
            path = "training with agents" if self.agent_runtime_arn else "the local path"
            raise InvalidSetting.required(missing[0], f"{path} requires {', '.join(needed)}")

    def _check_gpus(self) -> None:
        for name in ("tp_size", "rollout_gpus_per_engine"):
            size = getattr(self, name)
            if self.num_gpus % size:
                raise InvalidSetting.must_be(name, f"a divisor of num_gpus {self.num_gpus}", got=size)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> SlimeRunner:
        """Reads the fields from a YAML file. Raises MissingFile, InvalidFile, and InvalidSetting for unknown keys."""
        values = read_config(os.fspath(path), flag="SlimeRunner.from_yaml")
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                raise InvalidSetting.unknown(f"key in {path}:", key, known)
        return cls(**values)

    def train(self, num_rollout: int = 1) -> None:
        """Runs the training to its end; its output goes to the output of this process.

        num_rollout: iterations to run. Raises RunFailed if the training fails, ModelScriptNotFound, and PortInUse if
        another Ray takes jobs on this machine. Stops everything that it started, however it ends.
        """
        if isinstance(num_rollout, bool) or not isinstance(num_rollout, int) or num_rollout < 0:
            raise InvalidSetting.must_be("num_rollout", "an integer of at least 0", got=num_rollout)
        self._cpu = self._choose_cpu()
        with terminate_as_interrupt():
            self._stop_stale_processes()
            try:
                model_args = self._source_model_script()
                self._start_ray()
                runtime_env = self._build_runtime_env()
                with self._write_toolkit_config() as config_path:
                    self._submit_ray_job(num_rollout, model_args, runtime_env, config_path)
            finally:
                self._stop_ray()

    def _choose_cpu(self) -> bool:
        """Returns whether to train on the CPU. Raises InvalidSetting for more GPUs than this machine has."""
        from slime.rollout.engines.gpus import visible_gpus

        here = len(visible_gpus())
        if self.num_gpus <= here:
            return self.num_gpus == 0
        if here == 0 and self.num_gpus == DEFAULT_GPUS:
            print("SlimeRunner: no GPU here: training on the CPU, as with num_gpus=0", file=sys.stderr)
            return True
        raise InvalidSetting.must_be(
            "num_gpus", f"at most the {here} GPUs of this machine, or 0 for the CPU", got=self.num_gpus,
            reason="tp_size and rollout_gpus_per_engine have to divide it",
        )  # fmt: skip

    def _stop_stale_processes(self) -> None:
        """Stops processes that an earlier `train` of this runner may have left, and no others."""
        self._stop_ray()

    def _start_ray(self) -> None:
        """Starts the Ray head that takes the job. On the CPU the run starts its own Ray instead. Raises PortInUse."""
        if self._cpu:
            return
        if listens(LOOPBACK, DASHBOARD_PORT):
            raise in_use(DASHBOARD_PORT)
        self._head = RayHead(self.num_gpus, dashboard_port=DASHBOARD_PORT)
        self._head.start()

    def _stop_ray(self) -> None:
        if self._head is not None:
            self._head.stop()
            self._head = None

    def _source_model_script(self) -> list[str]:
        """Returns MODEL_ARGS of SLIME_DIR/scripts/models/MODEL_TYPE.sh, else of the model in slime-converters."""
        return [] if self.model_type is None else runner_flags.find_model_args(self.model_type, Path(self.slime_dir))

    def _build_runtime_env(self) -> dict[str, dict[str, str]]:
        """Returns the job's runtime environment, without keys of Weights & Biases.

        Ray shows it in the arguments of processes; the job inherits the keys from this process.
        """
        variables = {"PYTHONPATH": self.megatron_dir, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
        if self.cuda_home:
            variables |= runner_flags.cuda_environment(self.cuda_home)
        return {"env_vars": variables}

    @contextmanager
    def _write_toolkit_config(self) -> Iterator[str]:
        """Yields the path of a YAML file for --custom-config-path, which is deleted afterwards."""
        import yaml

        with tempfile.NamedTemporaryFile("w", prefix="slime-runner-", suffix=".yaml", encoding="utf-8") as file:
            yaml.safe_dump({key: getattr(self, key) for key in TOOLKIT_KEYS}, file)
            file.flush()
            yield file.name

    def _submit_ray_job(
        self, num_rollout: int, model_args: list[str], runtime_env: dict[str, dict[str, str]], config_path: str
    ) -> None:
        """Runs the training to its end, as a job of the Ray head or, on the CPU, as a process. Raises RunFailed."""
        if self._cpu:
            flags = runner_flags.available(self, runner_flags.cpu_flags(self, num_rollout, config_path))
            variables = dict(runtime_env["env_vars"])
            variables |= {"PYTHONPATH": os.pathsep.join([variables["PYTHONPATH"], module_path()])}
            # The embedded engine has no flags for the parsers, so they are passed as variables.
            variables |= {"SGLANG_TOOL_CALL_PARSER": self.sglang_tool_call_parser}
            if self.sglang_reasoning_parser:
                variables |= {"SGLANG_REASONING_PARSER": self.sglang_reasoning_parser}
            run_attached([sys.executable, "-m", "slime.launcher.cli", "train", *flags], "the training", variables)
            return
        flags = runner_flags.available(self, self._build_slime_flags(num_rollout, model_args, config_path))
        with runtime_env_file(runtime_env) as path:
            command = [
                "ray", "job", "submit", f"--address=http://{LOOPBACK}:{DASHBOARD_PORT}", f"--runtime-env={path}",
                "--", *self._program(), *flags,
            ]  # fmt: skip
            try:
                subprocess.run(command, check=True, env=environment(self._head.variables if self._head else None))
            except subprocess.CalledProcessError as error:
                raise RunFailed("the training job", error.returncode, command[:4]) from None

    def _program(self) -> list[str]:
        for script in (Path(self.slime_dir, "train.py"), Path(self.slime_dir, "scripts", "train.py")):
            if script.is_file():
                return ["python3", str(script)]
        return ["python3", "-m", "slime.launcher.cli", "train"]

    def _build_slime_flags(self, num_rollout: int, model_args: list[str], config_path: str) -> list[str]:
        """Returns the command line of the training: MODEL_ARGS first, `extra_flags` last."""
        if self.num_gpus == 0:
            return runner_flags.cpu_flags(self, num_rollout, config_path)
        return runner_flags.gpu_flags(self, num_rollout, model_args, config_path)


def _checked(field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    return check(field, hint, value, name=field.name)
