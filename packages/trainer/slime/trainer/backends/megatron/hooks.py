"""The places where user code joins the Megatron backend."""

from __future__ import annotations

from typing import Any

from slime.trainer.settings.trainer import TrainerSettings
from slime.types.plugins import load_setting


class Hooks:
    """Calls what `settings` name; nothing where they name nothing. args: the namespace that the functions receive."""

    def __init__(self, settings: TrainerSettings | None = None, args: Any = None) -> None:
        self._args = args
        self._init = load_setting(settings, "custom_megatron_init_path")
        self._log_prob = load_setting(settings, "custom_megatron_before_log_prob_hook_path")
        self._train_step = load_setting(settings, "custom_megatron_before_train_step_hook_path")
        self.model_provider = load_setting(settings, "custom_model_provider_path")

    def after_initialization(self) -> None:
        if self._init is not None:
            self._init(self._args)

    def before_log_probs(self, chunks: list[Any], prefix: str) -> None:
        """Called before log-probs are computed. prefix: "" for the policy, "ref_" for the reference model."""
        if self._log_prob is not None:
            self._log_prob(self._args, chunks, prefix)

    def before_train_step(self, rollout: int, update: int, chunks: list[Any], optimizer: Any) -> None:
        """Called before the forward passes of an update. There is no scheduler: the trainer sets the learning rate."""
        if self._train_step is not None:
            self._train_step(self._args, rollout, update, chunks, optimizer, None)
