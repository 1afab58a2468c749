"""Compatibility: fully asynchronous generation under the path that code written for slime imports.

    slime train-async --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async

means `slime train-async --fully-async`: the loop generates without end (`generate/continuous.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate.default import generate_rollout

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def generate_rollout_fully_async(
    args: RolloutArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generates one iteration as the default rollout does, for evaluations and for callers outside the loop.

    The contract is that of `--rollout-function-path`.
    """
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
