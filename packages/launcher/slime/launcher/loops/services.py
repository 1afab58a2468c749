"""`Services`: the services of one run, behind the calls that the training loops make; `start.py` starts them.

A run that only generates has no trainer, and a run that only trains has no engines: calls of the missing half do
nothing. A run without engines takes its samples from recordings, or from a rollout function that needs no engine.
"""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TypeVar

from slime.launcher.config.run_config import RunConfig
from slime.launcher.faults.run_repairs import RunRepairs
from slime.launcher.loops.examples import Examples
from slime.launcher.metrics.sealed import MetricsInProgress
from slime.launcher.placement.plan import Placement
from slime.launcher.platform.signals import uninterrupted
from slime.launcher.run_directory.checkpoints import checkpoint_path, prune
from slime.launcher.services.credentials import Authority, remove_access
from slime.launcher.services.generation import ContinuousGeneration, pace_of
from slime.launcher.services.memory_turns import MemoryTurns
from slime.launcher.services.replay import Replay
from slime.launcher.services.rollout_calls import RolloutCalls, load
from slime.launcher.services.start import Progress, start_services
from slime.launcher.services.supervisor import Supervisor
from slime.launcher.services.untrained import UntrainedSteps
from slime.launcher.services.weight_updates import TrainerRanks, WeightUpdates
from slime.types import Sample
from slime.types.clients import RolloutClient, TrainerClient
from slime.types.clients.buffer import SealedStep
from slime.types.clients.trainer import TrainedStep
from slime.types.errors import DataLoss
from slime.types.pace import TrainerPace

log = logging.getLogger(__name__)

# Time for the service itself to load, added to the start time of the engines.
SERVICE_START_SECONDS = 60.0
# Directory below --output-dir with addresses and tokens for the user's own clients; it exists while the run lasts.
ACCESS = "access"

Metrics = dict[str, float]
T = TypeVar("T")


class Services:
    """Buffer, rollout service and trainer ranks as processes on Ray; a context manager that stops all of them."""

    def __init__(self, config: RunConfig, placement: Placement, output_dir: Path, progress: Progress) -> None:
        self.config = config
        self.placement = placement
        self.output_dir = output_dir
        self.progress = progress
        self.first_step = 0
        self.num_parameters: int | None = None
        self.addresses: dict[str, str] = {}
        self.rollout: RolloutClient | None = None
        self._replay: Replay | None = None
        self._groups: dict[int, int] = {}
        self._pace: TrainerPace | None = None
        self._weight_updates: WeightUpdates | None = None
        self._memory_turns: MemoryTurns | None = None
        self.notes: list[str] = []
        self._settings = config.launcher
        self._supervisor = Supervisor(
            output_dir / "logs",
            start_seconds=max(
                config.launcher.start_timeout_seconds,
                config.rollout.rollout_engine_start_seconds + SERVICE_START_SECONDS,
            ),
            stop_seconds=config.launcher.stop_grace_seconds,
            nodes=placement.service_nodes,
        )
        self._ranks = TrainerRanks([], self._supervisor)
        self._metrics = MetricsInProgress(self._supervisor, SimpleNamespace(**config.flat))
        self._examples = Examples(self._supervisor, max(1, config.launcher.log_samples))
        # Samples of the step that was trained last, for people to look at.
        self.examples: list[Sample] = []
        self._rollout_calls: RolloutCalls | None = None
        self._repairs: RunRepairs | None = None
        # The step that was trained last.
        self.trained = -1

    def __enter__(self) -> Services:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _start(self) -> None:
        # A killed run leaves its access files behind, with void tokens and ports that other processes may use by now.
        remove_access(self.output_dir / ACCESS)
        self._repairs = RunRepairs.of(self.config, self.placement, self._supervisor, self.output_dir)
        kept = () if self._repairs is None else (self._repairs.buffer_dir, self._repairs.engines_file)
        started = start_services(self.config, self.placement, self._supervisor, self.progress, *kept)
        self.buffer, self.rollout, self._ranks.clients = started.buffer, started.rollout, started.trainers
        self.first_step, self.num_parameters, self.notes = started.first_step, started.num_parameters, started.notes
        self.trained = self.first_step - 1
        if self.rollout is None:
            self._replay = Replay(self.buffer, self.config.flat)
        self._open_run()
        if self._repairs is not None:
            self._repairs.start(started, self)
        self.addresses = started.addresses()
        self.authority.write(self.output_dir / ACCESS, self.addresses)
        if self.rollout is not None and self.config.has_engines:
            weight_updates = self._connect_engines(self.rollout, self.rollout.status().restarts_engines)
            if self.first_step or self.config.trainer.load is not None:
                self.update_weights(self.first_step)
            weight_updates.watch()
        if self.rollout is not None:
            each = self._supervisor, self.buffer, self.rollout, self._weight_updates, self.progress
            self._rollout_calls = RolloutCalls(*each, self._settings.rollout_timeout_seconds)

    def _connect_engines(self, rollout: RolloutClient, restarts_engines: bool) -> WeightUpdates:
        """Prepares weight updates, and the turns in which trainer and engines use the GPU memory."""
        timeout = self._settings.update_timeout_seconds
        self._weight_updates = updates = WeightUpdates(
            self._ranks,
            rollout,
            self._supervisor,
            version=self.first_step,
            restarts_engines=restarts_engines,
            timeout_seconds=timeout,
        )
        if self.placement.offloads and self.trainers:
            always = self.config.rollout.offload_rollout is not None
            self._memory_turns = MemoryTurns(
                rollout, self._supervisor, self.progress, always=always, timeout_seconds=timeout
            )
        return updates

    @property
    def trainers(self) -> list[TrainerClient]:
        """The ranks of the trainer; none in a run that only generates."""
        return self._ranks.clients

    @property
    def authority(self) -> Authority:
        """Returns the object that holds the tokens of the run."""
        return self._supervisor.authority

    def _open_run(self) -> None:
        writer = self.buffer.open_run(str(self._settings.run_name), last_committed_step=self.first_step - 1)
        for client in self.trainers:
            client.writer = writer
        if self.rollout is not None:
            self.rollout.writer = writer
        # Groups that an earlier start of this run left in --buffer-dir are trained on before new ones are generated.
        stats = self.buffer.stats()
        sealed = self.buffer.list_groups(states=["sealed"])
        self._sealed_steps = {group.step for group in sealed if group.step is not None}
        self._spare_groups = stats.groups.get("completed", 0)
        self._untrained = UntrainedSteps(self, self._sealed_steps)

    def _stop(self) -> None:
        if self._weight_updates is not None:
            self._weight_updates.stop()
        with uninterrupted():
            self._supervisor.stop()
            if self._repairs is not None:
                self._repairs.close()

    @property
    def num_rollout(self) -> int:
        """Returns the number of the rollout after the last one."""
        return self._settings.num_rollout or 0

    def generate(self, rollout_id: int) -> Metrics:
        """Generates and completes the groups of one rollout; those of an earlier start of the run count."""
        if self._replay is not None:
            return self._load(self._replay, rollout_id)
        with self._untrained.changing():
            metrics = self._generate_missing(rollout_id)
            self._untrained.generated(rollout_id)
        return metrics

    def engines_lost(self) -> None:
        """Notes that the engines were restarted, with other weights than the trainer's."""
        if self._weight_updates is not None:
            self._weight_updates.engines_lost()

    def _generate_missing(self, rollout_id: int) -> Metrics:
        num_groups = self.config.rollout.rollout_batch_size
        spare = num_groups if rollout_id in self._sealed_steps else min(num_groups, self._spare_groups)
        if rollout_id not in self._sealed_steps:
            self._spare_groups -= spare
        if spare == num_groups:
            return {}
        return self._generate(rollout_id, num_groups - spare, alone=not spare and not self._spare_groups)

    def _generate(self, rollout_id: int, num_groups: int, *, alone: bool = False) -> Metrics:
        assert self._rollout_calls is not None, "a run without a rollout service replays"
        return self._rollout_calls.generate(rollout_id, num_groups, alone=alone)

    def _load(self, replay: Replay, rollout_id: int) -> Metrics:
        self.progress("loading", 0, 0)
        self._groups[rollout_id], metrics = load(self._supervisor, self.buffer, replay, rollout_id)
        return metrics

    def seal(self, step: int, generated: Metrics) -> None:
        """Fixes the groups that `step` trains on: those of the rollout that was just generated.

        generated: the metrics of `generate`, kept with the step for a later start of the run that only trains on it.
        """
        seal = partial(self._seal, step, generated)
        self._note(step, seal() if self._replay is not None else self._untrained.seal(step, seal))

    def _note(self, step: int, sealed: SealedStep) -> None:
        self._examples.choose(step, sealed)
        self._metrics.begin(step, sealed, staleness=self.rollout is not None and bool(self.trainers))

    def _seal(self, step: int, generated: Metrics) -> SealedStep:
        wait, groups, pace = self.config.trainer.step_wait_seconds, self.groups_of(step), self._pace
        if pace is not None:
            # This call waits for groups that are not generated yet.
            wait = self._settings.rollout_timeout_seconds
            self._untrained.generated(step)
            self.progress("waiting for groups", 0, 0)
        return self._supervisor.call(
            lambda: self.buffer.seal_step(step, groups, wait_seconds=wait, metrics=generated, pace=pace)
        )

    def groups_of(self, step: int) -> int:
        return self._groups.get(step, self.config.rollout.rollout_batch_size)

    def train_step(self, step: int) -> Metrics:
        """Trains every rank on the groups of one rollout; without a trainer, the buffer only drops them.

        Sets `examples`. Replaces groups with damaged samples first. Returns `step_metrics` of the groups trained on,
        the trainer's, and

        train/data_loss_retries  number of times that the step had to be sealed again
        """
        trained = self._train_step(step)
        return self._metrics.take(step) | trained

    def _train_step(self, step: int) -> Metrics:
        if not self.trainers:
            self._examples.begin(step, self.buffer)
            self.examples = self._examples.take(step, {})
            self._supervisor.call(lambda: self.buffer.acknowledge_step(step))
            self._supervisor.call(lambda: self.buffer.commit_steps(step))
            return self._after_step(step)
        if self._replay is not None:
            return self._train(step)
        retries = self._untrained.retries

        def train() -> Metrics:
            if step not in retries:
                return self._train(step)
            self._note(step, self._seal(step, {}))
            return self._train(step) | {"train/data_loss_retries": float(retries[step])}

        return self._untrained.train(step, train)

    def _train(self, step: int) -> Metrics:
        self.progress("training", 0, 0)
        groups, timeout = self.groups_of(step), self._settings.train_timeout_seconds
        positions = self._examples.begin(step, self.buffer)

        def train(trainer: TrainerClient) -> TrainedStep | DataLoss:
            # Errors are collected, so that no rank is called again before all have answered.
            try:
                return trainer.train_and_score(step, groups, positions, timeout=timeout)
            except DataLoss as error:
                return error

        with self._ranks.turn:
            results = self._ranks.each(train)
            if not any(isinstance(result, DataLoss) for result in results):
                self.trained = step
                if self._weight_updates is not None:
                    self._weight_updates.version = step + 1
        trained = [result for result in results if isinstance(result, TrainedStep)]
        if len(trained) < len(results):
            raise next(result for result in results if isinstance(result, DataLoss))
        self.examples = self._examples.take(step, ChainMap(*(result.log_probs for result in trained)))
        return trained[0].metrics | self._after_step(step)

    def _after_step(self, step: int) -> Metrics:
        return {} if self._repairs is None else self._repairs.after_step(step, self._ranks, self.progress)

    def generating(self) -> ContinuousGeneration:
        """Returns a context manager that generates as long as it is open, at the pace of the settings."""
        assert self._rollout_calls is not None, "a run without engines generates nothing"
        self._pace = pace_of(self.config)
        return ContinuousGeneration(self, self._rollout_calls.generate_on, self._pace, self.first_step)

    def groups_at_hand(self) -> int:
        """Counts the complete groups to train on, except those of an earlier start that no rollout has taken."""
        groups = self._supervisor.call(self.buffer.stats).groups
        return groups.get("completed", 0) + groups.get("sealed", 0) - self._spare_groups

    def generate_more(self, step: int, num_groups: int) -> None:
        """Generates groups in place of damaged ones, while the trainer waits for `step`."""
        if self._pace is not None:
            # Continuous generation notices by itself that they are missing.
            return
        offloaded = self._memory_turns is not None and self._memory_turns.offloaded
        if offloaded:
            self.onload()
            self.update_weights(step)
        self._generate(step, num_groups)
        if offloaded:
            self.offload()

    def seal_again(self, step: int) -> None:
        """Seals a step that the buffer may have unsealed."""
        self._examples.choose(step, self._seal(step, {}))

    def offload(self) -> Metrics:
        """Has the engines release their GPU memory to the trainer, in a run that offloads them.

        Does nothing while both fit into the memory, unless --offload-rollout is given.
        """
        return {} if self._memory_turns is None else self._memory_turns.offload()

    def onload(self) -> Metrics:
        """Has the engines take back memory for the next weights; the weight update has them take back the rest."""
        return {} if self._memory_turns is None else self._memory_turns.onload()

    def update_weights(self, version: int) -> Metrics:
        """Sends the policy to the engines as `version`."""
        if self._weight_updates is None:
            return {}
        self.progress("updating weights", 0, 0)
        metrics = self._weight_updates.send(version)
        if self._memory_turns is not None:
            self._memory_turns.trainer_stays = metrics.get("perf/train_memory_stays", 0.0) > 0
        return metrics

    def save(self, step: int, path: Path, save_hf: str | None) -> Metrics:
        """Writes a checkpoint of everything up to and including `step` below `path`, and commits those steps.

        Then deletes older checkpoints, as --save-keep and --save-retain-interval say, unless a restart needs them.
        save_hf: directory to write the policy to in Hugging Face format; `{rollout_id}` in it stands for `step`.
        """
        self.progress("saving", 0, 0)
        started = time.perf_counter()
        target = str(checkpoint_path(path, step, self._settings.train_backend))
        self._ranks.each(
            lambda trainer: trainer.save_checkpoint(step, target, timeout=self._settings.save_timeout_seconds)
        )
        needed = None if self._repairs is None else self._repairs.needed_checkpoint(self.trained)
        prune(path, keep=self._settings.save_keep, retain_interval=self._settings.save_retain_interval, needed=needed)
        if save_hf is not None:
            self.export(Path(save_hf.format(rollout_id=step)))
        return {"perf/save_time": time.perf_counter() - started}

    def export(self, path: Path) -> None:
        """Writes the policy as a Hugging Face directory."""
        self.progress("writing the model", 0, 0)
        self._ranks.each(lambda trainer: trainer.export_model(str(path), timeout=self._settings.save_timeout_seconds))

    def evaluate(self, rollout_id: int) -> tuple[Metrics, list[Sample]]:
        """Runs every evaluation set with the weights that the engines hold."""
        assert self._rollout_calls is not None, "a run without engines evaluates nothing"
        result = self._rollout_calls.evaluate(rollout_id)
        return result.metrics, result.examples

    def begin(self, function: Callable[[], T]) -> Future[T]:
        """Runs `function`, which calls methods of this object, in the background. Its result comes from `join`."""
        return self._supervisor.begin(function)

    def join(self, future: Future[T]) -> T:
        """Returns the result of a call that was begun. Raises its error, or that of a service that failed meanwhile."""
        return self._supervisor.join(future)
