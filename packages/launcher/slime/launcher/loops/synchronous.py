"""Synchronous training: generate, train, push the weights, and repeat."""

from __future__ import annotations

import time

from slime.launcher.config.checks.loop import check_synchronous
from slime.launcher.config.run_config import RunConfig
from slime.launcher.loops.services import Services
from slime.launcher.loops.session import evaluates_at_start, session
from slime.launcher.metrics.report import Report


def train(config: RunConfig, report: Report) -> None:
    """Runs `config` to its end and reports to `report`.

    Every iteration trains on the groups of its own rollout. Before the next iteration the engines get the new weights;
    with `update_weights_interval` N, after every N-th iteration.
    """
    check_synchronous(config.flat)
    with session(config, report) as run:
        loop(config, run, report)


def loop(config: RunConfig, run: Services, report: Report) -> None:
    settings = config.launcher
    if evaluates_at_start(config, run.first_step, report):
        report.evaluation(run.first_step, *run.evaluate(run.first_step))

    for step in range(run.first_step, run.num_rollout):
        started = time.perf_counter()
        run.seal(step, run.generate(step))
        metrics = run.offload()
        metrics |= run.train_step(step)
        if config.saves_after(step):
            report.hold(step, metrics)
            metrics |= run.save(step, config.checkpoint_dir, settings.save_hf)
        metrics |= run.onload()
        if config.updates_after(step):
            metrics |= run.update_weights(step + 1)
        metrics["perf/step_time"] = time.perf_counter() - started
        report.step(step, metrics, run.examples)
        if config.evaluates_after(step):
            report.evaluation(step + 1, *run.evaluate(step + 1))
