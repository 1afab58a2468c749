"""`Plan`: placement and memory of each process of a run on assumed hardware. Nothing is started or loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slime.converters.megatron.args import model_args, read_model_config
from slime.converters.megatron.flags import given, refuse_fp8_on_cpu
from slime.converters.megatron.rank_layout import Sizes, layers_of_stages, sizes_of
from slime.launcher.config.checks.engine_weights import refuse_quantized
from slime.launcher.config.checks.on_policy import check_on_policy_model
from slime.launcher.config.checks.run import check_nuclei
from slime.launcher.config.run_config import RunConfig
from slime.launcher.placement.nodes import EngineShare
from slime.launcher.placement.plan import Placement, plan_placement
from slime.launcher.plan.activations import Shape
from slime.launcher.plan.batches import Batches, batches, longest_sample, pass_tokens
from slime.launcher.plan.engine_memory import EngineMemory, engine_memory
from slime.launcher.plan.parameter_counts import Held, of_adapters, of_directory, of_stages
from slime.launcher.plan.trainer_memory import CONTEXT_BYTES, GIB, RankMemory, trainer_memory
from slime.rollout.engines.kind import REGULAR, EngineKind
from slime.rollout.engines.registry import choose_engine
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.settings.served_models import group_settings
from slime.types.errors import InvalidSetting, counted


@dataclass(frozen=True)
class Hardware:
    """The GPUs of each node.

    gpus: their entries in CUDA_VISIBLE_DEVICES, or numbers. gpu_bytes: memory of the smallest GPU. words: the source of
    these facts, for the report. assumed: whether the hardware is not that of this machine. host_bytes: memory of the
    machine; None if it is unknown.
    """

    gpus: tuple[str, ...]
    gpu_bytes: float | None
    words: str
    assumed: bool = False
    host_bytes: int | None = None


def make_plan(config: RunConfig, hardware: Hardware, *, asynchronous: bool = False) -> Plan:
    """Makes the plan. Raises the ConfigErrors of the run, and InvalidFile for a model that cannot be counted."""
    return Plan(config, hardware, _place(config, hardware), asynchronous)


def _place(config: RunConfig, hardware: Hardware) -> Placement:
    """Places the run on as many nodes as the trainer needs, or on more if the engines need them."""
    nodes, count = config.launcher.actor_num_nodes, len(hardware.gpus)
    engine = config.rollout.rollout_num_gpus_per_engine
    rollout_gpus = config.rollout.rollout_num_gpus or engine
    try:
        return plan_placement(config.launcher, config.rollout, [count] * nodes)
    except InvalidSetting:
        one = nodes == 1 and not (hardware.assumed and rollout_gpus > count)
        if one or not count:
            raise
    # At most, the engines need nodes of their own; an engine that is larger than a node takes whole nodes.
    most = nodes + -(-rollout_gpus // (count // engine * engine or count))
    for several in range(nodes + 1, most):
        try:
            return plan_placement(config.launcher, config.rollout, [count] * several)
        except InvalidSetting:
            continue
    return plan_placement(config.launcher, config.rollout, [count] * most)


class Plan:
    """The plan of a run.

    engine: the kind of engine that this run starts; None if it only trains, or if its engines run already.
    sizes: sizes of the trainer's parallel groups. args: Megatron's arguments; None for FSDP. held: parameters on a rank
    of each pipeline stage. longest: tokens of the longest sample; tokens: of a forward pass; each has its reason.
    """

    def __init__(self, config: RunConfig, hardware: Hardware, placement: Placement, asynchronous: bool) -> None:
        config = replace(config, trainer=config.trainer.on("cuda" if placement.has_gpus else "cpu"))
        self.config, self.hardware, self.placement, self.asynchronous = config, hardware, placement, asynchronous
        trainer, launcher = config.trainer, config.launcher
        whole = read_model_config(trainer.hf_checkpoint, trainer.model_name, train_vision=trainer.train_vision)
        self.model_config: Mapping[str, Any] = whole.get("text_config") or whole
        if placement.trainer_ranks:
            check_on_policy_model(trainer, on_gpu=placement.has_gpus)
            if not placement.has_gpus:
                refuse_fp8_on_cpu(given(config.megatron))
        self.parameters = of_directory(trainer.hf_checkpoint, whole)
        self.shape = Shape.of(self.model_config)
        ranks = placement.trainer_ranks or launcher.actor_num_nodes * launcher.actor_num_gpus_per_node
        self.args: dict[str, Any] | None = None
        self.sizes = Sizes(data=ranks)
        self.held = [Held(self.parameters, 0)]
        self.adapters = of_adapters(trainer.hf_checkpoint, trainer) if trainer.lora_rank else None
        if trainer.train_backend == "megatron":
            self.args = model_args(whole, given(config.megatron))
            if not trainer.enable_mtp_training:
                self.args.pop("mtp_num_layers", None)
            self.sizes = sizes_of(self.args, ranks)
            self.held = of_stages(whole, self.args, self.sizes)
        self.longest, self.longest_because = longest_sample(config.rollout, self.model_config)
        self.tokens, self.tokens_because = pass_tokens(trainer, self.longest)
        self.engine = self._choose_engine()

    def _choose_engine(self) -> EngineKind | None:
        """Returns the kind of engine. Raises ConfigError if this machine cannot run the engine that was asked for."""
        rollout = self.config.rollout
        if self.config.launcher.debug_train_only or rollout.rollout_external_engine_addrs:
            return None
        kind = choose_engine(rollout, self.hardware.gpus, assume_installed=self.hardware.assumed)
        trains = self.config.launcher.num_rollout != 0 and not self.config.launcher.debug_rollout_only
        if trains:
            check_nuclei(rollout.rollout_top_p, rollout.rollout_top_k, kind)
        if not self.config.launcher.debug_rollout_only:
            refuse_quantized(self.config.trainer.hf_checkpoint, kind)
        return kind

    @property
    def engine_name(self) -> str:
        return self.engine.name if self.engine is not None else ""

    @property
    def batches(self) -> Batches:
        return batches(self.config.trainer, self.config.rollout, self.sizes.data)

    def gpu_of_rank(self, rank: int) -> tuple[int, int]:
        """Returns (node, number of the GPU on it)."""
        each = self.placement.trainer_ranks // len(self.placement.trainer_nodes)
        return self.placement.trainer_nodes[rank // each], rank % each

    @property
    def num_engines(self) -> int:
        """Returns the number of engines that this run starts."""
        return sum(self.engines_of(share) for share in self.placement.engines if share.part == 0)

    def engines_of(self, share: EngineShare) -> int:
        """Returns the number of engines, or of parts of an engine, that this run starts on the node of `share`."""
        return len(self._gpus_of_engines(share))

    def _gpus_of_engines(self, share: EngineShare) -> list[list[int]]:
        """Returns the numbers of each engine's GPUs, counted from the first one of the node's share."""
        if self.engine is None:
            return []
        if share.nodes > 1:
            return [list(range(share.gpus))]
        if self.config.rollout.served_models:
            return [gpus for _, each in self._gpus_of_models(share) for gpus in each]
        per_engine = self.config.rollout.rollout_num_gpus_per_engine
        return self.engine.divide(range(share.gpus), share.embedded, per_engine)

    def _gpus_of_models(self, share: EngineShare) -> list[tuple[str, list[list[int]]]]:
        """Returns (name, GPUs of each engine) for every group of --sglang-config, whose GPUs follow one another."""
        assert self.engine is not None
        found, taken = [], 0
        for model in self.config.rollout.served_models:
            for group in model.groups:
                gpus = range(taken, taken + group.num_gpus) if group.num_gpus is not None else range(share.gpus)
                taken += group.num_gpus or 0
                engines = self.engine.divide(gpus, group.num_engines or 1, group.num_gpus_per_engine)
                stage = "" if group.worker_type == REGULAR else f", {group.worker_type}"
                found.append((f"model {model.name}{stage}", engines))
        return found

    def models_of_engines(self) -> list[str]:
        """Returns the model, and the part of a request that it does, of each engine in the order of their numbers;
        empty where all engines are alike."""
        if not self.config.rollout.served_models or self.engine is None:
            return []
        return [name for name, engines in self._gpus_of_models(self.placement.engines[0]) for _ in engines]

    def engines_of_gpus(self) -> dict[tuple[int, int], str]:
        """Returns engine names by (node, number of the GPU); empty for engines on the CPU or elsewhere."""
        names: dict[tuple[int, int], list[str]] = {}
        number, models = 0, self.models_of_engines()
        for share in self.placement.engines:
            first = self._first_gpu(share)
            for gpus in self._gpus_of_engines(share):
                for rank, gpu in enumerate(gpus, share.part * share.gpus):
                    part = f" (tp {rank})" if len(gpus) > 1 or share.nodes > 1 else ""
                    of_model = f", {models[number]}" if models else ""
                    name = f"{self.engine_name}-{number}{part}{of_model}"
                    names.setdefault((share.node, first + gpu), []).append(name)
                number += share.part == share.nodes - 1
        return {gpu: ", ".join(found) for gpu, found in names.items()}

    def _first_gpu(self, share: EngineShare) -> int:
        """Returns the number, on their node, of the engines' first GPU."""
        placement = self.placement
        if placement.shares_gpus or share.node not in placement.trainer_nodes:
            return 0
        return placement.trainer_ranks // len(placement.trainer_nodes)

    def memories(self) -> list[RankMemory]:
        """Returns the memory of a rank of each pipeline stage; none without a trainer."""
        if not self.placement.trainer_ranks:
            return []
        trainer, on_gpu = self.config.trainer, self.placement.has_gpus
        if self.args is None:
            return [
                trainer_memory(
                    trainer, self.shape, self.held[0], self.sizes, self.tokens, on_gpu=on_gpu,
                    gpu_bytes=self.hardware.gpu_bytes, adapters=self.adapters,
                )
            ]  # fmt: skip
        layers = layers_of_stages(self.args, self.sizes)
        return [
            trainer_memory(
                trainer, self.shape, held, self.sizes, self.tokens, args=self.args, stage=stage,
                layers=sum(map(len, layers[stage])), on_gpu=on_gpu,
            )
            for stage, held in enumerate(self.held)
        ]  # fmt: skip

    def engine_memory(self) -> EngineMemory | None:
        """Estimates the memory of an engine of the trained model; None for engines that this run does not start."""
        if self.engine is None or self.num_engines == 0:
            return None
        return self._memory_of(self.config.rollout, self.model_config, self.parameters)

    def _memory_of(self, settings: RolloutSettings, config: Mapping[str, Any], parameters: int) -> EngineMemory:
        assert self.engine is not None
        on_gpu = any(share.gpus for share in self.placement.engines)
        gpu_bytes = self.hardware.gpu_bytes if on_gpu else None
        return engine_memory(self.engine, settings, config, parameters, gpu_bytes, on_cpu=not on_gpu)

    def engine_memories(self) -> list[tuple[str, int, EngineMemory]]:
        """Returns (name, number of engines, memory of one of them) for each group of engines that are alike."""
        if self.engine is None or self.num_engines == 0:
            return []
        rollout, found = self.config.rollout, []
        if not rollout.served_models:
            return [(self.engine_name, self.num_engines, self._memory_of(rollout, self.model_config, self.parameters))]
        numbers = iter(self._gpus_of_models(self.placement.engines[0]))
        for model in rollout.served_models:
            whole = read_model_config(model.path)
            config = whole.get("text_config") or whole
            parameters = of_directory(model.path, whole)
            for group in model.groups:
                memory = self._memory_of(group_settings(rollout, model, group), config, parameters)
                name, engines = next(numbers)
                found.append((f"{self.engine_name}, {name}", len(engines), memory))
        return found

    def phases(self) -> dict[str, tuple[float, float]]:
        """Returns (bytes needed, bytes available) on a GPU of the trainer for each phase.

        Empty without GPUs, or if their size is unknown.
        """
        size, memories, engine = self.hardware.gpu_bytes, self.memories(), self.engine_memory()
        if size is None or not self.placement.has_gpus or not memories:
            return {}
        training = max(memory.training for memory in memories)
        if not self.placement.shares_gpus or engine is None:
            return {"training": (training, size)}
        taken = engine.taken if engine.taken is not None else engine.weights
        lasting = max(memory.lasting for memory in memories)
        waiting = CONTEXT_BYTES if self.config.trainer.offloads_train else lasting
        working = 0.0 if self.placement.offloads else taken
        return {"generating": (waiting + taken, size), "training": (training + working, size)}

    def host_memory(self) -> tuple[float, str]:
        """Returns (bytes of host memory that the run takes, their parts in words), with 1 GiB for each process."""
        memories, nodes = self.memories(), len(self.placement.trainer_nodes)
        ranks, engine = self.placement.trainer_ranks // nodes, self.engine_memory()
        engines = max(map(self.engines_of, self.placement.engines))
        total = float(GIB * (2 + ranks + engines))
        words = f"{counted(ranks, 'trainer rank')}, {counted(engines, 'engine')}, buffer and rollout"
        total += ranks * max((memory.host for memory in memories), default=0.0)
        if self.placement.has_gpus:
            if self.config.trainer.offloads_train:
                total += ranks * max((memory.lasting - CONTEXT_BYTES for memory in memories), default=0.0)
                words += ", and the trainer's weights while engines work"
            return total, words
        total += ranks * max((memory.training for memory in memories), default=0.0)
        if self.config.rollout.served_models:
            total += sum(number * memory.weights for _, number, memory in self.engine_memories())
        elif engine is not None:
            total += engine.weights * engines
        return total, f"{words}, with their weights"
