"""Compatibility: the default rollout under the names that code written for slime imports."""

from __future__ import annotations

from typing import Any

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate.default import generate_rollout_async
from slime.rollout.generate.evaluation import eval_rollout
from slime.rollout.generate.group import generate_and_rm, generate_and_rm_group
from slime.rollout.generate.sample import generate
from slime.rollout.generate.state import GenerateState, state_of
from slime.rollout.generate.submitted import SubmittedGroups

SubmittedGroups.generate_group = staticmethod(generate_and_rm_group)


def generate_rollout(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generates `args.rollout_batch_size` scored groups from `data_source`, or the results of an evaluation's sets.

    The contract is that of `--rollout-function-path`. Blocks; what it runs is asynchronous.
    """
    loop = state_of(args).loop
    if evaluation:
        return loop.run(eval_rollout(args, rollout_id, data_source))
    return loop.run(generate_rollout_async(args, rollout_id, data_source))


def get_model_url(args: Any, model_name: str = "default", endpoint: str = "/generate") -> str:
    """Returns the URL of an endpoint of the engines."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


__all__ = [
    "GenerateState", "eval_rollout", "generate", "generate_and_rm", "generate_and_rm_group", "generate_rollout",
    "generate_rollout_async", "get_model_url",
]  # fmt: skip
