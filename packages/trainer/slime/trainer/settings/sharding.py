"""Decides which state of a model the ranks of the fsdp backend share out."""

from __future__ import annotations

from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting

# Bytes per parameter: bfloat16 weight and float32 gradient; float32 weight and AdamW's moments; the bfloat16 weight of
# a model that is only compared with, or that adapters are trained for.
WHOLE_BYTES, SHARDED_BYTES, COMPARED_BYTES, FROZEN_BYTES = 6, 12, 2, 2
# Share of a GPU's memory; activations need the rest.
LARGEST_SHARE = 0.5


def compared_models(settings: TrainerSettings) -> int:
    """Counts the models beside the policy that score its rows: a reference, unless the policy contains it, and a
    teacher."""
    return int(settings.needs_reference and not settings.reference_is_base) + int(settings.loads_teacher)


def whole_bytes(parameters: int, ranks: int, compared: int = 0, trained: int | None = None) -> float:
    """Returns the memory of a rank that has all weights and gradients, those of `compared` models included.

    A compared model counts as one of the policy's size. trained: parameters of adapters, where no others train.
    """
    of_models = COMPARED_BYTES * compared * parameters
    if trained is None or trained == parameters:
        return of_models + parameters * (WHOLE_BYTES + SHARDED_BYTES / ranks)
    return of_models + FROZEN_BYTES * parameters + trained * (WHOLE_BYTES + SHARDED_BYTES / ranks)


def keeps_weights_whole(
    settings: TrainerSettings,
    parameters: int,
    ranks: int,
    gpu_bytes: float | None,
    *,
    compared: int = 0,
    trained: int | None = None,
) -> bool:
    """Tells if every rank has all weights and gradients, the same on all ranks.

    gpu_bytes: of the smallest GPU, None on a CPU. trained: as in `whole_bytes`. Raises InvalidSetting for
    --fsdp-sharding optimizer without --bf16.
    """
    bf16, choice = bool(settings.bf16), settings.fsdp_sharding
    if choice == "optimizer" and not bf16:
        reason = "it shards the float32 weights that are kept beside those in bfloat16"
        raise InvalidSetting.requires("--fsdp-sharding optimizer", "--bf16", reason)
    if ranks == 1 or not bf16 or choice != "auto":
        return bf16 and (ranks == 1 or choice == "optimizer")
    if gpu_bytes is None:
        return True
    # Policy and critic decide separately, and share the same GPUs.
    room = LARGEST_SHARE / (2 if settings.use_critic else 1) * gpu_bytes
    return whole_bytes(parameters, ranks, compared, trained) <= room
