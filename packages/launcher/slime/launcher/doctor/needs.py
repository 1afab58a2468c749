"""Computes the resources that a run needs from its flags and the model's config."""

from __future__ import annotations

from slime.launcher.doctor.finding import Subject
from slime.launcher.plan.trainer_memory import checkpoint_bytes
from slime.launcher.platform import probes
from slime.types.errors import ConfigError


def machine_memory(subject: Subject) -> tuple[float, str] | None:
    """Returns (bytes of host memory, their parts in words); None if the flags or the model do not determine them."""
    if subject.config is None:
        return None
    from slime.launcher.plan.run_plan import Hardware, make_plan

    found = probes.gpus()
    size = min((gpu.total_bytes for gpu in found), default=0)
    try:
        plan = make_plan(subject.config, Hardware(tuple(gpu.name for gpu in found), size or None, "this machine"))
        return plan.host_memory()
    except ConfigError:
        return None  # other checks report the fault of the flags or the model


def checkpoints(subject: Subject) -> tuple[int, int, str] | None:
    """Returns (bytes of one checkpoint, number kept at once, formula in words); None without checkpoints, or if the
    flags or the model do not determine them."""
    config = subject.config
    if config is None or config.launcher.save_interval is None:
        return None
    from slime.converters.megatron.args import read_model_config
    from slime.launcher.plan.parameter_counts import of_adapters, of_directory

    trainer, settings = config.trainer, config.launcher
    try:
        model = read_model_config(trainer.hf_checkpoint, trainer.model_name, train_vision=trainer.train_vision)
        parameters = of_directory(trainer.hf_checkpoint, model)
        adapters = of_adapters(trainer.hf_checkpoint, trainer) if trainer.lora_rank else None
    except ConfigError:
        return None
    size, words = checkpoint_bytes(trainer, parameters, adapters)
    # With --num-epoch the number of iterations is known only when the data has been counted.
    written = sum(config.saves_after(iteration) for iteration in range(settings.num_rollout or 1))
    # A checkpoint is deleted only after a newer one is complete, so both exist for a while.
    kept = min(written, settings.save_keep + 1) if settings.save_keep else written
    return size, kept, words
