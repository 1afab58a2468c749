"""Compatibility: return types of rollout functions, under the path that code written for slime imports."""

from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn

__all__ = [
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "call_rollout_fn",
]
