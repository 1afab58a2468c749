"""A rank of the trainer: it seals and plans steps, trains, pushes weights and saves. It knows clients, no server."""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.trainer.backends.base import REFERENCE, TRAINING, WEIGHTS
from slime.trainer.backends.build import build_backend, build_critic, open_checkpoints
from slime.trainer.batching.plan import Planner, packed, unpacked
from slime.trainer.checkpoints import checkpoint
from slime.trainer.debug.memory import MemoryRecord
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.checks import EMULATED_BFLOAT16
from slime.trainer.settings.debug import check_template
from slime.trainer.settings.trainer import TrainerSettings, flat_args
from slime.trainer.step.device_memory import PARTS, DeviceMemory
from slime.trainer.step.old_policies import OldPolicies
from slime.trainer.step.sharing import ReadSamples, share
from slime.trainer.step.step import TrainStep
from slime.trainer.step.train_data import converted, processed_rewards
from slime.trainer.weight_sync.group import set_nccl_environment
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import BufferClient, RolloutClient, SampleSummary, Writer
from slime.types.clients.trainer import TrainedStep
from slime.types.errors import DataLoss, InvalidSetting, WrongState, counted
from slime.types.models.processor import multiplies_bfloat16
from slime.types.plugins import load_setting
from slime.types.sample import Sample

log = logging.getLogger(__name__)


class Trainer:
    """One rank of a trainer. Every method but `info` is collective: all ranks call it at once, and all fail if one
    does."""

    def __init__(
        self,
        settings: TrainerSettings,
        ranks: Ranks,
        buffer: BufferClient,
        connect: Callable[[], RolloutClient | None],
        extra_args: dict[str, Any] | None = None,
        megatron: Mapping[str, Any] | None = None,
    ) -> None:
        """connect: returns the client of the rollout service, or None for a trainer that updates no engines. It is
        called once the model is loaded, so that engines may start meanwhile. megatron: the explicitly set arguments of
        Megatron, by attribute name; for that backend."""
        device = pick_device(ranks.rank)
        self.settings = settings = settings.on(device.type)
        if ranks.rank == 0 and settings.bf16:
            warn_of_emulated_bfloat16(device)
        self.ranks = ranks
        self.buffer = buffer
        self._args = flat_args(settings, extra_args)
        check_template(settings.save_debug_train_data, ranks.world_size)
        self._memory_record = MemoryRecord(settings, self._args, ranks.rank)
        self.state = checkpoint.TrainerState()
        if settings.load:
            self.state = checkpoint.read_state(settings.load, settings.train_backend)
        self.backend = build_backend(
            settings, ranks, device, weights=settings.load, megatron=megatron, extra_args=extra_args
        )
        self.critic = build_critic(settings, ranks, device, self.backend)
        self._source = Path(settings.hf_checkpoint)
        self._checkpoints = open_checkpoints(settings, self.backend, ranks, self._source, self.critic)
        if settings.load:
            self._checkpoints.load(settings.load, self.state)
            self._resume_reference()
        if settings.start_rollout_id is not None:
            self.state = dataclasses.replace(self.state, step=settings.start_rollout_id - 1)
        # The ranks of a node share one store of blobs, so each can read its samples by itself.
        self._step = TrainStep(
            settings, self.backend, ranks, extra_args, each_reads=buffer.blobs is not None, critic=self.critic,
            before_passes=lambda: self._memory.fetch(), before_update=lambda: self._memory.arrive(),
        )  # fmt: skip
        self._planner = Planner(settings, feeds_all=self.backend.needs_every_sample)
        self.rollout = rollout = connect()
        self._weight_sender = (
            None if rollout is None else WeightSender(settings, ranks, self.backend, rollout, self._source, self._args)
        )
        self._process_rewards = load_setting(settings, "custom_reward_post_process_path")
        self._convert = load_setting(settings, "custom_convert_samples_to_train_data_path")
        if settings.keep_old_actor:
            # A checkpoint's weights were updated since the engines got `weight_version`, samples of which may still
            # come: these weights get their version when they are sent.
            version = self.state.weight_version if self.state.updates == 0 else None
            self._step.preparation.old_policies = OldPolicies(self.backend, version)
        # The answer of the last iteration, for a call that is repeated.
        self._last = TrainedStep()
        self._acknowledged = True
        may_stay = settings.offload_train is None
        self._memory = DeviceMemory(self.backend, self.critic, enabled=settings.offloads_train, may_stay=may_stay)
        self._memory.release(*PARTS)

    def _resume_reference(self) -> None:
        """Makes the checkpoint's policy the reference model, if it was that when the checkpoint was written."""
        interval, done = self.settings.ref_update_interval, self.state.step + 1
        if interval is None or done < interval:
            return
        if done % interval:
            raise InvalidSetting.conflict(
                f"--ref-update-interval {interval}",
                f"--load {self.settings.load}",
                f"that checkpoint was written after {counted(done, 'iteration')}, without the reference model of "
                f"iteration {done - done % interval}; resume from one after a multiple of {interval} (--save-interval)",
            )
        self.backend.keep(REFERENCE)

    def close(self) -> None:
        """Drops a checkpoint that is not complete, and the connections to engines."""
        self._memory_record.close()
        self._checkpoints.close()
        if self._weight_sender is not None:
            self._weight_sender.close()

    @property
    def next_step(self) -> int:
        return self.state.step + 1

    def join(self, writer: Writer | None) -> None:
        """Makes calls in the name of `writer`; without one, of the run that the buffer has open."""
        writer = writer or self.buffer.get_run()
        self.buffer.writer = writer
        if self.rollout is not None:
            self.rollout.writer = writer

    def train_step(self, step: int, num_groups: int, positions: Set[int] = frozenset()) -> TrainedStep:
        """Seals, plans, trains and acknowledges `step`. A repeated call for the last step returns the same again.

        positions: samples whose log-probs are returned too, by the rank that computes them.
        """
        if step != self.state.step or not self._last.metrics:
            self._train(step, num_groups, positions)
        self.ranks.together(lambda: self._acknowledge(step))
        return self._last

    def _train(self, step: int, num_groups: int, positions: Set[int]) -> None:
        if step != self.next_step:
            raise WrongState(
                f"step {step} cannot be trained now", field="step", value=step, expected=str(self.next_step)
            )
        self._commit(wait=False)
        started = time.perf_counter()
        plan, read = self._plan(step, num_groups)
        planned = time.perf_counter()
        self._memory.need(*PARTS, late=True)
        onload_done = time.perf_counter()
        try:
            # A plug-in that converts samples changes their positions.
            metrics = self._step.run(plan, read, frozenset() if self._convert else positions)
        except DataLoss:
            # The step will be repeated with other samples, and the engines may need this memory to generate them.
            self._memory.release(TRAINING)
            raise
        interval = self.settings.ref_update_interval
        if interval is not None and (step + 1) % interval == 0:
            self.backend.keep(REFERENCE)
        trained = time.perf_counter()
        # The weights stay: they are sent to the engines next.
        self._memory.release(TRAINING, late=self._weight_sender is not None)
        metrics["perf/plan_time"] = planned - started
        if self._memory.enabled:
            metrics["perf/train_onload_time"] = onload_done - planned
            metrics["perf/train_offload_time"] = time.perf_counter() - trained
        self._memory_record.trained()
        self._last = TrainedStep(metrics, self._step.log_probs)
        self._acknowledged = False
        self.state = dataclasses.replace(self.state, step=step, updates=self.backend.updates)

    def _acknowledge(self, step: int) -> None:
        if self.ranks.rank == 0 and not self._acknowledged:
            self.buffer.acknowledge_step(step)
        self._acknowledged = True

    def _plan(self, step: int, num_groups: int) -> tuple[dict[str, Any], ReadSamples]:
        """Returns the plan of the step, and a function that reads its samples."""
        wait, samples = self.settings.step_wait_seconds, list[Sample]()

        def store() -> dict[str, Any]:
            summaries = self.buffer.seal_step(step, num_groups, wait_seconds=wait)
            if self._convert:
                sources = list(self.buffer.read_step(step, range(len(summaries))))
                data = converted(self._convert(self._args, sources), sources)
                samples.extend(data.samples)
                rewards = (data.raw_rewards, data.rewards)
                plan = self._planner.plan(step, data.summaries(), rewards, data.rollout_mask_sums)
            else:
                plan = self._planner.plan(step, summaries, self._custom_rewards(step, summaries))
            sent = packed(plan)
            stored = self.buffer.store_plan(step, sent)
            return plan if stored == sent else unpacked(stored)

        own = self.ranks.together(lambda: store() if self.ranks.rank == 0 else None)
        plan = self.ranks.together(lambda: own or unpacked(self.buffer.get_plan(step, wait_seconds=wait)))
        if not self._convert:
            return plan, lambda positions: self.buffer.read_step(step, positions)
        everywhere = share(samples, self.ranks, 0, self.ranks.control) if self.ranks.control else samples
        return plan, lambda positions: (everywhere[position] for position in positions)

    def _custom_rewards(self, step: int, summaries: Sequence[SampleSummary]) -> tuple[list[float], list[float]] | None:
        if not self._process_rewards:
            return None
        answer = self._process_rewards(self._args, list(self.buffer.read_step(step, range(len(summaries)))))
        return processed_rewards(answer, len(summaries))

    def update_weights(self, version: int, *, joining: bool = False) -> dict[str, float]:
        """Pushes the policy to every engine of the rollout service as `version`.

        joining: only to those that were started again and wait for weights.
        """
        if self._weight_sender is None:
            raise WrongState("this trainer was started without engines", field="weight_version", value=version)
        started = time.perf_counter()
        self._memory.need(*self.backend.parts_of_weights(getattr(torch, self.settings.wire_dtype)))
        if self._step.preparation.old_policies is not None and not (joining and version == self.state.weight_version):
            self._step.preparation.old_policies.keep(version)
        sent = self._weight_sender.push(version, release=lambda: self._memory.release(WEIGHTS), joining=joining)
        self._memory.measure()
        self.state = dataclasses.replace(self.state, weight_version=version)
        metrics = {
            "perf/update_weights_time": time.perf_counter() - started,
            "perf/update_weights_bytes": float(sent),
            **self._weight_sender.metrics,
        }
        if self._memory.enabled:
            # Only if rows have a maximum size is it certain that training will need no more memory than it did.
            stays = self._memory.work_has_room and self.settings.use_dynamic_batch_size
            metrics["perf/train_memory_stays"] = float(all(self.ranks.gather(stays)))
        return metrics

    def save_checkpoint(self, step: int, path: str, *, for_restart: bool = False) -> str:
        """Writes a checkpoint at `path`, then commits every step up to `step` in the buffer.

        for_restart: for ranks of this run that are started again: with the optimizer, complete when this returns, and
        without a commit, because a later start of the run may resume from an earlier checkpoint.
        """
        if step != self.state.step:
            raise WrongState(
                f"step {step} is not what the weights hold", field="step", value=step, expected=str(self.state.step)
            )
        self._commit(wait=True)
        if for_restart:
            with self._memory.held(*PARTS):
                self._checkpoints.save(Path(path), self.state, optimizer=True)
            self._checkpoints.finish(wait=True)
            return path
        place = self.ranks.together(lambda: self.buffer.read_place(step) if self.ranks.rank == 0 else None)
        with self._memory.held(*PARTS):
            optimizer = not self.settings.no_save_optim
            self._checkpoints.save(Path(path), self.state, optimizer=optimizer, place=place)
        self._commit(wait=not self.settings.async_save)
        return path

    def _commit(self, *, wait: bool) -> None:
        """Commits the steps of a checkpoint that is complete, and drops old ones."""
        step = self._checkpoints.finish(wait=wait)
        if step is not None:
            self.ranks.together(lambda: self.buffer.commit_steps(step) if self.ranks.rank == 0 else None)

    def export_model(self, path: str) -> str:
        """Writes a Hugging Face directory in the data type of the one that training began with, a LoRA adapter merged
        into it and also written below it."""
        self._commit(wait=True)
        dtype = checkpoint.config_dtype(Path(self.settings.hf_checkpoint))
        weights, sizes = self.backend.named_weights(), self.backend.weight_sizes()
        untrained, adapter = self.backend.untrained_weights(), self.backend.adapter()

        def write() -> None:
            checkpoint.write_model(Path(path), weights, sizes, dtype, self._source, untrained, adapter)

        with self._memory.held(*self.backend.parts_of_weights()):
            self.ranks.on_first(write, weights, *([] if adapter is None else [adapter.weights]))
        return path


def pick_device(rank: int) -> torch.device:
    """Returns the accelerator of this rank on its host, or the CPU if it has none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())


def warn_of_emulated_bfloat16(device: torch.device) -> None:
    """Logs that --bf16 is slow, for a CPU without the instructions."""
    if device.type == "cpu" and not multiplies_bfloat16(torch):
        log.warning(EMULATED_BFLOAT16)


def prepare_process(settings: TrainerSettings) -> None:
    """Sets seeds, threads and determinism of this process, before any other use of torch, on the thread that trains."""
    if settings.trainer_num_threads is not None:
        torch.set_num_threads(settings.trainer_num_threads)
    elif settings.deterministic:
        # The order of a reduction depends on the number of threads: keep the number that torch chose.
        torch.set_num_threads(torch.get_num_threads())
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    random.seed(settings.seed)
    np.random.seed(settings.seed)
    torch.manual_seed(settings.seed)
    device = pick_device(int(os.environ.get("RANK", 0)))
    if device.type == "cuda":
        set_nccl_environment()
        torch.cuda.set_device(device)
