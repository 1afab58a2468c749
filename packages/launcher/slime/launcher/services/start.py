"""Starts the services of one run on Ray: the buffer, the rollout service with its engines, and the trainer ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.converters.megatron.args import read_model_config
from slime.converters.megatron.flags import given
from slime.launcher.blob_stores.base import KeeperReader, KeptWriter
from slime.launcher.blob_stores.nixl import NixlReader, NixlWriter
from slime.launcher.blob_stores.object_store import ObjectStoreReader, ObjectStoreWriter
from slime.launcher.config.derived import decay_over_run
from slime.launcher.config.run_config import RunConfig
from slime.launcher.placement.nodes import EngineShare
from slime.launcher.placement.plan import (
    LEAST_HIDDEN_SIZE,
    Placement,
    ServiceNode,
    core_environment,
    shared_devices,
    trainer_environment,
)
from slime.launcher.plan.parameter_counts import adapters_in_words, of_adapters
from slime.launcher.run_directory.checkpoints import PLACE_FILE, continued_step
from slime.launcher.run_directory.writable import saved_below
from slime.launcher.services.actors import AddressOf
from slime.launcher.services.processes import Process
from slime.launcher.services.supervisor import Supervisor
from slime.rollout.engines.base import HostedEngine
from slime.rollout.engines.kind import EngineNode
from slime.rollout.engines.registry import KINDS, needs_gpu
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.clients import BufferClient, RolloutClient, TrainerClient
from slime.types.errors import InvalidSetting, counted
from slime.types.rpc import RpcSettings

# An engine on several nodes uses ports after its meeting point, among them one for each replica of attention.
ENGINE_PORTS = 64

# The name under which the rollout service leases groups.
WORKER = "rollout"
# Seconds during which calls of a lost service are retried, in a run that starts lost services again.
RETRY_SECONDS = 60.0

Progress = Callable[[str, int, int], None]


@dataclass
class StartedServices:
    """Clients of the services of a run, and its first step.

    rollout: None for a run that trains on recorded rollouts; trainers: empty for a run that only generates.
    notes: messages to the user about the beginning of the run.
    """

    buffer: BufferClient
    rollout: RolloutClient | None = None
    trainers: list[TrainerClient] = field(default_factory=list)
    first_step: int = 0
    num_parameters: int | None = None
    notes: list[str] = field(default_factory=list)

    def addresses(self) -> dict[str, str]:
        """Returns the address of every service by its name."""
        rollout = {} if self.rollout is None else {"rollout": self.rollout.address}
        trainers = {f"trainer-{rank}": trainer.address for rank, trainer in enumerate(self.trainers)}
        return {"buffer": self.buffer.address, **rollout, **trainers}


def start_services(
    config: RunConfig,
    placement: Placement,
    supervisor: Supervisor,
    progress: Progress,
    buffer_dir: str | None = None,
    engines_file: str | None = None,
) -> StartedServices:
    """Starts every service that the run needs; `supervisor` stops them, also after an error.

    buffer_dir: where the buffer of a run without --buffer-dir keeps its state if lost services are started again; None
    if they are not. engines_file: where the rollout service then keeps its external engines. Sets --num-rollout for a
    run with --num-epoch.
    """
    progress("starting the services", 0, 0)
    return _Start(config, placement, supervisor, buffer_dir, engines_file).start()


class _Start:
    """One start of the services; holds what its steps share."""

    def __init__(
        self,
        config: RunConfig,
        placement: Placement,
        supervisor: Supervisor,
        buffer_dir: str | None = None,
        engines_file: str | None = None,
    ) -> None:
        self.config, self.placement, self.supervisor = config, placement, supervisor
        self.buffer_dir, self.engines_file = buffer_dir, engines_file
        self.rpc = RpcSettings()
        if buffer_dir is not None:
            self.rpc = replace(self.rpc, retry_seconds=RETRY_SECONDS)

    def _client_settings(self) -> RpcSettings:
        """Returns the settings of clients of the rollout service and the trainer. If these are started again, they come
        back in another state, so their clients do not retry: the launcher repeats the calls itself."""
        settings = self.supervisor.client_settings
        return settings if self.buffer_dir is None else replace(settings, retry_seconds=0.0)

    @cached_property
    def _hidden_size(self) -> int:
        model = read_model_config(self.config.trainer.hf_checkpoint)
        return int((model.get("text_config") or model).get("hidden_size") or LEAST_HIDDEN_SIZE)

    def start(self) -> StartedServices:
        config, placement, supervisor, rpc = self.config, self.placement, self.supervisor, self.rpc
        settings = config.launcher
        buffer = supervisor.spawn("buffer", placement.buffer)
        environment = trainer_environment(settings, placement.has_gpus, self._hidden_size)
        trainer_options = placement.trainer | {"runtime_env": {"env_vars": environment}}
        trainers = [supervisor.spawn(f"trainer-{rank}", trainer_options) for rank in range(placement.trainer_ranks)]
        for trainer in trainers:
            # On GPUs that they share, trainers start after the engines, whose start takes as long as these imports.
            trainer.actor.preload.remote("slime.trainer.service", config.trainer.train_backend)
        hosts: list[Process] = []
        rollout = None
        if config.has_engines:
            hosts = [
                supervisor.spawn(name, self._engine_options(share, trainers))
                for name, share in placement.engine_hosts().items()
            ]
            alone = placement.rollout if hosts else self._engine_options(placement.engines[0], trainers)
            rollout = supervisor.spawn("rollout", alone)
        elif config.generates:
            rollout = supervisor.spawn("rollout", {"num_cpus": 0})

        prompts = self._buffer_settings(generates=rollout is not None, trains=bool(trainers))
        blobs = self._blob_writer(buffer)
        buffer_address = supervisor.start(buffer, "slime.buffer.service", prompts, rpc, blobs=blobs)
        buffer_client = replace(supervisor.client_settings, retry_seconds=rpc.retry_seconds)
        started = StartedServices(BufferClient(buffer_address, settings=buffer_client))
        self._count_rollouts(started.buffer)
        if rollout is not None and trainers:
            started.notes += self._notes_on_prompts(started.buffer, prompts.data_place)
        blob_reader = self._blob_reader(buffer, rpc) if trainers else None
        steps = [
            partial(self._start_rollout, rollout, hosts, started),
            partial(self._start_trainers, trainers, rollout, started, blob_reader),
        ]
        if placement.shares_gpus:
            # Engines take a part of the memory that they find free.
            for step in steps:
                step()
        else:
            supervisor.call_once(steps)
        return started

    def _buffer_settings(self, *, generates: bool, trains: bool) -> BufferSettings:
        prompts = self.config.buffer
        if not generates:
            # Replayed samples must not enter the state of the run that was recorded.
            return replace(
                prompts, prompt_data=None, rollout_global_dataset=False, eval_prompt_data=None,
                buffer_dir=self.buffer_dir, buffer_store=None, buffer_payloads=None, data_place=None,
            )  # fmt: skip
        prompts = replace(prompts, buffer_dir=prompts.buffer_dir or self.buffer_dir)
        return replace(prompts, data_place=self._data_place()) if trains else prompts

    def _blob_writer(self, buffer: Process) -> KeptWriter | None:
        match self.config.launcher.rollout_data_transport:
            case "object-store":
                return ObjectStoreWriter()
            case "nixl":
                return NixlWriter(alone=buffer.host == ServiceNode.host)
        return None

    def _blob_reader(self, buffer: Process, rpc: RpcSettings) -> KeeperReader | None:
        match self.config.launcher.rollout_data_transport:
            case "object-store":
                return ObjectStoreReader(buffer.actor, rpc.call_timeout_seconds)
            case "nixl":
                return NixlReader(buffer.actor, rpc.call_timeout_seconds, alone=buffer.host == ServiceNode.host)
        return None

    def _continues(self) -> int | None:
        return continued_step(self.config.trainer.load, self.config.launcher.start_rollout_id)

    def _data_place(self) -> str | None:
        """Returns the file with the place in the data: --data-place, or that of the checkpoint in --load."""
        named, load = self.config.buffer.data_place, self.config.trainer.load
        if named is not None or load is None or self._continues() is None:
            return named
        path = Path(load) / PLACE_FILE
        return str(path) if path.is_file() else None

    def _notes_on_prompts(self, buffer: BufferClient, place: str | None) -> list[str]:
        """Returns a note if the prompts do not continue after those that the checkpoint has seen."""
        step, stats = self._continues(), buffer.stats()
        if place is None:
            if step is None or stats.next_group_index:
                return []
            return [f"the checkpoint of step {step} has no {PLACE_FILE}: the prompts start over from the first one"]
        with open(place, encoding="utf-8") as file:
            known = json.loads(file.readline())["dataset"]
        if (known or "") == stats.dataset:
            return []
        return [
            f"--load: the prompts ({stats.dataset or 'sent by clients'}) are not those of the checkpoint "
            f"({known or 'sent by clients'}), and start from the first one"
        ]

    def _count_rollouts(self, buffer: BufferClient) -> None:
        """Turns --num-epoch into a number of iterations."""
        config, epochs = self.config, self.config.launcher.num_epoch
        if epochs is None:
            return
        prompts, groups = buffer.stats().prompts_in_dataset, config.rollout.rollout_batch_size
        if prompts < groups:
            raise InvalidSetting.requires(
                f"--num-epoch {epochs}",
                f"at least {counted(groups, 'prompt')} (--rollout-batch-size)",
                f"--prompt-data has {prompts}",
            )
        self.config.launcher.num_rollout = config.flat["num_rollout"] = epochs * (prompts // groups)
        decay_over_run(config.trainer, config.flat, config.launcher.num_rollout)

    def _start_engines(self, hosts: list[Process]) -> list[HostedEngine]:
        """Starts the engines of all nodes, in order."""
        if not hosts:
            return []
        rollout, supervisor = self.config.rollout, self.supervisor
        settings, options = [], []
        gpus = embedded = 0
        address = ""
        for host, share in zip(hosts, self.placement.engine_hosts().values(), strict=True):
            # The GPUs of a part of an engine are those that its process sees.
            visible_gpus = None if share.nodes > 1 else share.gpus or None
            # A kind of engine that is not counted by this setting refuses any value but its default.
            number = rollout.rollout_num_engines if needs_gpu(rollout.rollout_engine) else share.embedded
            of_node = replace(rollout, rollout_num_gpus=visible_gpus, rollout_num_engines=number)
            settings.append(_listening_at(host, of_node))
            before = range(gpus), embedded, rollout.rollout_num_gpus_per_engine
            first = {name: len(kind.divide(*before)) for name, kind in KINDS.items()}
            if share.nodes > 1 and share.part == 0:
                address = supervisor.get(host, host.actor.meeting_point.remote(ENGINE_PORTS))
            node = EngineNode(share.nodes, share.part, address) if share.nodes > 1 else None
            options.append({"first": first, "node": node})
            gpus, embedded = gpus + share.gpus, embedded + share.embedded
        supervisor.start_each(hosts, "slime.rollout.fleet.engine_host", settings, RpcSettings(), options)
        for host in hosts:
            supervisor.watch(host, host.actor.watch_engines.remote())
        each = supervisor.call_all([partial(supervisor.get, host, host.actor.engines.remote()) for host in hosts])
        return [engine for engines in each for engine in engines]

    def _start_rollout(self, rollout: Process | None, hosts: list[Process], started: StartedServices) -> None:
        """Starts the rollout service, after the engines of `hosts`; without any it starts its own."""
        if rollout is None:
            return
        config, supervisor = self.config, self.supervisor
        engines = self._start_engines(hosts) if hosts or not config.has_engines else None
        address = supervisor.start(
            rollout,
            "slime.rollout.service",
            _listening_at(rollout, config.rollout),
            self.rpc,
            buffer_address=started.buffer.address,
            extra_args=config.flat,
            engines=engines,
            worker_id=WORKER,
            engines_file=self.engines_file,
        )
        started.rollout = RolloutClient(address, settings=self._client_settings())

    def _start_trainers(
        self, trainers: list[Process], rollout: Process | None, started: StartedServices, blobs: KeeperReader | None
    ) -> None:
        """Starts the trainer ranks, and takes the run's first step from the first of them."""
        config, supervisor = self.config, self.supervisor
        if not trainers:
            started.first_step = config.launcher.start_rollout_id or 0
            return
        engines = None
        if rollout is not None and config.has_engines:
            engines = AddressOf(rollout.actor.address.remote(), supervisor.start_seconds)
        one_node = {trainer.host for trainer in trainers} == {ServiceNode.host}
        if one_node:
            master = supervisor.meeting_file()
        else:
            master = supervisor.call(lambda: supervisor.get(trainers[0], trainers[0].actor.meeting_point.remote()))
        # Counted while the trainers import what they need.
        adapters = of_adapters(config.trainer.hf_checkpoint, config.trainer) if config.trainer.lora_rank else None
        addresses = supervisor.start_all(
            trainers,
            "slime.trainer.service",
            config.trainer,
            self.rpc,
            world_size=len(trainers),
            master_address=master,
            buffer_address=started.buffer.address,
            rollout_address=engines,
            extra_args=config.flat,
            megatron=given(config.megatron),
            blobs=blobs,
            write_below=saved_below(config.flat),
        )
        started.trainers = [TrainerClient(address, settings=self._client_settings()) for address in addresses]
        info = started.trainers[0].info()
        started.num_parameters, started.first_step = info.num_parameters, info.next_step
        if adapters is not None:
            model = read_model_config(config.trainer.hf_checkpoint)
            words = adapters_in_words(config.trainer, model, adapters, info.num_parameters)
            started.notes.insert(0, f"LoRA of {words}")

    def _engine_options(self, share: EngineShare, trainers: list[Process]) -> dict[str, Any]:
        """Returns the Ray options of the service that starts these engines."""
        options, nodes = self.placement.engine_options(share), self.placement.nodes()
        if not self.placement.has_gpus and not share.gpus:
            return options | {"runtime_env": {"env_vars": core_environment(share.embedded, self._hidden_size)}}
        if not self.placement.shares_gpus:
            return options
        return shared_devices(options, self._devices([t for t in trainers if nodes[t.name] == share.node]))

    def _devices(self, trainers: list[Process]) -> list[str]:
        """Returns the GPUs that Ray gave to these ranks, in their order."""
        supervisor = self.supervisor
        each = supervisor.call_all([partial(supervisor.get, t, t.actor.devices.remote()) for t in trainers])
        return [device for devices in each for device in devices]


def _listening_at(process: Process, rollout: RolloutSettings) -> RolloutSettings:
    """Sets the address that the engines of `process` listen on, unless the user has named one."""
    if process.host == ServiceNode.host or rollout.rollout_engine_host != ServiceNode.host:
        return rollout
    return replace(rollout, rollout_engine_host=process.host)
