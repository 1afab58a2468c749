"""Typed clients of the services: Python values in, Python values out, errors of ours."""

from slime.types.clients.buffer import (
    AddPromptsResult,
    BufferClient,
    LeasedGroup,
    SampleSummary,
    Stats,
    StoredGroup,
    Writer,
)
from slime.types.clients.rollout import Engine, EvaluateResult, GenerateResult, RolloutClient, RolloutStatus
from slime.types.clients.trainer import TrainerClient, TrainerInfo

__all__ = [
    "AddPromptsResult", "BufferClient", "Engine", "EvaluateResult", "GenerateResult", "LeasedGroup", "RolloutClient",
    "RolloutStatus", "SampleSummary", "Stats", "StoredGroup", "TrainerClient", "TrainerInfo", "Writer",
]  # fmt: skip
