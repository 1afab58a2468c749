"""Starts the services of a run on Ray, and stops them; the caller runs the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slime.launcher.config.checks.on_policy import check_on_policy_model
from slime.launcher.config.run_config import RunConfig
from slime.launcher.config.settings import LauncherSettings
from slime.launcher.loops.services import Services
from slime.launcher.metrics.prometheus import PrometheusServer
from slime.launcher.metrics.report import Report
from slime.launcher.metrics.silence import SilenceWatch
from slime.launcher.placement.reserve import place_run
from slime.launcher.platform.ray_cluster import OBJECT_STORE_BYTES, ray_cluster
from slime.trainer.settings.checks import compares_rewards
from slime.types.rpc.garbage import spare_long_lived
from slime.types.rpc.roles import Role, role_token


@contextmanager
def session(config: RunConfig, report: Report) -> Iterator[Services]:
    """Yields the services of the run, and stops them in any case. If the run succeeded, closes the report.

    Exports the trained model, if the run trains.
    """
    settings = config.launcher
    report.watch = SilenceWatch(compares=compares_rewards(config.trainer) and not settings.debug_rollout_only)
    report.log_samples = config.launcher.log_samples > 0
    # Opened before Ray starts, so that a port that is in use is an error at once.
    exporter = _exporter(settings, report)
    report.status("starting Ray")
    size = None if settings.rollout_data_transport == "object-store" else OBJECT_STORE_BYTES
    with ray_cluster(settings.ray_address, settings.ray_num_cpus, object_store_bytes=size):
        placement = place_run(settings, config.rollout, report.status)
        if placement.trainer_ranks:
            check_on_policy_model(config.trainer, on_gpu=placement.has_gpus)
        with Services(config, placement, report.output_dir, report.progress) as run:
            if exporter is not None:
                read_token = role_token(run.authority.token, Role.READ)
                exporter.watch(run.addresses, run.authority.client_settings, read_token)
                report.note(f"metrics for Prometheus at http://{exporter.address}/metrics, health at /health")
            report.started(run.num_parameters, run.first_step, run.num_rollout)
            for note in run.notes:
                report.note(note)
            # Every process of a run, this one too, is the run's own.
            spare_long_lived(collect_rarely=True)
            yield run
            if run.num_rollout:
                run.export(report.output_dir / "model")
    report.finished()


def _exporter(settings: LauncherSettings, report: Report) -> PrometheusServer | None:
    if settings.metrics_port is None:
        return None
    exporter = PrometheusServer(settings.metrics_host, settings.metrics_port, num_steps=lambda: report.num_steps)
    report.attach(exporter)
    return exporter


def evaluates_at_start(config: RunConfig, first_step: int, report: Report) -> bool:
    """Returns whether a run evaluates before its first iteration.

    With --skip-eval-before-train it does so only for an evaluation that was due, and that an earlier start of the run
    ended without recording.
    """
    if not config.evaluates or not config.launcher.skip_eval_before_train:
        return config.evaluates
    return first_step > 0 and config.evaluates_after(first_step - 1) and report.lacks_evaluation(first_step)
