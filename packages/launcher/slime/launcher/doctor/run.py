"""Runs the checks that `slime train` makes before it starts anything, unless another check reports the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime.converters.megatron.flags import given
from slime.launcher.config.advice import advice
from slime.launcher.config.checks.megatron import check_model
from slime.launcher.config.checks.run import check_inputs, check_learning, check_other_files
from slime.launcher.config.checks.served_models import check_served_models
from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.run_directory.checkpoints import (
    begins_with_reference,
    find_checkpoint,
    has_checkpoint,
    nothing_saved_yet,
)
from slime.launcher.run_directory.earlier_run import check_unused
from slime.launcher.run_directory.writable import check_places
from slime.types.errors import ConfigError, InvalidFile, MissingFile


def check_run(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if config is None:
        return
    checks = (_learning, _checkpoint, _files, _model, _served_models, _earlier_run, _advice)
    findings = [finding for check in checks for finding in check(subject)]
    yield from findings or [ok("the flags fit together, and to the model")]


def _learning(subject: Subject) -> Iterator[Finding]:
    try:
        check_learning(subject.config.flat, subject.config.trainer)
    except ConfigError as error:
        yield fail(str(error), "--n-samples-per-prompt 8 is a usual size of a group")


def _checkpoint(subject: Subject) -> Iterator[Finding]:
    settings = subject.config.launcher
    load = subject.flag("load")
    if not load or (settings.initial_megatron_checkpoint and not has_checkpoint(load)):
        return
    values = subject.config.flat
    if nothing_saved_yet(values, Path(str(load))) or begins_with_reference(values):
        return
    try:
        find_checkpoint(str(load), step=settings.ckpt_step)
    except ConfigError as error:
        yield fail(str(error), "name a directory that holds a checkpoint, or leave out --load")


def _files(subject: Subject) -> Iterator[Finding]:
    args = subject.config.flat
    # The checks of the model and of the data report these.
    reported = dict.fromkeys(("hf_checkpoint", "load", "prompt_data"))
    if args["ref_load"] is not None and not Path(args["ref_load"]).is_dir():
        reported["ref_load"] = None
    has_model = (Path(str(args["hf_checkpoint"])) / "config.json").is_file()
    others = check_other_files if has_model else check_places
    for check in (lambda: check_inputs(args | reported, {}), lambda: others(args)):
        try:
            check()
        except ConfigError as error:
            yield fail(str(error), "correct what the message names")


def _earlier_run(subject: Subject) -> Iterator[Finding]:
    try:
        check_unused(subject.config)
    except ConfigError as error:
        yield warn(str(error), "the run would be refused: resume the earlier run or overwrite it")


def _advice(subject: Subject) -> Iterator[Finding]:
    if (Path(subject.config.trainer.hf_checkpoint) / "config.json").is_file():
        yield from (warn(text, "the run would start nevertheless") for text in advice(subject.config))


def _model(subject: Subject) -> Iterator[Finding]:
    config = subject.config
    if not (Path(config.trainer.hf_checkpoint) / "config.json").is_file():
        return
    try:
        check_model(config.launcher, config.trainer, given(config.megatron))
    except ConfigError as error:
        yield fail(str(error), "give the flags that describe the model, or another model")


def _served_models(subject: Subject) -> Iterator[Finding]:
    try:
        check_served_models(subject.config.rollout, subject.config.flat)
    except (InvalidFile, MissingFile):
        pass  # the check of the models reports it
    except ConfigError as error:
        yield fail(str(error), "correct the file, or leave out the flag")
