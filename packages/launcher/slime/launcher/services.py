"""The services of one run, behind the few calls that the training loop makes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType

from slime.converters.megatron_flags import given
from slime.launcher.checkpoints import checkpoint_path, prune
from slime.launcher.flags import RunConfig
from slime.launcher.placement import Placement, shared_devices, trainer_environment
from slime.launcher.supervise import Process, Supervisor, uninterrupted
from slime.types import Sample
from slime.types.clients import BufferClient, RolloutClient, TrainerClient
from slime.types.rpc import RpcSettings

# Beyond what the engines may take to start: loading the service itself.
SERVICE_START_SECONDS = 60.0

Progress = Callable[[str, int, int], None]
Metrics = dict[str, float]


class Services:
    """Buffer, rollout and trainer ranks as processes on Ray; a context manager that stops all it started."""

    def __init__(self, config: RunConfig, placement: Placement, output_dir: Path, progress: Progress) -> None:
        self.config = config
        self.placement = placement
        self.output_dir = output_dir
        self.progress = progress
        self.first_step = 0
        self._settings = config.launcher
        self._supervisor = Supervisor(
            output_dir / "logs",
            start_seconds=max(
                config.launcher.start_timeout_seconds,
                config.rollout.rollout_engine_start_seconds + SERVICE_START_SECONDS,
            ),
            stop_seconds=config.launcher.stop_grace_seconds,
        )

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
        config, placement, supervisor, rpc = self.config, self.placement, self._supervisor, RpcSettings()
        self.progress("starting the services", 0, 0)
        buffer = supervisor.spawn("buffer", placement.buffer)
        environment = trainer_environment(self._settings, placement.has_gpus)
        trainer_options = placement.trainer | {"runtime_env": {"env_vars": environment}}
        trainers = [supervisor.spawn(f"trainer-{rank}", trainer_options) for rank in range(placement.trainer_ranks)]
        rollout_options = placement.rollout
        if placement.shares_gpus:
            rollout_options = shared_devices(rollout_options, self._devices(trainers))
        rollout = supervisor.spawn("rollout", rollout_options)

        buffer_address = supervisor.start(buffer, "slime.buffer.service", config.buffer, rpc)
        self.buffer = BufferClient(buffer_address)
        master = supervisor.call(lambda: supervisor.get(trainers[0], trainers[0].actor.free_address.remote(rpc.host)))

        rollout_address = supervisor.start(
            rollout, "slime.rollout.service", config.rollout, rpc, buffer_address=buffer_address, extra_args=config.flat
        )
        wiring = dict(
            master_address=master,
            buffer_address=buffer_address,
            rollout_address=rollout_address,
            extra_args=config.flat,
            megatron=given(config.megatron),
        )
        addresses = supervisor.start_all(
            trainers, "slime.trainer.service", config.trainer, rpc, world_size=len(trainers), **wiring
        )
        self.rollout = RolloutClient(rollout_address)
        self.trainers = [TrainerClient(address) for address in addresses]

        info = self.trainers[0].info()
        self.num_parameters = info.num_parameters
        self.first_step = info.next_step
        writer = self.buffer.open_run(str(config.launcher.run_name), last_committed_step=self.first_step - 1)
        for client in (self.rollout, *self.trainers):
            client.writer = writer
        # What an earlier start of this run left behind (--buffer-dir) is trained on before anything new is generated.
        stats = self.buffer.stats()
        self._sealed_steps = {stored.step for stored in self.buffer.read_groups(states=["sealed"])}
        self._spare_groups = stats.groups.get("completed", 0)
        if self.first_step:
            self.update_weights(self.first_step)

    def _devices(self, trainers: list[Process]) -> list[str]:
        """The GPUs that Ray gave to the trainer's ranks, by rank."""
        supervisor = self._supervisor
        each = supervisor.call_all([partial(supervisor.get, t, t.actor.devices.remote()) for t in trainers])
        return [device for devices in each for device in devices]

    def _stop(self) -> None:
        with uninterrupted():
            self._supervisor.stop()

    def generate(self, rollout_id: int) -> tuple[Metrics, list[Sample]]:
        """Generates and completes the groups of one rollout, less those that an earlier start of the run completed."""
        wanted = self.config.rollout.rollout_batch_size
        spare = wanted if rollout_id in self._sealed_steps else min(wanted, self._spare_groups)
        if rollout_id not in self._sealed_steps:
            self._spare_groups -= spare
        if spare == wanted:
            return {}, []
        result = self._supervisor.call(
            lambda: self.rollout.generate(
                rollout_id,
                wanted - spare,
                timeout=self._settings.rollout_timeout_seconds,
                on_progress=lambda done, total: self.progress("generating", done, total),
            )
        )
        return result.metrics, result.examples

    def train_step(self, step: int) -> Metrics:
        """Trains every rank on the groups of one rollout."""
        self.progress("training", 0, 0)
        groups = self.config.rollout.rollout_batch_size
        return self._on_every_rank(
            lambda trainer: trainer.train_step(step, groups, timeout=self._settings.train_timeout_seconds)
        )

    def offload(self) -> Metrics:
        """Has the engines give their GPU memory to the trainer, where the run is told to."""
        if not self.placement.offloads:
            return {}
        self.progress("offloading the engines", 0, 0)
        deadline = self._settings.update_timeout_seconds
        return self._timed("perf/offload_time", lambda: self.rollout.offload(timeout=deadline))

    def onload(self) -> Metrics:
        """Has the engines take back what the next weights need. The trainer's push has them take the rest."""
        if not self.placement.offloads:
            return {}
        self.progress("onloading the engines", 0, 0)
        deadline = self._settings.update_timeout_seconds
        return self._timed("perf/onload_time", lambda: self.rollout.onload(["weights"], timeout=deadline))

    def _timed(self, key: str, function: Callable[[], None]) -> Metrics:
        started = time.perf_counter()
        self._supervisor.call(function)
        return {key: time.perf_counter() - started}

    def update_weights(self, version: int) -> Metrics:
        """Pushes the policy to the engines as `version`."""
        self.progress("updating weights", 0, 0)
        return self._on_every_rank(
            lambda trainer: trainer.update_weights(version, timeout=self._settings.update_timeout_seconds)
        )

    def save(self, step: int, path: Path, save_hf: str | None) -> Metrics:
        """Writes a checkpoint of everything up to and including `step` below `path`, and commits those steps.

        Then deletes older ones, where --save-keep or --save-retain-interval say so.

        save_hf: also writes the policy there as a Hugging Face directory; `{rollout_id}` in it is replaced.
        """
        self.progress("saving", 0, 0)
        started = time.perf_counter()
        target = str(checkpoint_path(path, step, self._settings.train_backend))
        self._on_every_rank(
            lambda trainer: trainer.save_checkpoint(step, target, timeout=self._settings.save_timeout_seconds)
        )
        prune(path, keep=self._settings.save_keep, retain_interval=self._settings.save_retain_interval)
        if save_hf is not None:
            self.export(Path(save_hf.format(rollout_id=step)))
        return {"perf/save_time": time.perf_counter() - started}

    def export(self, path: Path) -> None:
        """Writes the policy as a Hugging Face directory."""
        self.progress("writing the model", 0, 0)
        self._on_every_rank(
            lambda trainer: trainer.export_model(str(path), timeout=self._settings.save_timeout_seconds)
        )

    def evaluate(self, rollout_id: int) -> tuple[Metrics, list[Sample]]:
        """Runs every evaluation set with the weights that the engines hold."""
        result = self._supervisor.call(
            lambda: self.rollout.evaluate(
                rollout_id,
                timeout=self._settings.rollout_timeout_seconds,
                on_progress=lambda done, total: self.progress("evaluating", done, total),
            )
        )
        return result.metrics, result.examples

    def _on_every_rank(self, function: Callable[[TrainerClient], object]) -> Metrics:
        results = self._supervisor.call_all([partial(function, trainer) for trainer in self.trainers])
        return results[0] if isinstance(results[0], dict) else {}
