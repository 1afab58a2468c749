"""Fully asynchronous training: generation does not wait for the trainer unless samples would become too stale.

    engines   |  groups of any step, one after the other  ...      weights are swapped under running requests
    trainer       |   0   |push|   1   |push|   2   |push|

An iteration takes the complete groups with the oldest weights (`slime.buffer.groups.pacing`).
"""

from __future__ import annotations

import time
from functools import partial

from slime.launcher.config.run_config import RunConfig
from slime.launcher.loops.services import Services
from slime.launcher.loops.session import evaluates_at_start
from slime.launcher.metrics.report import Report


def loop_fully_async(config: RunConfig, run: Services, report: Report) -> None:
    """Trains while generation continues. Adds to the metrics of each iteration:

    perf/rollout_wait_time  seconds that the trainer waited for groups
    perf/engine_wait_time   seconds that the engines waited for the trainer, with nothing to generate
    rollout/dropped_stale   number of groups that were rejected because they exceeded --max-staleness

    An evaluation runs beside generation and training; the next checkpoint and the next weight update wait for it.
    """
    settings = config.launcher
    if evaluates_at_start(config, run.first_step, report):
        report.evaluation(run.first_step, *run.evaluate(run.first_step))

    evaluation = None
    with run.generating() as generation:
        for step in range(run.first_step, run.num_rollout):
            started = time.perf_counter()
            run.seal(step, generation.take_metrics())
            waited = time.perf_counter() - started
            metrics = run.train_step(step) | {"perf/rollout_wait_time": waited}
            if evaluation is not None:
                # Before the checkpoint, because a run that resumes from it does not evaluate earlier weights.
                report.evaluation(step, *run.join(evaluation))
                evaluation = None
            if config.saves_after(step):
                report.hold(step, metrics)
                metrics |= run.save(step, config.checkpoint_dir, settings.save_hf)
            if config.updates_after(step):
                metrics |= run.update_weights(step + 1)
            metrics["perf/step_time"] = time.perf_counter() - started
            report.step(step, metrics, run.examples)
            if config.evaluates_after(step):
                evaluation = run.begin(partial(run.evaluate, step + 1))
    if evaluation is not None:
        report.evaluation(run.num_rollout, *run.join(evaluation))
