"""Requests of agents and their answers, independent of the protocol, as the engine and the gateway use them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.chat.pieces import JSON


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for answers to a prompt.

    messages: as returned by `clean`, or None where `prompt` is given: a text or token ids, not checked yet. tools: in
    the form of OpenAI's chat protocol; None where the model may call none. template_arguments: not checked yet.
    max_tokens: None for as many as fit. stops: texts that end an answer. sampling: by SGLang's names, values not
    checked yet. count: the number of answers. log_probs: whether answers hold them. with_usage: whether a stream ends
    with token counts. model: the name in the request. body: all fields; protocols repeat some in their answers.
    """

    messages: list[JSON] | None = None
    prompt: Any = None
    tools: list[JSON] | None = None
    template_arguments: Any = None
    max_tokens: int | None = None
    stops: list[str] = field(default_factory=list)
    sampling: JSON = field(default_factory=dict)
    count: int = 1
    log_probs: bool = False
    stream: bool = False
    with_usage: bool = False
    model: str = ""
    body: JSON = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Generated:
    """The tokens of an answer so far; all of them if `finish_reason` is set.

    prompt_tokens, cached_tokens: the number of tokens of the prompt, and of those that came from the cache. log_probs:
    one per id. finish_reason: in SGLang's form, {"type": "stop", "matched": ...}.
    """

    prompt_tokens: int
    ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: Mapping[str, Any] | None = None
    cached_tokens: int = 0
    weight_version: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A complete answer.

    message: in the form of OpenAI's chat protocol. finish_reason: "stop", "length" or "tool_calls". matched: the stop
    text that ended the answer, None if none did. log_probs: (text, log-prob) of each token, None if not asked for.
    """

    message: JSON
    finish_reason: str
    matched: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    log_probs: list[tuple[str, float]] | None = None
