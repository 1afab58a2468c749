"""Checks the GPUs and their memory against the flags."""

from __future__ import annotations

import os
from collections.abc import Iterator

from slime.converters.megatron.flags import given, refuse_fp8_on_cpu
from slime.launcher.doctor.finding import Finding, Subject, fail, ok, warn
from slime.launcher.plan.trainer_memory import GIB
from slime.launcher.platform import probes
from slime.rollout.engines.registry import choose_engine, needs_gpu
from slime.types.errors import ConfigError, counted

# Share of a GPU's memory that other processes may hold without a warning.
TAKEN = 0.05


def check_gpus(subject: Subject) -> Iterator[Finding]:
    gpus, listed = probes.gpus(), probes.visible_devices()
    if not gpus:
        if listed:
            yield fail(f"CUDA_VISIBLE_DEVICES={listed}, and no GPU is visible", "unset it, or look at nvidia-smi")
        elif subject.flag("rollout_num_gpus") or needs_gpu(str(subject.flag("rollout_engine"))):
            yield fail(
                "no GPU is visible, and the flags ask for some",
                "run this on the machine with the GPUs; nvidia-smi shows them",
            )
        else:
            yield ok("no GPU is visible: training uses the CPU")
            yield from _engine(subject)
            yield from _precision(subject)
        return
    for gpu in gpus:
        yield from _gpu(gpu)
    if listed is not None:
        count = len([entry for entry in listed.split(",") if entry.strip()])
        if count != len(gpus):
            yield fail(
                f"CUDA_VISIBLE_DEVICES={listed} names {count} GPUs, {len(gpus)} are there",
                "name only GPUs that are there",
            )
    if not probes.torch_sees_gpus():
        yield fail(
            "the driver has GPUs, and torch sees none",
            "install a torch built for CUDA whose version the driver supports (nvidia-smi names it)",
        )
    yield from _against_flags(subject, gpus)


def _gpu(gpu: probes.Gpu) -> Iterator[Finding]:
    if gpu.total_bytes < 0:
        yield fail(
            f"GPU {gpu.name}: the driver does not answer for it",
            "nvidia-smi; a GPU that fell off the bus needs a reset",
        )
        return
    text = f"GPU {gpu.name}: {gpu.model}, {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
    if gpu.free_bytes < (1 - TAKEN) * gpu.total_bytes:
        yield warn(text, "other processes hold memory there: nvidia-smi names them")
    else:
        yield ok(text)


def _on_a_cluster(subject: Subject) -> bool:
    """Returns whether the run uses other machines, whose GPUs count instead of this one's."""
    return bool(subject.flag("ray_address") or os.environ.get("RAY_ADDRESS"))


def _engine(subject: Subject) -> Iterator[Finding]:
    """Reports why the engine of a run without GPUs would not start."""
    config = subject.config
    if config is None or not config.has_engines or config.rollout.rollout_external_engine_addrs:
        return
    if not _on_a_cluster(subject):
        try:
            choose_engine(config.rollout, [], assume_installed=True)
        except ConfigError as error:
            yield fail(str(error), "change the flag, or use a machine whose engine knows it")


def _precision(subject: Subject) -> Iterator[Finding]:
    """Reports why the trainer of a run without GPUs would not start."""
    config = subject.config
    if config is None or config.launcher.debug_rollout_only or _on_a_cluster(subject):
        return
    try:
        refuse_fp8_on_cpu(given(config.megatron))
    except ConfigError as error:
        yield fail(str(error), "leave out the flag, or train on a machine with GPUs")


def _against_flags(subject: Subject, gpus: list[probes.Gpu]) -> Iterator[Finding]:
    if subject.config is None or _on_a_cluster(subject):
        return
    from slime.launcher.plan.run_plan import Hardware, make_plan

    size = min(gpu.total_bytes for gpu in gpus)
    try:
        plan = make_plan(subject.config, Hardware(tuple(gpu.name for gpu in gpus), size, "this machine"))
    except ConfigError as error:
        yield fail(str(error), "change the flags, or use a machine with what they ask for")
        return
    yield ok(f"{counted(plan.placement.trainer_ranks, 'trainer rank')} and the engines fit the number of GPUs")
    for phase, (needed, available) in plan.phases().items():
        text = f"{phase} takes about {needed / GIB:.1f} of {available / GIB:.1f} GiB of a GPU"
        if needed > available:
            yield fail(
                text, "`slime train --dry-run` shows what takes it: more GPUs, less --max-tokens-per-gpu, recomputation"
            )
        else:
            yield ok(text)
