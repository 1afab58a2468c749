"""Sets up the repairs of one run from its settings, if lost services can be started again."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Protocol, Self

from slime.launcher.config.run_config import RunConfig
from slime.launcher.faults.repairs import RepairLimits, Repairs
from slime.launcher.faults.restart_points import RestartPoints
from slime.launcher.faults.restarts import ServiceRestarts, TrainerReplay
from slime.launcher.placement.plan import Placement, ServiceNode
from slime.launcher.services.start import Progress, StartedServices
from slime.launcher.services.supervisor import Supervisor
from slime.launcher.services.weight_updates import TrainerRanks
from slime.rollout.settings.rollout import DEFAULT_DATA_SOURCE
from slime.types.errors import InvalidSetting, OutOfSpace
from slime.types.scratch import ScratchDirectory

log = logging.getLogger(__name__)

# Estimates until a state of the trainer has been written and timed. Bytes per parameter: weights and Adam's moments in
# float32. Bytes per second: a slow disk.
STATE_BYTES = 12
DISK_BYTES_PER_SECOND = 500e6


class RepairedRun(Protocol):
    """The parts of `Services` that repairs need."""

    trained: int

    def groups_of(self, step: int) -> int: ...
    def engines_lost(self) -> None: ...


class RunRepairs:
    """The repairs of one run. buffer_dir: a directory for the buffer's state that outlives the buffer's process.
    engines_file: a file for the external engines of the rollout service, which outlives it."""

    def __init__(self, config: RunConfig, supervisor: Supervisor, output_dir: Path) -> None:
        self.points: RestartPoints | None = None
        self._scratch = ScratchDirectory("slime-buffer-")
        self._engines = ScratchDirectory("slime-engines-")
        self.buffer_dir = str(self._scratch.path)
        self.engines_file = str(self._engines.path / "engines.json")
        self._config = config
        self._supervisor = supervisor
        self._output_dir = output_dir
        self._repairs: Repairs | None = None
        self._reported = 0, 0.0

    @classmethod
    def of(cls, config: RunConfig, placement: Placement, supervisor: Supervisor, output_dir: Path) -> Self | None:
        """Returns the repairs of a run; None if its lost services are not started again."""
        reason = cls.reason_against(config, placement)
        if reason is None:
            return cls(config, supervisor, output_dir)
        log.info("lost services are not started again: %s", reason)
        return None

    @staticmethod
    def reason_against(config: RunConfig, placement: Placement) -> str | None:
        """Returns the reason why lost services of a run cannot be started again; None if they can."""
        rollout, launcher, trainer = config.rollout, config.launcher, config.trainer
        if rollout.use_fault_tolerance is False:
            return "--no-use-fault-tolerance"
        if any(node.host != ServiceNode.host for node in placement.service_nodes.values()) or placement.engine_hosts():
            return "the run is on several nodes"
        if placement.offloads or placement.shares_gpus:
            return "engines and trainer share GPUs"
        if launcher.rollout_data_transport != "grpc":
            return f"--rollout-data-transport {launcher.rollout_data_transport} keeps samples in memory"
        if rollout.data_source_path != DEFAULT_DATA_SOURCE:
            return "--data-source-path keeps the place in the data in memory"
        if trainer.keep_old_actor:
            return "--keep-old-actor keeps weights in memory"
        if config.buffer.release_committed and (trainer.no_save_optim or trainer.ref_update_interval):
            return "--release-committed deletes samples of steps after the last state that ranks can start from"
        return None

    def start(self, started: StartedServices, run: RepairedRun) -> None:
        """Begins to watch the services, after all of them have been started."""
        launcher, config = self._config.launcher, self._config
        trainer = None
        if started.trainers:
            checkpoints = launcher.save_interval is not None and not config.trainer.no_save_optim
            self.points = RestartPoints(
                self._output_dir,
                first=started.first_step - 1,
                load=config.trainer.load,
                backend=launcher.train_backend,
                checkpoints=config.checkpoint_dir if checkpoints else None,
                interval_seconds=launcher.restart_point_interval,
                first_seconds=(started.num_parameters or 0) * STATE_BYTES / DISK_BYTES_PER_SECOND,
                multiple_of=config.trainer.ref_update_interval or 1,
            )
            trainer = TrainerReplay(
                self.points, config.trainer, started.trainers, lambda: run.trained, run.groups_of,
                launcher.train_timeout_seconds,
            )  # fmt: skip
        restarts = ServiceRestarts(self._supervisor, started.buffer, started.rollout, trainer, run.engines_lost)
        self._supervisor.watch_processes(launcher.service_health_timeout)
        self._repairs = Repairs(
            self._supervisor.lost,
            restarts.start_again,
            self._supervisor.fail,
            RepairLimits(launcher.service_max_restarts, launcher.service_restart_window),
        )
        self._supervisor.repeats = self._repairs
        self._repairs.start()

    def after_step(self, step: int, ranks: TrainerRanks, progress: Progress) -> dict[str, float]:
        """Writes a restart point if one is due. Returns those of these metrics that there are:

        perf/restart_point_time  seconds that writing the restart point took
        perf/service_restarts    services that were started again since the last step
        perf/repair_time         seconds from noticing their loss until they were back
        """
        return self._keep_state(step, ranks, progress) | self._take_metrics()

    def needed_checkpoint(self, trained: int) -> str | None:
        """Returns the directory of the state from which ranks would start again after the step `trained`, or None."""
        return None if self.points is None else self.points.newest(trained)[1]

    def _keep_state(self, step: int, ranks: TrainerRanks, progress: Progress) -> dict[str, float]:
        points = self.points
        path = None if points is None else points.due(step)
        if points is None or path is None:
            return {}
        progress("saving for a restart", 0, 0)
        started, timeout = time.perf_counter(), self._config.launcher.save_timeout_seconds
        try:
            ranks.each(lambda trainer: trainer.save_checkpoint(step, str(path), timeout, for_restart=True))
        except (OutOfSpace, InvalidSetting) as error:
            log.warning("the state of the trainer was not written for a restart: %s", error)
            points.failed()
            return {}
        seconds = time.perf_counter() - started
        points.written(path, seconds)
        return {"perf/restart_point_time": seconds}

    def _take_metrics(self) -> dict[str, float]:
        if self._repairs is None:
            return {}
        now = self._repairs.restarts, self._repairs.seconds
        restarts, seconds = now[0] - self._reported[0], now[1] - self._reported[1]
        self._reported = now
        return {"perf/service_restarts": float(restarts), "perf/repair_time": seconds} if restarts else {}

    def close(self) -> None:
        """Removes the buffer's directory and the restart points, which no later start of the run needs."""
        self._scratch.close()
        self._engines.close()
        if self.points is not None:
            self.points.clear()
