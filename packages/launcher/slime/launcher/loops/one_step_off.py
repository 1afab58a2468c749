"""One-step-off training: the next rollout is generated while the trainer works on this one.

    engines   | 0 | 1     |push| 2     |push| 3
    trainer       | 0     |    | 1     |    | 2        with the defaults

With --update-weights-interval 1 and --async-buffer-size 1 every rollout but the first is generated with weights that
are one iteration older than those that train on it.
"""

from __future__ import annotations

import time

from slime.launcher.config.checks.loop import check_asynchronous
from slime.launcher.config.run_config import RunConfig
from slime.launcher.loops.fully_async import loop_fully_async
from slime.launcher.loops.prefetch import Prefetch
from slime.launcher.loops.services import Services
from slime.launcher.loops.session import evaluates_at_start, session
from slime.launcher.metrics.report import Report


def train_async(config: RunConfig, report: Report) -> None:
    """Runs `config` to its end and reports to `report`. Raises InvalidSetting with `colocate`.

    Rollouts are trained on in order, each once. Weights are pushed while nothing is generated, after every
    `update_weights_interval`-th iteration and before each evaluation. For `fully_async` see `fully_async.py`.
    """
    check_asynchronous(config.flat)
    loop = loop_fully_async if config.launcher.fully_async else loop_async
    with session(config, report) as run:
        loop(config, run, report)


def loop_async(config: RunConfig, run: Services, report: Report) -> None:
    """Trains while the next rollouts are generated. Adds to the metrics of the synchronous loop, in seconds:

    perf/rollout_wait_time  time that the trainer waited for the rollout
    perf/drain_time         time that the weight update waited for the generation in flight
    perf/overlap_time       time that the engines generated while the trainer trained on the rollout
    """
    settings = config.launcher
    if evaluates_at_start(config, run.first_step, report):
        report.evaluation(run.first_step, *run.evaluate(run.first_step))

    steps = range(run.first_step, run.num_rollout)
    with Prefetch(run, steps, settings.async_buffer_size or 1) as prefetch:
        for step in steps:
            started = time.perf_counter()
            prefetch.take(step)
            taken = time.perf_counter()
            metrics = run.train_step(step)
            metrics["perf/rollout_wait_time"] = taken - started
            metrics["perf/overlap_time"] = prefetch.seconds_generating(taken, time.perf_counter())
            if config.saves_after(step):
                report.hold(step, metrics)
                metrics |= run.save(step, config.checkpoint_dir, settings.save_hf)
            if config.updates_after(step):
                metrics["perf/drain_time"] = prefetch.pause()
                metrics |= run.update_weights(step + 1)
            metrics["perf/step_time"] = time.perf_counter() - started
            report.step(step, metrics, run.examples)
            if config.evaluates_after(step):
                report.evaluation(step + 1, *run.evaluate(step + 1))
