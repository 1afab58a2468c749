"""Compatibility: the default rollout under the names that code written for slime imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.rollout.generate.default import generate_rollout, generate_rollout_async
from slime.rollout.generate.evaluation import eval_rollout
from slime.rollout.generate.group import generate_and_rm, generate_and_rm_group
from slime.rollout.generate.sample import generate
from slime.rollout.generate.state import GenerateState
from slime.rollout.models.addresses import model_url

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def get_model_url(args: RolloutArgs, model_name: str = "default", endpoint: str = "/generate") -> str:
    """Returns the URL of an endpoint of a model's engines, as `slime.rollout.models.model_url` does."""
    return model_url(args, model_name, endpoint)


__all__ = [
    "GenerateState", "eval_rollout", "generate", "generate_and_rm", "generate_and_rm_group", "generate_rollout",
    "generate_rollout_async", "get_model_url",
]  # fmt: skip
