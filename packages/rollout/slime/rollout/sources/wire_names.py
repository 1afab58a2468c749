"""Checks the names in samples from the buffer: functions, rewards and template arguments.

Whoever may write to the buffer may put any text there, so a name counts only where this run's own settings, or code
that they name, gave it. Nothing is imported to find that out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from slime.rollout.chat.template import check_arguments
from slime.rollout.rewards.registry import check_name
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import InvalidField, SlimeError
from slime.types.setting_values import flag_name

PATHS = {"generate_function_path": "custom_generate_function_path", "custom_rm_path": "custom_rm_path"}


class WireNames:
    """The names that samples may hold. tokenizer: its chat template determines the valid arguments. Thread-safe."""

    def __init__(self, settings: RolloutSettings, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rm_url = settings.rm_url
        self._lock = threading.Lock()
        sets = settings.eval_overrides
        self._paths = {
            field: {getattr(settings, name), *(values.get(name) for values in sets.values())} - {None}
            for field, name in PATHS.items()
        }
        # A set's own rm_type replaces the function that scores the other sets.
        self._scored_by_function = {None: settings.custom_rm_path is not None} | {
            name: bool(values.get("custom_rm_path"))
            or (settings.custom_rm_path is not None and not values.get("rm_type"))
            for name, values in sets.items()
        }

    def trust(self, samples: Iterable[Sample]) -> None:
        """Accepts, from now on, the functions that these samples name: code of this process made them."""
        with self._lock:
            for sample in samples:
                for field, paths in self._paths.items():
                    path = getattr(sample, field)
                    if path is not None:
                        paths.add(path)

    def check(self, samples: Iterable[Sample], evaluation_set: str | None = None) -> None:
        """Raises InvalidField, InvalidSetting or NotAvailable naming the field and the value.

        evaluation_set: the set that the samples belong to; None for training.
        """
        by_function = self._scored_by_function.get(evaluation_set, self._scored_by_function[None])
        for sample in samples:
            for field, paths in self._paths.items():
                path = getattr(sample, field)
                if path is not None and path not in paths:
                    flag = flag_name(PATHS[field])
                    raise InvalidField(
                        field, path, f"a path that this run was started with ({flag}, or that of an evaluation set)"
                    )
            check_arguments(self._tokenizer, sample.apply_chat_template_kwargs, "apply_chat_template_kwargs")
            # A function of the user's comes before metadata.rm_type, which is then the user's own data.
            rm_type = None if by_function or sample.custom_rm_path else sample.metadata.get("rm_type")
            if rm_type and check_name(str(rm_type).strip()) == "remote_rm" and not self._rm_url:
                raise InvalidField("metadata.rm_type", rm_type, "another reward: this run has no --rm-url")

    def refusal(self, samples: Iterable[Sample]) -> SlimeError | None:
        """Returns the error that `check` raises, or None."""
        try:
            self.check(samples)
        except SlimeError as error:
            return error
        return None
