"""Merges the turns of an episode into samples.

The turns of an episode are a tree: a turn is the child of the one whose tokens its prompt begins with, of several the
longest. A sample is a line of turns, each the child of the one before: the tokens between them, of the user or of
tools, have loss mask 0 and log-prob 0, completions have mask 1 and the engine's log-probs. The first child of a turn
continues its sample; a further one starts a sample whose prompt is all that came before. So each completion is trained
once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from slime.rollout.agents.render import same_messages
from slime.rollout.agents.sessions import JSON, Turn
from slime.types import Sample

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs


def merge_turns(
    turns: Sequence[Turn], origin: Sample, decode: Callable[[list[int]], str], args: RolloutArgs | None = None
) -> list[Sample]:
    """Returns an episode's samples in order, without rewards. decode: token ids to text, for what lies between answers.

    They share a `rollout_id`: that of `origin`, the sample that the episode is of, or its index. One is TRUNCATED
    exactly where its last turn ended by length. Raises InvalidField where the engine's answers do not fit together.
    """
    parents = parents_of(turns)
    drifted = drifted_turns(turns, parents)
    # The sample that ends with a turn, by the turn's place.
    ends: dict[int, list[int]] = {}
    lines: list[list[int]] = []
    for place, parent in enumerate(parents):
        line = ends.pop(parent, None) if parent is not None else None
        if line is None:
            line = []
            lines.append(line)
        line.append(place)
        ends[place] = line
    samples = []
    for position, line in enumerate(lines):
        sample = _segment(position, [turns[place] for place in line], origin, decode, args)
        sample.metadata |= {
            "branch": parents[line[0]] is not None,
            "drifted_turns": sum(place in drifted for place in line),
        }
        samples.append(sample)
    return samples


def parents_of(turns: Sequence[Turn]) -> list[int | None]:
    """Returns the place of each turn's parent, the longest of the earlier turns whose tokens its prompt begins with."""
    # Comparing bytes takes a small part of the time of comparing lists.
    tokens = [np.asarray(turn.all_ids, np.int32).tobytes() for turn in turns]
    prompts = [np.asarray(turn.prompt_ids, np.int32).tobytes() for turn in turns]
    parents: list[int | None] = []
    for place, prompt in enumerate(prompts):
        before = [i for i in range(place) if prompt.startswith(tokens[i])]
        parents.append(max(before, key=lambda i: (len(tokens[i]), -i), default=None))
    return parents


def drifted_turns(turns: Sequence[Turn], parents: Sequence[int | None]) -> set[int]:
    """Finds the turns that continue an earlier one by their messages, and not by their tokens: the text of the
    answer was encoded again, and gave other tokens."""
    drifted = set()
    for place, turn in enumerate(turns):
        # The last message is the answer of the turn itself.
        asked, parent = turn.messages[:-1], parents[place]
        least = 0 if parent is None else len(turns[parent].messages)
        # Only what is longer than the parent: comparing with all of a conversation's turns takes seconds.
        longer = (turns[i].messages for i in range(place) if len(turns[i].messages) > least)
        if any(_continues(asked, known) for known in longer):
            drifted.add(place)
    return drifted


def _continues(messages: Sequence[JSON], known: Sequence[JSON]) -> bool:
    return 0 < len(known) < len(messages) and same_messages(known, messages[: len(known)])


def _segment(
    position: int, turns: list[Turn], origin: Sample, decode: Callable[[list[int]], str], args: RolloutArgs | None
) -> Sample:
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
