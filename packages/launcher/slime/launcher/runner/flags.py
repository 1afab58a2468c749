"""Makes command lines of `slime train` from the fields of `SlimeRunner`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from slime.launcher.runner.fields import RunnerFields
from slime.types.errors import InvalidSetting, MissingFile, nearest

AGENT_ROLLOUT = "slime.rollout.agents.rollout.generate_rollout"
AGENT_REWARDS = "slime.rollout.agents.rewards.normalize_episode_rewards"

# Flags that give the local path a reward; without any of them in `extra_flags` it uses `--rm-type math`.
REWARD_FLAGS = ("--rm-type", "--custom-rm-path", "--rollout-function-path", "--rm-url", "--config")
LABEL_FLAGS = ("--label-key", "--config")

OTHER_CUDA = re.compile(r"^/usr/local/cuda(-[0-9.]+)?(/|$)")


class ModelScriptNotFound(MissingFile, FileNotFoundError):
    """A model type that neither the directory of model scripts nor slime-converters knows."""


def find_model_args(model_type: str, slime_dir: Path) -> list[str]:
    """Returns MODEL_ARGS of SLIME_DIR/scripts/models/MODEL_TYPE.sh, or of the model in slime-converters.

    Raises ModelScriptNotFound, or InvalidFile for a script that does not set MODEL_ARGS.
    """
    from slime.converters.megatron.model_scripts import model_config, model_flags, model_names, read_script

    script = slime_dir / "scripts" / "models" / f"{model_type}.sh"
    if script.is_file():
        return read_script(script)
    try:
        return model_flags(model_config(model_type))
    except InvalidSetting as error:
        near = nearest(model_type, model_names())
        hint = f"; did you mean {near}?" if near else f" ({', '.join(model_names())})"
        raise ModelScriptNotFound(
            f"model type {model_type}: no {script}, and no known model of that name{hint}",
            field="model_type", value=model_type, expected=near or "the name of a model script",
        ) from error  # fmt: skip


def gpu_flags(runner: RunnerFields, num_rollout: int, model_args: Sequence[str], config_path: str) -> list[str]:
    """Returns flags for Megatron and SGLang on the same `num_gpus` GPUs; `extra_flags` come last."""
    return [
        *model_args,
        *_common(runner, num_rollout, config_path),
        *pairs({
            "--train-backend": "megatron",
            "--tensor-model-parallel-size": runner.tp_size,
            "--rollout-num-gpus-per-engine": runner.rollout_gpus_per_engine,
            "--actor-num-gpus-per-node": runner.num_gpus,
            "--megatron-to-hf-mode": "bridge",
        }),
        "--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d", "--use-precision-aware-optimizer",
        "--sequence-parallel", "--accumulate-allreduce-grads-in-fp32", "--attention-softmax-in-fp32",
        *pairs({
            "--lr-decay-style": "constant",
            "--attention-dropout": "0.0",
            "--hidden-dropout": "0.0",
            "--attention-backend": "flash",
        }),
        *_sglang(runner),
        *_cuda(runner),
        *_wandb(runner),
        *runner.extra_flags,
    ]  # fmt: skip


def cpu_flags(runner: RunnerFields, num_rollout: int, config_path: str) -> list[str]:
    """Returns flags for the same algorithm on the CPU, with the embedded engine; `extra_flags` come last."""
    return [
        *_common(runner, num_rollout, config_path),
        *pairs({"--rollout-engine": "embedded", "--rollout-engine-device": "cpu"}),
        *_wandb(runner),
        *runner.extra_flags,
    ]


def pairs(values: Mapping[str, object]) -> list[str]:
    """Returns `--flag value` for each value that is not None."""
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def _common(runner: RunnerFields, num_rollout: int, config_path: str) -> list[str]:
    return [
        *pairs({
            "--hf-checkpoint": runner.model_dir,
            "--ref-load": runner.model_dir,
            "--prompt-data": runner.data_path,
            "--input-key": "prompt",
            "--run-name": runner.exp_id,
            "--num-rollout": num_rollout,
            "--rollout-batch-size": runner.rollout_batch_size,
            "--n-samples-per-prompt": runner.n_samples_per_prompt,
            "--rollout-max-response-len": runner.rollout_max_response_len,
            "--rollout-temperature": runner.rollout_temperature,
            "--advantage-estimator": "grpo",
            "--kl-loss-type": "low_var_kl",
            "--eps-clip": runner.eps_clip,
            "--eps-clip-high": runner.eps_clip_high,
            "--lr": runner.lr,
            "--weight-decay": runner.weight_decay,
            "--adam-beta2": runner.adam_beta2,
            "--max-tokens-per-gpu": runner.max_tokens_per_gpu,
            "--custom-config-path": config_path,
        }),
        "--use-kl-loss", "--colocate", "--use-dynamic-batch-size", "--use-dynamic-global-batch-size",
        *_rewards(runner),
    ]  # fmt: skip


def _rewards(runner: RunnerFields) -> list[str]:
    if runner.agent_runtime_arn is not None:
        return pairs({"--rollout-function-path": AGENT_ROLLOUT, "--custom-reward-post-process-path": AGENT_REWARDS})
    explicit_flags = {word.split("=", 1)[0] for word in runner.extra_flags}
    return pairs({
        "--label-key": None if explicit_flags.intersection(LABEL_FLAGS) else "label",
        "--rm-type": None if explicit_flags.intersection(REWARD_FLAGS) else "math",
    })  # fmt: skip


def _sglang(runner: RunnerFields) -> list[str]:
    return pairs({
        "--sglang-mem-fraction-static": runner.sglang_mem_fraction_static,
        "--sglang-cuda-graph-max-bs": 32,
        "--sglang-tool-call-parser": runner.sglang_tool_call_parser,
        "--sglang-reasoning-parser": runner.sglang_reasoning_parser,
        "--sglang-context-length": runner.sglang_context_length,
        "--sglang-data-parallel-size": runner.sglang_data_parallel_size,
        "--sglang-log-level": "warning",
        "--sglang-log-level-http": "warning",
    })  # fmt: skip


def _cuda(runner: RunnerFields) -> list[str]:
    # Trainer processes do not inherit the environment of the job.
    return ["--train-env-vars", json.dumps(cuda_environment(runner.cuda_home))] if runner.cuda_home else []


def _wandb(runner: RunnerFields) -> list[str]:
    if not os.environ.get("WANDB_API_KEY"):
        return []
    return ["--use-wandb", *pairs({"--wandb-project": runner.wandb_project, "--wandb-group": runner.wandb_group})]


def available(runner: RunnerFields, words: Sequence[str]) -> list[str]:
    """Removes the flags of Weights & Biases, with a warning, if its package is not installed.

    They only follow from a key in the environment, which should not stop a run. Flags in `extra_flags` stay, and are
    then refused by name.
    """
    wandb_flags = _wandb(runner)
    if not wandb_flags or importlib.util.find_spec("wandb") is not None:
        return list(words)
    print("SlimeRunner: no logging to Weights & Biases: pip install 'slime-launcher[wandb]'", file=sys.stderr)
    end = len(words) - len(runner.extra_flags)
    return [*words[: end - len(wandb_flags)], *words[end:]]


def cuda_environment(cuda_home: str) -> dict[str, str]:
    """Returns variables that pin one CUDA toolkit; two in one process end it ("Multiple libcudart libraries found")."""
    bundled = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("*/lib"))
    inherited = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path]
    kept = [path for path in inherited if not OTHER_CUDA.match(path)]
    return {"CUDA_HOME": cuda_home, "LD_LIBRARY_PATH": ":".join([*map(str, bundled), f"{cuda_home}/lib64", *kept])}
