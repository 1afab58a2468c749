"""Checks the settings of a whole run before anything starts.

Each package checks its own settings; the checks here are those between packages, and of files.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from slime.buffer.store.objects import ObjectPayloads
from slime.buffer.store.postgres_session import look
from slime.converters.torch_dist.directory import is_torch_dist
from slime.launcher.config.catalogue import as_typed
from slime.launcher.config.checks.engine_weights import check_deltas, check_quantization
from slime.launcher.config.checks.loop import check_loop, check_recordings
from slime.launcher.config.checks.on_policy import check_on_policy
from slime.launcher.config.settings import LauncherSettings
from slime.launcher.metrics.sinks.registry import check_trackers
from slime.launcher.run_directory.writable import check_places
from slime.rollout.engines.kind import EngineKind
from slime.rollout.engines.registry import KINDS
from slime.rollout.engines.sglang.reserved import tensor_parallel_size
from slime.rollout.rewards.registry import may_return_dict
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, DEFAULT_ROLLOUT_FUNCTION, RolloutSettings
from slime.trainer.settings.adapters import check_adapter, check_rank, refuse_adapter, refuse_quantized_base
from slime.trainer.settings.checks import refuse_groups_of_one, refuse_nuclei_without_gradient
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable
from slime.types.files import check_readable, no_directory
from slime.types.models.experts import experts_of
from slime.types.models.vision import require_vision, vision_of
from slime.types.prompt_files.readers import reader_of
from slime.types.prompt_files.slices import split_slice
from slime.types.setting_values import flag_name

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")

# A larger number is a typing error, and planning rank by rank would take forever.
MOST_GPUS = 1_000_000
# So is one of these: no run has a hundredth of them. The numbers of each entry are multiplied.
MOST: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("rollout_batch_size", "n_samples_per_prompt"), 10**8, "samples per iteration"),
    (("over_sampling_batch_size", "n_samples_per_prompt"), 10**8, "samples per iteration"),
    (("async_buffer_size", "rollout_batch_size", "n_samples_per_prompt"), 10**9, "samples generated ahead"),
    (("n_samples_per_eval_prompt",), 10**6, "samples per prompt of an evaluation"),
    *(((f"{kind}_max_{part}_len",), 10**9, "tokens")
      for kind in ("rollout", "eval") for part in ("prompt", "response", "context")),
    (("num_rollout",), 10**12, "iterations"),
    (("num_epoch",), 10**9, "passes over the prompts"),
)  # fmt: skip


def check_run(args: Mapping[str, Any]) -> None:
    """Raises InvalidSetting or NotAvailable for settings that do not fit together; `args` is flat."""
    _check_passwords(args)
    _check_size(args)
    check_loop(args)
    own_source = args["data_source_path"] != DEFAULT_DATA_SOURCE
    if own_source and args["num_epoch"] is not None:
        raise InvalidSetting.conflict(
            as_typed("num_epoch", args["num_epoch"]), "--data-source-path",
            "the prompts of the data source cannot be counted; use --num-rollout",
        )  # fmt: skip
    needs_prompts = args["rollout_global_dataset"] and args["num_rollout"] != 0 and not args["load_debug_rollout_data"]
    if args["prompt_data"] is None and needs_prompts and not own_source:
        raise InvalidSetting.required(
            "--prompt-data", "a file of prompts; with --disable-rollout-global-dataset clients add the prompts"
        )
    for name in ("eval_interval", "skip_eval_before_train"):
        if args[name] and not args["eval_prompt_data"]:
            raise _requires(args, name, "--eval-prompt-data")
    if args["num_rollout"] == 0 and not args["eval_prompt_data"]:
        raise _requires(args, "num_rollout", "--eval-prompt-data", "there is nothing to do")
    for name in ("save", "save_hf", "save_keep", "save_retain_interval", "async_save"):
        if args[name] and args["save_interval"] is None:
            raise _requires(args, name, "--save-interval N")
    for name, other in (
        ("ckpt_step", "load"),
        ("ref_ckpt_step", "ref_load"),
        ("opd_teacher_ckpt_step", "opd_teacher_load"),
    ):
        if args[name] is not None and args[other] is None:
            raise _requires(args, name, as_typed(other, "DIR"))
    _check_template("--save-hf", args["save_hf"])
    _check_template("--load-forge-rollout-data", args["load_forge_rollout_data"])
    for name, value in args["train_env_vars"].items():
        if not name or "=" in name or "\0" in name:
            raise InvalidSetting.must_be("--train-env-vars", "names of variables, without = and NUL", got=name)
        if not isinstance(value, str) or "\0" in value:
            raise InvalidSetting.must_be(f"--train-env-vars {name}", "text without NUL", got=value)
    if args["megatron_to_hf_mode"] is not None and args["train_backend"] != "megatron":
        raise _requires(args, "megatron_to_hf_mode", "--train-backend megatron")
    if args["rollout_data_transport"] == "nixl" and importlib.util.find_spec("nixl") is None:
        raise NotAvailable.not_installed("--rollout-data-transport nixl", "nixl", "slime-launcher[nixl]")
    if args["buffer_store"]:
        look(args["buffer_store"])
    if args["buffer_payloads"]:
        ObjectPayloads(args["buffer_payloads"])
    _check_reward_key(args)
    _check_teacher(args)
    check_trackers(args)
    if args["metrics_port"] is None and args["metrics_host"] != LauncherSettings.metrics_host:
        raise _requires(args, "metrics_host", "--metrics-port N")
    check_on_policy(args)
    _check_nuclei(args)
    check_deltas(args)
    _check_batch(args)


def _check_passwords(args: Mapping[str, Any]) -> None:
    of_sglang = {f"sglang_{name}": value for name, value in args["sglang_args"].items()}
    for name, value in {**args, **of_sglang}.items():
        if name == "mlflow_tracking_uri":
            # Its own check names the variables that MLflow reads.
            continue
        refuse_password(flag_name(name), value)


def refuse_password(flag: str, value: Any) -> None:
    """Raises InvalidSetting if `value`, or an item of it, is a URL with a password."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and re.match(r"[\w+.-]+://[^/\s]*:[^/\s]*@", text):
            raise InvalidSetting(
                f"{flag} must hold no password: everyone on the machine can read arguments, and run.yaml would "
                "keep it; read it from a file or the environment, in a function of yours",
                field=flag, expected="a URL without a password",
            )  # fmt: skip


def _check_reward_key(args: Mapping[str, Any]) -> None:
    key, rm_type = args["reward_key"], args["rm_type"]
    # A function of the user's scores samples as it likes.
    scoring_functions = ("custom_rm_path", "custom_generate_function_path", "custom_agent_path")
    if not key or not rm_type or any(args[name] for name in scoring_functions):
        return
    if args["rollout_function_path"] == DEFAULT_ROLLOUT_FUNCTION and not may_return_dict(rm_type):
        raise InvalidSetting.conflict(
            as_typed("reward_key", key), as_typed("rm_type", rm_type), "this reward is one number, without keys"
        )


def _check_teacher(args: Mapping[str, Any]) -> None:
    if args["use_opd"] and args["opd_type"] == "sglang" and not (args["custom_rm_path"] or args["group_rm"]):
        raise InvalidSetting.requires(
            "--opd-type sglang",
            "--custom-rm-path slime.rollout.on_policy_distillation.reward_func",
            "it asks the teacher at --rm-url; a function of yours may set teacher_log_probs of samples too",
        )


def _check_nuclei(args: Mapping[str, Any]) -> None:
    """Refuses to train with engines that do not report their nuclei; for an engine chosen later, the plan does."""
    if args["num_rollout"] == 0 or args["debug_rollout_only"] or args["debug_train_only"]:
        return
    top_p, top_k, kind = args["rollout_top_p"], args["rollout_top_k"], KINDS.get(args["rollout_engine"])
    if args["rollout_external_engine_addrs"]:
        refuse_nuclei(top_p, top_k, "engines that run already")
    elif kind is not None:
        check_nuclei(top_p, top_k, kind)


def check_nuclei(top_p: float, top_k: int, kind: EngineKind) -> None:
    """Raises ConfigError if engines of this kind would sample from a part of the vocabulary without reporting which."""
    if not kind.nuclei:
        refuse_nuclei(top_p, top_k, kind.title)
    if kind.nuclei_need_top_k and top_p < 1 and top_k <= 0:
        raise InvalidSetting.requires(
            as_typed("rollout_top_p", top_p),
            "--rollout-top-k N",
            f"{kind.title} tells which tokens each one was sampled from only if their number is bounded; 1000 "
            "hardly changes the distribution",
        )


def refuse_nuclei(top_p: float, top_k: int, engine: str) -> None:
    """Raises NotAvailable if top-p or top-k is on, because `engine` does not report what they left to sample from."""
    for name, value, off in (("rollout_top_p", top_p, 1), ("rollout_top_k", top_k, -1)):
        if value != off:
            raise NotAvailable.unavailable(
                f"{flag_name(name)} {value:g}",
                f"{engine} cannot tell which tokens each one was sampled from, and the trainer's softmax over the "
                "whole vocabulary would be that of another policy",
                f"--rollout-engine embedded, or {flag_name(name)} {off} "
                f"({flag_name(name.replace('rollout', 'eval'))} may have any value)",
            )


def check_learning(args: Mapping[str, Any], trainer: TrainerSettings) -> None:
    """Raises InvalidSetting for a run that trains but cannot learn anything."""
    if args["num_rollout"] != 0 and not args["debug_rollout_only"]:
        refuse_groups_of_one(trainer)
        refuse_nuclei_without_gradient(trainer)


def check_tensor_parallel(rollout: RolloutSettings) -> None:
    """Raises InvalidSetting if --sglang-tp-size, taken for --rollout-num-gpus-per-engine, means something else."""
    gpus = rollout.rollout_num_gpus_per_engine
    each = tensor_parallel_size(gpus, rollout.sglang_args)
    if each != gpus:
        raise InvalidSetting.requires(
            f"--sglang-tp-size {gpus}",
            "--rollout-num-gpus-per-engine",
            f"with pipeline stages or replicas, an engine of {gpus} GPUs has a tensor-parallel size of {each}",
        )


def _check_size(args: Mapping[str, Any]) -> None:
    trained = {name: args[name] or 1 for name in ("actor_num_nodes", "actor_num_gpus_per_node")}
    alone = [{name: args.get(name) or 1} for name in ("num_gpus_per_node", "rollout_num_gpus", "dry_run_gpus")]
    for group in (trained, *alone):
        if math.prod(group.values()) > MOST_GPUS:
            name, value = max(group.items(), key=lambda item: item[1])
            raise InvalidSetting.must_be(
                flag_name(name), f"small enough for at most {MOST_GPUS:,} GPUs in all", got=value
            )
    for names, most, what in MOST:
        numbers = {name: args.get(name) or 1 for name in names}
        if math.prod(numbers.values()) > most:
            name, value = max(numbers.items(), key=lambda item: item[1])
            raise InvalidSetting.must_be(flag_name(name), f"small enough for at most {most:,} {what}", got=value)


def _check_template(flag: str, path: str | None) -> None:
    try:
        for _, name, _, _ in Formatter().parse(path or ""):
            if name is not None and name.startswith(("rollout_id.", "rollout_id[")):
                raise KeyError(name)
        (path or "").format(rollout_id=0)
    except (KeyError, IndexError, ValueError) as error:
        raise InvalidSetting.must_be(
            flag, "a path with {rollout_id} as its only field", got=path, reason=f"{type(error).__name__}: {error}"
        ) from None


def _requires(args: Mapping[str, Any], name: str, needed: str, reason: str = "") -> InvalidSetting:
    return InvalidSetting.requires(as_typed(name, args[name]), needed, reason)


def _check_batch(args: Mapping[str, Any]) -> None:
    prompts, each = args["rollout_batch_size"], args["n_samples_per_prompt"]
    for name in ("global_batch_size", "num_steps_per_rollout"):
        if args[name] is not None and prompts * each % args[name]:
            raise InvalidSetting.must_be(
                flag_name(name),
                f"a divisor of --rollout-batch-size {prompts} x --n-samples-per-prompt {each} = {prompts * each}",
                got=args[name],
            )


def check_files(args: Mapping[str, Any], evaluation_sets: Mapping[str, str]) -> None:
    """Raises MissingFile or InvalidFile naming the flag, without reading the files as a whole."""
    check_inputs(args, evaluation_sets)
    check_other_files(args)


def check_inputs(args: Mapping[str, Any], evaluation_sets: Mapping[str, str]) -> None:
    """Checks that models, prompts and the directory of --load exist."""
    for name in ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load"):
        # The others may be Megatron checkpoints; only the initial weights need a tokenizer beside them.
        may_be_megatron = name != "hf_checkpoint" and args["train_backend"] == "megatron"
        if args[name] is not None and not (may_be_megatron and is_torch_dist(args[name])):
            check_model(flag_name(name), Path(args[name]), tokenizer=name == "hf_checkpoint")
    if args["load"] is not None and not Path(args["load"]).is_dir():
        raise MissingFile(f"--load: no such directory {args['load']}", field="--load", value=args["load"])
    if args["load"] is not None and args["train_backend"] == "fsdp":
        check_adapter(args["load"], args["lora_rank"], args["lora_alpha"])
    if args["prompt_data"] is not None and args["rollout_global_dataset"]:
        _check_prompts("--prompt-data", args["prompt_data"])
    for name, path in evaluation_sets.items():
        _check_prompts(f"--eval-prompt-data {name}", path)


def check_other_files(args: Mapping[str, Any]) -> None:
    """Checks that the model suits the other flags, and checks recordings and output paths. The model must exist."""
    for name in ("use_routing_replay", "use_rollout_routing_replay"):
        if args[name]:
            _check_experts(flag_name(name), args["hf_checkpoint"])
    if args["lora_rank"]:
        model = json.loads((Path(args["hf_checkpoint"]) / "config.json").read_text())
        check_rank(args["lora_rank"], model)
        if not args["debug_rollout_only"]:
            refuse_quantized_base(model, args["lora_rank"])
    if not args["debug_train_only"] and not args["debug_rollout_only"]:
        check_quantization(args)
    if args["train_vision"] is not None:
        _check_vision(args)
    if args["multimodal_keys"]:
        _check_processor(args["hf_checkpoint"], args["rollout_engine"])
        for name in ("critic_load", "ref_load", "opd_teacher_load"):
            # They see the policy's samples.
            if args[name] is not None and (Path(args[name]) / "config.json").is_file():
                require_vision(args[name], f"{as_typed(name, args[name])} with --multimodal-keys")
    check_recordings(args)
    if args["load_forge_rollout_data"] is not None and args["load"] is None:
        _check_recording("--load-forge-rollout-data", args["load_forge_rollout_data"], args.get("start_rollout_id"))
    check_places(args)


def _check_experts(flag: str, directory: str) -> None:
    if experts_of(json.loads((Path(directory) / "config.json").read_text())) is None:
        raise InvalidSetting.requires(flag, "a mixture of experts", f"--hf-checkpoint {directory} has no experts")


def _check_vision(args: Mapping[str, Any]) -> None:
    typed = as_typed("train_vision", args["train_vision"])
    if args["train_vision"]:
        require_vision(args["hf_checkpoint"], "--multimodal-keys" if args["multimodal_keys"] else typed)
    elif args["multimodal_keys"]:
        raise InvalidSetting.conflict(typed, "--multimodal-keys", "what reads images would not be there")
    elif (vision := vision_of(json.loads((Path(args["hf_checkpoint"]) / "config.json").read_text()))) is not None:
        if not vision.optional:
            raise NotAvailable.unavailable(f"{typed} of a {vision.model_type}", "it is trained whole")


def _check_processor(directory: str, engine: str) -> None:
    require_vision(directory, "--multimodal-keys")
    if engine in KINDS:
        KINDS[engine].check_images(directory)
    if not any((Path(directory) / name).is_file() for name in PROCESSOR_FILES):
        known = " or ".join(PROCESSOR_FILES)
        raise InvalidFile(
            f"--multimodal-keys: --hf-checkpoint {directory} has no image processor ({known})",
            field="--hf-checkpoint", value=directory, expected=known,
        )  # fmt: skip


def _check_recording(flag: str, template: str, first: int | None) -> None:
    path = Path(template.format(rollout_id=first or 0))
    check_readable(path, flag)


def _check_prompts(flag: str, path: str) -> None:
    file = Path(split_slice(path, flag)[0])
    check_readable(file, flag)
    reader_of(file, flag)


def check_model(flag: str, directory: Path, *, tokenizer: bool, weights: bool = False) -> None:
    """Raises MissingFile or InvalidFile naming the flag. weights: whether the weights must exist, too."""
    value = str(directory)
    if not directory.is_dir():
        raise no_directory(directory, flag)
    refuse_adapter(directory, flag)
    if not (directory / "config.json").is_file():
        raise InvalidFile(
            f"{flag}: {directory} has no config.json; expected a Hugging Face directory of a model",
            field=flag, value=value, expected="config.json",
        )  # fmt: skip
    try:
        json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        text = f"{flag}: {directory}/config.json: not JSON: {error}"
        raise InvalidFile(text, field=flag, value=value, expected="a JSON object") from None
    if tokenizer and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise InvalidFile(
            f"{flag}: {directory} has no tokenizer; copy the model's own files there: {' or '.join(TOKENIZER_FILES)}",
            field=flag, value=value, expected="tokenizer.json",
        )  # fmt: skip
    if weights and not any(directory.glob("*.safetensors")):
        raise InvalidFile(
            f"{flag}: {directory} has no weights; expected model.safetensors, or shards and their index",
            field=flag, value=value, expected="*.safetensors",
        )  # fmt: skip
