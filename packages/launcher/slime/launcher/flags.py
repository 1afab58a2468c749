"""One command line for the whole run: every package's settings from one flat set of flags.

Later sources win: default, `--config FILE.yaml`, flag, `--custom-config-path FILE.yaml`. Nothing is ignored: a name
that no package declares is NotAvailable where it is known (`flag_table.py`), UnknownFlag otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.converters.megatron_flags import defaults, given
from slime.launcher.checkpoints import find_checkpoint, has_checkpoint
from slime.launcher.checks import check_files, check_plugins, check_run
from slime.launcher.declared import FAMILIES, SETTINGS, Flag, build_parser, declared, training_parser
from slime.launcher.eval_config import apply_eval_config
from slime.launcher.flag_table import RENAMED, why_not
from slime.launcher.megatron import check_megatron, check_model, ranks_needed
from slime.launcher.settings import LauncherSettings
from slime.rollout.settings import RolloutSettings
from slime.trainer.settings import TrainerSettings
from slime.types.errors import InvalidSetting, NotAvailable, UnknownFlag
from slime.types.settings import build, flag_names, merge, read_config, unknown_flag


@dataclass(frozen=True)
class RunConfig:
    """What a run was told.

    megatron: Megatron's flags, a MegatronSettings.
    flat: every setting by its name, and the new keys of --custom-config-path: the `args` of plug-ins. Those of Megatron
        that were not given have Megatron's defaults.
    """

    launcher: LauncherSettings
    buffer: BufferSettings
    rollout: RolloutSettings
    trainer: TrainerSettings
    megatron: Any
    flat: dict[str, Any]

    @property
    def output_dir(self) -> Path:
        return Path(str(self.launcher.output_dir))

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.launcher.save) if self.launcher.save else self.output_dir / "checkpoints"

    @property
    def tensorboard_dir(self) -> Path | None:
        """Where TensorBoard events go; None for none."""
        settings = self.launcher
        if not settings.use_tensorboard:
            return None
        names = [name for name in (settings.tb_project_name, settings.tb_experiment_name) if name]
        return Path(self.output_dir, "tensorboard", *names)

    @property
    def evaluates(self) -> bool:
        return bool(self.buffer.eval_prompt_data)

    def evaluates_after(self, rollout_id: int) -> bool:
        """Whether the rollout is followed by an evaluation: the last one is, and every `eval_interval`-th."""
        return self.evaluates and self._due(rollout_id, self.launcher.eval_interval)

    def saves_after(self, rollout_id: int) -> bool:
        interval = self.launcher.save_interval
        return interval is not None and self._due(rollout_id, interval)

    def _due(self, rollout_id: int, interval: int | None) -> bool:
        done = rollout_id + 1
        return done == self.launcher.num_rollout or (interval is not None and done % interval == 0)


def parse(argv: Sequence[str], *, check: bool = True) -> RunConfig:
    """The configuration of a run from its flags.

    check: also look for its files and load its plug-ins.
    Raises ConfigError (UnknownFlag, NotAvailable, InvalidSetting, MissingFile, InvalidFile, PluginError).
    """
    flags = declared()
    parser = training_parser()
    own = set(build_parser(flags).flag_names())
    # A name that is known here keeps its reason, also where a family has a flag of that name.
    available = [name for name in parser.flag_names() if name in own or why_not(name[2:]) is None]
    _refuse_names([word.split("=", 1)[0][2:] for word in argv if word.startswith("--")], available)
    typed = vars(parser.parse_strict(argv))

    values: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    if "config" in typed:
        values, _ = _from_file(typed.pop("config"), flags, available, keep_unknown=False)
    _merge(values, typed)
    if values.get("custom_config_path"):
        custom, extra = _from_file(values["custom_config_path"], flags, available, keep_unknown=True)
        _merge(values, custom)
    apply_eval_config(values)
    _map_offload(values)

    if check:
        _find_weights(values)
    config = _assemble(flags, values, extra)
    check_run(config.flat)
    check_megatron(config.launcher, given(config.megatron))
    if check:
        check_files(config.flat, config.buffer.evaluation_sets())
        check_model(config.launcher, config.trainer, given(config.megatron))
        check_plugins(config.flat)
    return config


def _merge(values: dict[str, Any], newer: Mapping[str, Any]) -> None:
    for name, value in newer.items():
        merge(values, name, value, FAMILIES)


def _map_offload(values: dict[str, Any]) -> None:
    """--offload is --offload-rollout: a trainer's memory stays where it is."""
    if values.get("offload") is not True:
        return
    if values.get("offload_rollout") is False:
        raise InvalidSetting(
            "--offload contradicts --no-offload-rollout: expected one of them",
            field="--offload",
            value=True,
            expected="no --no-offload-rollout",
        )
    values["offload_rollout"] = True


def _find_weights(values: dict[str, Any]) -> None:
    """Replaces directories of checkpoints by the checkpoint to take. Raises MissingFile naming the flag."""
    load, initial = values.get("load"), values.get("initial_megatron_checkpoint")
    if isinstance(initial, str) and not (isinstance(load, str) and has_checkpoint(load)):
        values["load"] = find_checkpoint(initial, flag="--initial-megatron-checkpoint")
    elif isinstance(load, str):
        values["load"] = find_checkpoint(load, step=values.get("ckpt_step"))
    if isinstance(values.get("ref_load"), str) and values.get("ref_ckpt_step") is not None:
        values["ref_load"] = find_checkpoint(values["ref_load"], flag="--ref-load", step=values["ref_ckpt_step"])


def _assemble(flags: Mapping[str, Flag], values: dict[str, Any], extra: dict[str, Any]) -> RunConfig:
    # What one package gives a default, another may leave at None to be told: all of them get the same value.
    for flag in flags.values():
        if len(flag.packages) > 1 and flag.default is not dataclasses.MISSING:
            values.setdefault(flag.name, flag.default)
    _name_run(values)
    if values.get("actor_num_gpus_per_node") is None:
        values["actor_num_gpus_per_node"] = ranks_needed(values)
    parts = {package: build(cls, values) for package, cls in SETTINGS.items()}
    flat = dict(extra)
    for part in parts.values():
        flat.update({name: getattr(part, name) for name in flags if hasattr(part, name)})
    flat.update(defaults() | given(parts["megatron"]))
    return RunConfig(**parts, flat=flat)


def _name_run(values: dict[str, Any]) -> None:
    output_dir = values.get("output_dir")
    if not values.get("run_name"):
        name = Path(output_dir).resolve().name if isinstance(output_dir, str) else ""
        values["run_name"] = name or f"{datetime.now():%Y%m%d-%H%M%S}"
    if not output_dir:
        values["output_dir"] = str(Path("runs") / str(values["run_name"]))
    if values.get("use_tensorboard") is None:
        values["use_tensorboard"] = True


def _refuse_names(names: Sequence[str], available: Sequence[str]) -> None:
    """names: flags as they were given, without the dashes in front."""
    for name in names:
        flag = f"--{name}"
        if not name or flag in available:
            continue
        if name in RENAMED:
            raise UnknownFlag(
                f"unknown flag {flag}; it is --{RENAMED[name]} here", field=flag, expected="--" + RENAMED[name]
            )
        reason = why_not(name)
        if reason is not None:
            raise NotAvailable(f"{flag} is not available yet: {reason}", field=flag)
        raise unknown_flag(flag, available)


def _from_file(
    path: str, flags: Mapping[str, Flag], available: Sequence[str], *, keep_unknown: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(settings, other keys) of a YAML file; a key is a setting's name, or its flag's with underscores for dashes."""
    by_key = {key: flag for flag in flags.values() for key in _keys(flag)}
    values: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for key, value in read_config(path).items():
        flag = by_key.get(key)
        if flag is None:
            name = key.replace("_", "-")
            found = next(_of_families(key, value), None) if why_not(name) is None else None
            if found is not None:
                _merge(values, found)
            elif keep_unknown and why_not(name) is None:
                other[key] = value
            else:
                _refuse_names([name], available)
                raise unknown_flag(f"--{name}", available)
        elif key == flag.name or not flag.turns_off:
            _merge(values, {flag.name: value})
        elif not isinstance(value, bool):
            raise InvalidSetting(f"{path}: {key}: got {value!r}, expected true or false", field=key, value=value)
        else:
            values[flag.name] = not value
    return values, other


def _of_families(key: str, value: Any) -> Iterator[dict[str, Any]]:
    """The settings that a key stands for, as the first family that knows it says."""
    for family in FAMILIES:
        read = family.read_key(key, value)
        if read is not None:
            yield {family.setting: read}


def _keys(flag: Flag) -> list[str]:
    return [flag.name, *(name[2:].replace("-", "_") for name in flag_names(flag.field))]
