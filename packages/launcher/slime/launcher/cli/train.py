"""`slime train` and `slime train-async`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.types.errors import ConfigError, InvalidSetting, SlimeError

if TYPE_CHECKING:
    from slime.launcher.config.run_config import RunConfig

log = logging.getLogger(__name__)

# Exit code of a dry run that finds the GPUs too small.
DOES_NOT_FIT = 3


def main(command: str, argv: Sequence[str]) -> int:
    return run_train(argv, asynchronous=command == "train-async")


def parser(command: str) -> argparse.ArgumentParser:
    from slime.launcher.config.catalogue import training_parser

    return training_parser(command)


def run_train(
    argv: Sequence[str], next_command: str = "", *, asynchronous: bool = False, inherited: Collection[str] = ()
) -> int:
    """Runs a training and returns its exit code.

    next_command: a command that the report suggests at its end. inherited: see `run_config.parse`.
    """
    # The imports below take seconds, and Ctrl-C has to work meanwhile.
    from slime.launcher.platform.signals import Terminated, farewell, terminate_as_interrupt

    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        with terminate_as_interrupt():
            from slime.launcher.config import run_config
            from slime.launcher.config.advice import advice
            from slime.launcher.config.checks.loop import check_asynchronous, check_synchronous
            from slime.launcher.doctor.preflight import check_start
            from slime.launcher.metrics.sinks.wandb import take_key

            argv = take_key(argv)
            command = "train-async" if asynchronous else "train"
            config = run_config.parse(argv, inherited=inherited, command=command)
            (check_asynchronous if asynchronous else check_synchronous)(config.flat)
            for warning in advice(config, asynchronous=asynchronous):
                log.warning(warning)
            planned = _planned(config, asynchronous)
            if planned is not None:
                return planned
            from slime.launcher.run_directory.earlier_run import begins_anew, check_unused, overwrite, resumes

            check_unused(config)
            for warning in check_start(config):
                log.warning(warning)
            from slime.launcher.config.record import SETTINGS, earlier_record, write_record
            from slime.launcher.loops.one_step_off import train_async
            from slime.launcher.loops.synchronous import train
            from slime.launcher.metrics.report import Report
            from slime.launcher.metrics.sinks.base import TrackedRun
            from slime.launcher.metrics.sinks.registry import open_sinks, shown_settings
            from slime.launcher.run_directory.lock import run_directory, sole_writer
            from slime.launcher.run_directory.state import recorded
            from slime.launcher.show.command import watched

            settings = config.launcher
            output_dir = Path(os.path.realpath(config.output_dir))
            with run_directory(output_dir), sole_writer(output_dir):
                check_unused(config)
                if settings.overwrite and not resumes(config):
                    overwrite(config)
                if (sentence := begins_anew(config)) is not None:
                    print(sentence, flush=True)
                reports: list[Report] = []
                with earlier_record(output_dir, lambda: any(report.has_begun for report in reports)):
                    tracked = TrackedRun(
                        name=str(settings.run_name), output_dir=output_dir, config=shown_settings(config.flat)
                    )
                    # Before the record: importing trackers takes seconds, and Ctrl-C meanwhile must leave no run.
                    sinks = open_sinks(settings, tracked, config.tensorboard_dir, required=not resumes(config))
                    if settings.num_rollout != 0 or not (output_dir / SETTINGS).exists():
                        write_record(output_dir, config, ["slime", command, *argv])
                    with (
                        recorded(output_dir, command) as state,
                        watched(output_dir, settings.watch),
                        Report(output_dir, num_steps=settings.num_rollout, sinks=sinks, state=state) as report,
                    ):
                        reports.append(report)
                        report.next_command = next_command
                        (train_async if asynchronous else train)(config, report)
        return 0
    except KeyboardInterrupt as error:
        text, code = farewell(error.signum if isinstance(error, Terminated) else signal.SIGINT)
        print(text, file=sys.stderr)
        return code
    except ConfigError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2
    except SlimeError as error:
        print(f"slime: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _planned(config: RunConfig, asynchronous: bool) -> int | None:
    """Prints the plan of a run with --dry-run and returns the exit code; None for a run that is to be started.

    Raises InvalidSetting for --dry-run-gpus and --dry-run-gpu-gib without --dry-run, and for a run that would be
    refused.
    """
    settings = config.launcher
    for flag, value in (("--dry-run-gpus", settings.dry_run_gpus), ("--dry-run-gpu-gib", settings.dry_run_gpu_gib)):
        if value is not None and not settings.dry_run:
            raise InvalidSetting.requires(f"{flag} {value:g}", "--dry-run")
    if settings.dry_run:
        from slime.launcher.doctor.preflight import check_start
        from slime.launcher.plan.report import dry_run
        from slime.launcher.run_directory.earlier_run import check_unused

        text, fits = dry_run(config, asynchronous=asynchronous)
        notes = check_start(config)
        print(text, *(f"note: {note}\n" for note in notes), sep="", end="", flush=True)
        check_unused(config)
        return 0 if fits else DOES_NOT_FIT
    return None
