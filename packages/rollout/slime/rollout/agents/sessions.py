"""Sessions of agents and their turns, as the engines generated them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]


@dataclass
class Turn:
    """One request and its answer.

    prompt_ids: token ids sent to the engine. completion_ids, log_probs: one token id and one log-prob for each token
    that it generated. meta: the engine's `meta_info`. text: the decoded completion. messages: the conversation, with
    the answer as its last message; empty for a turn of plain text. tools, arguments: of the chat template.
    earlier: for an answer that was interrupted, the number of tokens and the meta of each part but the last.
    """

    prompt_ids: list[int]
    completion_ids: list[int]
    log_probs: list[float]
    meta: Mapping[str, Any]
    text: str = ""
    messages: list[JSON] = field(default_factory=list)
    tools: list[JSON] | None = None
    arguments: JSON = field(default_factory=dict)
    earlier: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)

    @property
    def finish_reason(self) -> str:
        reason = self.meta.get("finish_reason")
        return str(reason.get("type") if isinstance(reason, Mapping) else reason or "stop")

    @property
    def weight_version(self) -> str:
        return str(self.meta.get("weight_version", ""))

    @property
    def parts(self) -> Iterator[tuple[slice, Mapping[str, Any]]]:
        """The parts of the completion, in order, that each version of the weights generated, with their meta."""
        start = 0
        for count, meta in self.earlier:
            yield slice(start, start + count), meta
            start += count
        yield slice(start, len(self.completion_ids)), self.meta

    @property
    def all_ids(self) -> list[int]:
        return [*self.prompt_ids, *self.completion_ids]


@dataclass
class Session:
    """The session of an episode.

    sampling_params: of all its requests, in SGLang's names. sample_index: the requests' sampling seeds are derived from
    it; None where requests carry no seed. ends_aborted: whether the session refuses requests after one was aborted.
    aborted: whether an engine aborted one. requests: the number of requests so far. open_requests: ids of requests in
    flight. open_of_call: the set in which the rollout call of this episode keeps such ids. running: tasks of requests.
    """

    id: str
    sampling_params: JSON
    sample_index: int | None = None
    turns: list[Turn] = field(default_factory=list)
    ends_aborted: bool = False
    aborted: bool = False
    requests: int = 0
    generation_seconds: float = 0.0
    open_requests: set[str] = field(default_factory=set)
    open_of_call: set[str] = field(default_factory=set)
    running: set[asyncio.Task[Any]] = field(default_factory=set)
