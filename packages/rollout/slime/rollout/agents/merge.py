"""Merges the turns of an episode into samples.

Turns whose prompt starts with all of the turn before are one sample: the tokens between, of the user or of tools, have
loss mask 0 and log-prob 0, completions have mask 1 and the engine's log-probs. A turn that does not continue the one
before starts a new sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime.rollout.agents.sessions import Turn
from slime.types import Sample


def merge_turns(
    turns: Sequence[Turn], origin: Sample, decode: Callable[[list[int]], str], args: Any = None
) -> list[Sample]:
    """Returns an episode's samples in order, without rewards. decode: token ids to text, for what lies between answers.

    They share a `rollout_id`: that of `origin`, the sample that the episode is of, or its index. One is TRUNCATED
    exactly where its last turn ended by length. Raises InvalidField where the engine's answers do not fit together.
    """
    segments: list[list[Turn]] = []
    for turn in turns:
        last = segments[-1][-1].all_ids if segments else None
        if last is not None and turn.prompt_ids[: len(last)] == last:
            segments[-1].append(turn)
        else:
            segments.append([turn])
    return [_segment(position, segment, origin, decode, args) for position, segment in enumerate(segments)]


def _segment(position: int, turns: list[Turn], origin: Sample, decode: Callable[[list[int]], str], args: Any) -> Sample:
    sample = new_sample(origin)
    sample.metadata |= {"segment_index": position, "num_turns": len(turns)}
    sample.tokens = np.asarray(turns[0].prompt_ids, np.int32)
    for turn in turns:
        between = turn.prompt_ids[len(sample.array("tokens")) :]
        if between:
            sample.append_response_tokens(args, tokens=between, trainable=False, text=decode(between))
        for part, meta in turn.parts:
            # The text of all parts: a character may be split between two.
            text = turn.text if meta is turn.meta else ""
            ids, log_probs = turn.completion_ids[part], turn.log_probs[part]
            sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=meta, text=text)
    truncated = turns[-1].finish_reason == "length"
    sample.status = Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED
    sample.validate()
    return sample


def new_sample(origin: Sample) -> Sample:
    """Returns a sample of the episode of `origin`, with nothing generated."""
    return Sample(
        group_index=origin.group_index,
        index=origin.index,
        rollout_id=origin.index if origin.rollout_id is None else origin.rollout_id,
        prompt=copy.deepcopy(origin.prompt),
        label=copy.deepcopy(origin.label),
        metadata=copy.deepcopy(origin.metadata),
    )


def failed_sample(origin: Sample, error: str) -> Sample:
    """Stands for an episode that failed: it has no reward, so that its group's statistics are of the others alone, and
    no token to train."""
    sample = new_sample(origin)
    sample.metadata |= {"segment_index": 0, "num_turns": 0, "episode_error": error}
    sample.tokens, sample.response_length = [0, 0], 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    return sample
