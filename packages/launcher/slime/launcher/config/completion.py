"""Derives from a run's trainer and model the rules by which the buffer checks completed groups.

A sample that breaks them is rejected with its group; found later, by the trainer, it would end the run.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from slime.buffer.settings import BufferSettings
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.files import read_regular
from slime.types.models.vision import trained_vision


def with_needs_of_training(
    buffer: BufferSettings, trainer: TrainerSettings, *, vocab_size: int | None, trains: bool = True
) -> BufferSettings:
    """Returns `buffer` with the rules for finished samples that follow from the trainer and the model.

    vocab_size: the value of --vocab-size, if given. trains: whether the run has a trainer.
    """
    makes_rewards = trainer.custom_reward_post_process_path or trainer.custom_convert_samples_to_train_data_path
    rules: dict[str, Any] = {}
    if trainer.loss_type == "sft_loss" or makes_rewards:
        rules["allow_missing_rewards"] = True
    elif not buffer.allow_missing_rewards:
        rules["scalar_rewards"] = True
    if not trainer.custom_convert_samples_to_train_data_path:
        rules["log_probs_required"] = buffer.log_probs_required or trainer.reads_rollout_log_probs
        if trains:
            rules["nuclei"] = "required" if trainer.samples_from_nuclei else "refused"
    if buffer.release_committed is None:
        # A rank that starts again may have to begin before the last commit, and a run without a trainer keeps nothing
        # else.
        rules["release_committed"] = trains and not (trainer.no_save_optim or trainer.ref_update_interval)
    config = _config(trainer.hf_checkpoint)
    reads_text = config is not None and trained_vision(config, trainer.train_vision) is None
    rules["text_only"] = buffer.text_only or reads_text
    size = vocab_size or _vocab_size(config or {})
    if buffer.max_token_id is None and size:
        rules["max_token_id"] = size - 1
    return dataclasses.replace(buffer, **rules)


def _config(hf_checkpoint: str | None) -> dict[str, Any] | None:
    """Returns the model's config.json; None if it is missing or unreadable, which other checks report."""
    try:
        found = json.loads(read_regular(Path(hf_checkpoint or "", "config.json")))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _vocab_size(config: dict[str, Any]) -> int | None:
    text = config.get("text_config")
    size = config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) else None
