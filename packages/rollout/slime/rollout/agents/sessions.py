"""The sessions of agents: the turns of each, as the engines generated them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

JSON = dict[str, Any]


@dataclass
class Turn:
    """One request and its answer.

    prompt_ids, completion_ids, log_probs (of the completion): those that the engine got and gave. meta: its
    `meta_info`. text: the completion, decoded. messages: the conversation with the answer as last message; empty for a
    turn of plain text. tools, arguments: of the chat template. earlier: of an answer that weight updates interrupted,
    the number of tokens and the meta of each part before the last.
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
        """The part of the completion that each version of the weights made, and the meta of it."""
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
    """The session of an episode. sampling_params: SGLang's, which hold for all requests of it. sample_index: keys the
    seeds of its requests, None where they carry none. aborted: an engine was told to end a request of it; ends_aborted:
    there are none after that. open_requests: those at the engines; open_of_call: where the rollout call that it is of
    keeps its own."""

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
