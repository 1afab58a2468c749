"""Merges the turns of an episode into samples.

The turns of an episode form a tree: the parent of a turn is the longest earlier turn with whose tokens the prompt of
the turn begins. A sample is a path of turns, each the child of the one before. Tokens between completions, from the
user or from tools, have loss mask 0 and log-prob 0; completions have mask 1 and the engine's log-probs. The first child
of a turn continues its sample; each further child starts a new sample, whose prompt holds all tokens before it. So each
completion is trained on once.
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
    """Returns an episode's samples in order, without rewards.

    origin: the sample that the episode was started for; the samples share its `rollout_id`, or its index where that is
    None. decode: returns the text of token ids, for the tokens between completions. A sample is TRUNCATED if its last
    turn ended by length, else COMPLETED. Raises InvalidField where the engines' answers contradict each other.
    """
    parents = parents_of(turns)
    drifted = drifted_turns(turns, parents)
    # The path that ends with a turn, by the position of that turn.
    ends: dict[int, list[int]] = {}
    paths: list[list[int]] = []
    for position, parent in enumerate(parents):
        path = ends.pop(parent, None) if parent is not None else None
        if path is None:
            path = []
            paths.append(path)
        path.append(position)
        ends[position] = path
    samples = []
    for index, path in enumerate(paths):
        sample = _segment(index, [turns[position] for position in path], origin, decode, args)
        sample.metadata |= {
            "branch": parents[path[0]] is not None,
            "drifted_turns": sum(position in drifted for position in path),
        }
        samples.append(sample)
    return samples


def parents_of(turns: Sequence[Turn]) -> list[int | None]:
    """Returns the position of each turn's parent, None for a turn without one.

    The parent is the longest earlier turn with whose tokens the turn's prompt begins.
    """
    # Comparing bytes is much faster than comparing lists.
    tokens = [np.asarray(turn.all_ids, np.int32).tobytes() for turn in turns]
    prompts = [np.asarray(turn.prompt_ids, np.int32).tobytes() for turn in turns]
    parents: list[int | None] = []
    for position, prompt in enumerate(prompts):
        candidates = [i for i in range(position) if prompt.startswith(tokens[i])]
        parents.append(max(candidates, key=lambda i: (len(tokens[i]), -i), default=None))
    return parents


def drifted_turns(turns: Sequence[Turn], parents: Sequence[int | None]) -> set[int]:
    """Returns the positions of turns that continue an earlier turn by their messages, but not by their tokens: the text
    of the earlier answer was tokenized again, and gave other tokens."""
    drifted = set()
    for position, turn in enumerate(turns):
        # The last message is the answer of the turn itself.
        request, parent = turn.messages[:-1], parents[position]
        least = 0 if parent is None else len(turns[parent].messages)
        # Only turns with more messages than the parent: comparing all turns of a conversation would take seconds.
        longer = (turns[i].messages for i in range(position) if len(turns[i].messages) > least)
        if any(_continues(request, known) for known in longer):
            drifted.add(position)
    return drifted


def _continues(messages: Sequence[JSON], known: Sequence[JSON]) -> bool:
    return 0 < len(known) < len(messages) and same_messages(known, messages[: len(known)])


def _segment(
    index: int, turns: list[Turn], origin: Sample, decode: Callable[[list[int]], str], args: RolloutArgs | None
) -> Sample:
    sample = new_sample(origin)
    sample.metadata |= {"segment_index": index, "num_turns": len(turns)}
    sample.tokens = np.asarray(turns[0].prompt_ids, np.int32)
    for turn in turns:
        between = turn.prompt_ids[len(sample.array("tokens")) :]
        if between:
            sample.append_response_tokens(args, tokens=between, trainable=False, text=decode(between))
        for part, meta in turn.parts:
            # The last part gets the text of all: a character may be split between two parts.
            text = turn.text if meta is turn.meta else ""
            ids, log_probs = turn.completion_ids[part], turn.log_probs[part]
            sample.append_response_tokens(args, tokens=ids, log_probs=log_probs, meta_info=meta, text=text)
    truncated = turns[-1].finish_reason == "length"
    sample.status = Sample.Status.TRUNCATED if truncated else Sample.Status.COMPLETED
    sample.validate()
    return sample


def new_sample(origin: Sample) -> Sample:
    """Returns a sample of the episode of `origin`, without any tokens yet."""
    return Sample(
        group_index=origin.group_index,
        index=origin.index,
        rollout_id=origin.index if origin.rollout_id is None else origin.rollout_id,
        prompt=copy.deepcopy(origin.prompt),
        label=copy.deepcopy(origin.label),
        metadata=copy.deepcopy(origin.metadata),
    )


def failed_sample(origin: Sample, error: str) -> Sample:
    """Returns the sample of a failed episode: without a reward, so that it does not enter its group's statistics, and
    without a token to train on."""
    sample = new_sample(origin)
    sample.metadata |= {"segment_index": 0, "num_turns": 0, "episode_error": error}
    sample.tokens, sample.response_length = [0, 0], 1
    sample.loss_mask, sample.rollout_log_probs = [0], [0.0]
    sample.status, sample.remove_sample = Sample.Status.FAILED, True
    return sample
