"""Replay of recorded iterations: the rollout function of `--load-forge-rollout-data`.

Recorded samples take the place of generated ones, while the engines run as usual: the rest of the system (memory,
weight updates, training) can be measured on the same data each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate.default import generate_rollout as generate_with_engines
from slime.rollout.recordings.rollouts import path_of, read_rollout
from slime.types import Sample
from slime.types.errors import InvalidFile, counted

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

FLAG = "--load-forge-rollout-data"


def generate_rollout(
    args: RolloutArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Fulfils the contract of `--rollout-function-path`; an evaluation is made by the engines.

    Raises MissingFile or InvalidFile for a recording that is not there, has too few groups, or groups of another size.
    """
    if evaluation:
        return generate_with_engines(args, rollout_id, data_source, evaluation=True)
    # RolloutSettings requires the flag for this function.
    assert args.load_forge_rollout_data is not None
    path = path_of(args.load_forge_rollout_data, rollout_id)
    recorded = read_rollout(path, flag=FLAG, group_size=args.n_samples_per_prompt).groups
    wanted = args.rollout_batch_size
    if len(recorded) < wanted:
        raise _wrong(path, counted(len(recorded), "group"), f"at least --rollout-batch-size {wanted}")
    leased: list[list[Sample]] = []
    while len(leased) < wanted:
        leased += data_source.get_samples(wanted - len(leased))
    groups = [_stand_in(group.samples, place, path) for group, place in zip(recorded, leased, strict=False)]
    return RolloutFnTrainOutput(samples=groups, metrics={})


def _stand_in(recorded: Sequence[Sample], leased: Sequence[Sample], path: Any) -> list[Sample]:
    """Returns the recorded samples of a group under the indexes of a leased one."""
    rollouts: dict[Any, list[Sample]] = {}
    for position, sample in enumerate(recorded):
        rollouts.setdefault(position if sample.index is None else sample.index, []).append(sample)
    if len(rollouts) != len(leased):
        raise _wrong(path, f"a group of {counted(len(rollouts), 'rollout')}", f"--n-samples-per-prompt {len(leased)}")
    for place, samples in zip(leased, rollouts.values(), strict=True):
        for sample in samples:
            sample.group_index, sample.index = place.group_index, place.index
            sample.rollout_id = place.index if len(samples) > 1 else None
    return list(recorded)


def _wrong(path: Any, got: str, expected: str) -> InvalidFile:
    return InvalidFile(f"{FLAG} {path}: got {got}, expected {expected}", field=FLAG, value=got, expected=expected)
