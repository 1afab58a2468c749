"""Rewards under the names that code written for slime imports."""

from slime.rollout.rewards.remote import remote_rm
from slime.rollout.rewards.score import async_rm, batched_async_rm

__all__ = ["async_rm", "batched_async_rm", "remote_rm"]
