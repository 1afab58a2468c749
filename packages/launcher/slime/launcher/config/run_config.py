"""`RunConfig`: the settings of all packages, read from one command line for the whole run.

Later sources win: default, `--preset NAME`, `--config FILE.yaml`, environment variable, flag, `--custom-config-path
FILE.yaml`. Nothing is ignored: a name that no package declares raises NotAvailable if it is in `known_flags.py`, and
UnknownFlag otherwise.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.converters.megatron.flags import check_backend, defaults, given
from slime.converters.megatron.rank_layout import ranks_needed
from slime.launcher.config.advice import refuse_without_effect
from slime.launcher.config.catalogue import FAMILIES, SETTINGS, Flag, build_parser, declared, training_parser
from slime.launcher.config.checks.megatron import check_megatron, check_model
from slime.launcher.config.checks.plugins import check_plugins
from slime.launcher.config.checks.run import check_files, check_learning, check_run, check_tensor_parallel
from slime.launcher.config.checks.served_models import check_served_models, check_trained_engines
from slime.launcher.config.completion import with_needs_of_training
from slime.launcher.config.derived import decay_over_run, imply, share_gpus, share_optimizer
from slime.launcher.config.eval_config import apply_eval_config
from slime.launcher.config.known_flags import why_not
from slime.launcher.config.presets import apply_preset
from slime.launcher.config.settings import LauncherSettings
from slime.launcher.config.sources import Sources
from slime.launcher.hub.fetch import fetch
from slime.launcher.run_directory.checkpoints import (
    begins_with_reference,
    find_checkpoint,
    has_checkpoint,
    nothing_saved_yet,
    steps,
)
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE, RolloutSettings
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting
from slime.types.setting_values import flag_name
from slime.types.settings import Parser, build, merge


@dataclass(frozen=True)
class RunConfig:
    """The settings of a run.

    megatron: Megatron's flags, a MegatronSettings.
    flat: every setting by its name, and the additional keys of --custom-config-path; plug-ins get it as `args`.
        Settings of Megatron that were not given have Megatron's defaults.
    explicit: the settings that flags, files, environment variables or a preset set, by name.
    origins: the variable or the preset that set a setting, for settings that neither a flag nor a file set.
    inherited: names of settings that come from another run and may be without effect in this one.
    """

    launcher: LauncherSettings
    buffer: BufferSettings
    rollout: RolloutSettings
    trainer: TrainerSettings
    megatron: Any
    flat: dict[str, Any]
    explicit: dict[str, Any] = dataclasses.field(default_factory=dict)
    origins: dict[str, str] = dataclasses.field(default_factory=dict)
    inherited: frozenset[str] = frozenset()

    @property
    def output_dir(self) -> Path:
        return Path(str(self.launcher.output_dir))

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.launcher.save) if self.launcher.save else self.output_dir / "checkpoints"

    @property
    def tensorboard_dir(self) -> Path | None:
        """The directory of TensorBoard events; None if the run writes none."""
        settings = self.launcher
        if not settings.use_tensorboard:
            return None
        names = [name for name in (settings.tb_project_name, settings.tb_experiment_name) if name]
        return Path(self.output_dir, "tensorboard", *names)

    @property
    def generates(self) -> bool:
        """Returns whether a rollout service generates the samples; recorded ones need none."""
        return self.launcher.load_debug_rollout_data is None

    @property
    def has_engines(self) -> bool:
        return not self.launcher.debug_train_only

    @property
    def evaluates(self) -> bool:
        return bool(self.buffer.eval_prompt_data) and self.has_engines

    def evaluates_after(self, rollout_id: int) -> bool:
        """Returns whether an evaluation follows this iteration: the last one, and every `eval_interval`-th."""
        return self.evaluates and self._due(rollout_id, self.launcher.eval_interval)

    def saves_after(self, rollout_id: int) -> bool:
        interval = self.launcher.save_interval
        return interval is not None and self._due(rollout_id, interval)

    def updates_after(self, rollout_id: int) -> bool:
        """Returns whether the engines get new weights after this iteration; an evaluation needs the newest."""
        due = self._due(rollout_id, None) or (rollout_id + 1) % self.launcher.update_weights_interval == 0
        return due or self.evaluates_after(rollout_id)

    def _due(self, rollout_id: int, interval: int | None) -> bool:
        done, stop = rollout_id + 1, self.launcher.num_rollout
        if done == stop or interval is None:
            return done == stop
        # --num-rollout has been computed from --num-epoch by now.
        epoch = (stop or 0) // (self.launcher.num_epoch or 1) if self.launcher.num_epoch else 0
        return done % interval == 0 or bool(epoch and done % epoch == 0)


def parse(
    argv: Sequence[str],
    *,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    inherited: Collection[str] = (),
    command: str = "train",
) -> RunConfig:
    """Makes the configuration of a run from its flags.

    check: also check that its files exist, and load its plug-ins.
    environment: variables that may be settings; None takes those of this process.
    inherited: names of the settings of --config that come from another run, and may be without effect in this one.
    command: train or train-async, which --help describes.
    Raises ConfigError (UnknownFlag, NotAvailable, InvalidSetting, MissingFile, InvalidFile, PluginError).
    """
    flags, parser, available = _command_line(command)
    argv = _with_config_flag(argv)
    sources = Sources(flags, parser, available)
    sources.refuse_names([word.split("=", 1)[0][2:] for word in argv if word.startswith("--")])
    typed = vars(parser.parse_strict(argv))
    spelled = dict(parser.spelled)

    variables = sources.environment(os.environ if environment is None else environment)
    config_file = {**variables, **typed}.get("config")
    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if config_file is not None:
        values, _ = sources.file(config_file, "--config")
    for newer in (variables, typed):
        _merge(values, {name: value for name, value in newer.items() if name != "config"})
    custom: dict[str, Any] = {}
    if values.get("custom_config_path"):
        custom, extra = sources.file(values["custom_config_path"], "--custom-config-path", keep_unknown=True)
        _merge(values, custom)
    origins = {name: sources.variables[name] for name in variables.keys() - typed.keys() - custom.keys()}
    of_preset = apply_preset(values)
    origins |= dict.fromkeys(of_preset, f"--preset {values.get('preset')}")
    explicit = copy.deepcopy(values)
    apply_eval_config(values)
    imply(values)

    load_root = values.get("load")
    if check:
        build(LauncherSettings, values)
        # The record names the commits that were fetched, so that a repetition of the run fetches the same.
        explicit |= {name: pinned for name, pinned in fetch(values).items() if name in explicit}
        _find_weights(values)
    config = dataclasses.replace(
        _assemble(flags, values, extra | {"load_root": load_root}, explicit),
        origins=origins, inherited=frozenset(inherited) - typed.keys(),
    )  # fmt: skip
    refuse_without_effect(config)
    check_run(config.flat)
    check_trained_engines(config.rollout, config.flat)
    decay_over_run(config.trainer, config.flat, config.launcher.num_rollout)
    check_megatron(config.launcher, given(config.megatron))
    if spelled.get("rollout_num_gpus_per_engine", ("",))[0] == "--sglang-tp-size":
        check_tensor_parallel(config.rollout)
    if check:
        check_learning(config.flat, config.trainer)
        check_files(config.flat, config.buffer.evaluation_sets())
        check_served_models(config.rollout, config.flat)
        check_model(config.launcher, config.trainer, given(config.megatron))
        check_plugins(config.flat)
    return config


def read_custom(path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (settings, other keys) of a file for --custom-config-path. Raises MissingFile, InvalidFile."""
    return Sources(*_command_line()).file(path, "--custom-config-path", keep_unknown=True)


@functools.cache
def _command_line(command: str = "train") -> tuple[dict[str, Flag], Parser, list[str]]:
    """Returns every flag by the name of its setting, the parser, and the flags that may be given."""
    flags = declared()
    parser = training_parser(command)
    declared_names = set(build_parser(flags).flag_names())
    # A flag that known_flags.py refuses stays refused, even if a family of flags has it.
    available = [name for name in parser.flag_names() if name in declared_names or why_not(name[2:]) is None]
    return flags, parser, available


def _with_config_flag(argv: Sequence[str]) -> list[str]:
    """Reads a first word that is not a flag as the value of --config: `slime train CONFIG.yaml`."""
    words = list(argv)
    if not words or words[0].startswith("-"):
        return words
    for word in words[1:]:
        if word.split("=", 1)[0] == "--config":
            raise InvalidSetting.conflict(words[0], "--config", "both name the file of settings")
    if not words[0].endswith((".yaml", ".yml")):
        raise InvalidSetting(
            f"unexpected argument {words[0]!r}: a first word without dashes names a file of settings, CONFIG.yaml",
            value=words[0], expected="CONFIG.yaml",
        )  # fmt: skip
    return ["--config", *words]


def _merge(values: dict[str, Any], newer: Mapping[str, Any]) -> None:
    for name, value in newer.items():
        merge(values, name, value, FAMILIES)


def _find_weights(values: dict[str, Any]) -> None:
    """Replaces directories of checkpoints by the checkpoint to load. Raises MissingFile naming the flag."""
    load, initial = values.get("load"), values.get("initial_megatron_checkpoint")
    if isinstance(initial, str) and not (isinstance(load, str) and has_checkpoint(load)):
        values["load"] = find_checkpoint(initial, flag="--initial-megatron-checkpoint")
    elif begins_with_reference(values):
        values["load"] = find_checkpoint(values["ref_load"], flag="--ref-load")
    elif isinstance(load, str) and nothing_saved_yet(values, Path(load)):
        del values["load"]
    elif isinstance(load, str):
        values["load"] = find_checkpoint(load, step=values.get("ckpt_step"))
    for name, of_name in (("ref_load", "ref_ckpt_step"), ("opd_teacher_load", "opd_teacher_ckpt_step")):
        directory, step = values.get(name), values.get(of_name)
        if isinstance(directory, str) and (step is not None or steps(Path(directory))):
            values[name] = find_checkpoint(directory, flag=flag_name(name), step=step)


def _assemble(
    flags: Mapping[str, Flag], values: dict[str, Any], extra: dict[str, Any], explicit: dict[str, Any]
) -> RunConfig:
    # A setting may default to None in one package and to a value in another: all packages get the same value.
    for flag in flags.values():
        if len(flag.packages) > 1 and flag.default is not dataclasses.MISSING:
            values.setdefault(flag.name, flag.default)
    _name_run(values)
    if values.get("actor_num_gpus_per_node") is None:
        values["actor_num_gpus_per_node"] = ranks_needed(values) if values.get("train_backend") == "megatron" else 1
    share_optimizer(values)
    share_gpus(values)
    # Building the settings compares Megatron's flags with each other, which helps nobody who runs another backend.
    names = (field.name for field in dataclasses.fields(SETTINGS["megatron"]))
    check_backend(values["train_backend"], {name: values[name] for name in names if values.get(name) is not None})
    parts = {package: build(cls, values) for package, cls in SETTINGS.items()}
    if parts["rollout"].data_source_path != DEFAULT_DATA_SOURCE:
        # With the user's own data source the buffer neither reads prompts nor filters groups.
        parts["buffer"] = dataclasses.replace(parts["buffer"], rollout_global_dataset=False, buffer_filter_path=None)
    parts["buffer"] = with_needs_of_training(
        parts["buffer"], parts["trainer"], vocab_size=values.get("vocab_size"),
        trains=not parts["launcher"].debug_rollout_only,
    )  # fmt: skip
    flat = dict(extra)
    for part in parts.values():
        flat.update({name: getattr(part, name) for name in flags if hasattr(part, name)})
    for name in ("rollout_global_dataset", "buffer_filter_path"):
        flat[name] = values.get(name, flags[name].default)
    flat.update(defaults() | given(parts["megatron"]))
    config = RunConfig(**parts, flat=flat, explicit=explicit)
    flat["checkpoint_dir"] = str(config.checkpoint_dir)
    # Plug-ins get every evaluation set with its name.
    flat["eval_prompt_data"] = [list(pair) for pair in config.buffer.evaluation_sets().items()] or None
    return config


def _name_run(values: dict[str, Any]) -> None:
    output_dir = values.get("output_dir")
    if not values.get("run_name"):
        # Path.resolve would raise on a loop of links, which the check of the directory reports more clearly.
        name = Path(os.path.realpath(output_dir)).name if isinstance(output_dir, str) else ""
        values["run_name"] = name or f"{datetime.now():%Y%m%d-%H%M%S}"
    if not output_dir:
        if Path(str(values["run_name"])).name != values["run_name"]:
            raise InvalidSetting.must_be(
                "--run-name", "a name without slashes", got=values["run_name"],
                reason="it names a directory below runs/; --output-dir takes a path",
            )  # fmt: skip
        values["output_dir"] = str(Path("runs") / str(values["run_name"]))
    if values.get("use_tensorboard") is None:
        values["use_tensorboard"] = True
