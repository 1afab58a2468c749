"""Synchronous training: generate, train, push the weights, again."""

from __future__ import annotations

import time

from slime.launcher.flags import RunConfig
from slime.launcher.metrics.report import Report
from slime.launcher.placement import cluster_gpus, plan_placement, ray_cluster
from slime.launcher.services import Services


def train(config: RunConfig, report: Report) -> None:
    """Runs `config` to its end; what happens on the way goes to `report`.

    Every step trains on the groups of its own rollout, and the engines hold its weights before the next begins.
    """
    settings = config.launcher
    report.status("starting Ray")
    with ray_cluster(settings.ray_address, settings.ray_num_cpus):
        placement = plan_placement(settings, config.rollout, cluster_gpus())
        with Services(config, placement, report.output_dir, report.progress) as run:
            report.started(run.num_parameters, run.first_step)
            if config.evaluates and not settings.skip_eval_before_train:
                report.evaluation(run.first_step, *run.evaluate(run.first_step))

            for step in range(run.first_step, settings.num_rollout):
                started = time.perf_counter()
                metrics, examples = run.generate(step)
                metrics |= run.offload()
                metrics |= run.train_step(step)
                if config.saves_after(step):
                    metrics |= run.save(step, config.checkpoint_dir, settings.save_hf)
                metrics |= run.onload()
                metrics |= run.update_weights(step + 1)
                metrics["perf/step_time"] = time.perf_counter() - started
                if config.evaluates_after(step):
                    report.evaluation(step + 1, *run.evaluate(step + 1))
                report.step(step, metrics, examples)

            run.export(report.output_dir / "model")
    report.finished()
