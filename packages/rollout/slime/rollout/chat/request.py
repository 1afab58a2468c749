"""A request of an agent and its answer, in no protocol's form: what the engine and the gateway work with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.chat.pieces import JSON


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A request for answers to a prompt. messages: as `clean` gives them, or None where `prompt` is given: a text or
    token ids, neither of them checked.

    tools: in the form of OpenAI's chat protocol; None where the model may call none. template_arguments: not checked.
    max_tokens: None for as many as there is room for. sampling: SGLang's names; the values are not checked. count:
    answers to the prompt. body: all fields, of which protocols repeat fields in their answers.
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
    """Tokens of an answer: so far, or all of them where `finish_reason` is set.

    finish_reason: SGLang's, {"type": "stop", "matched": ...}.
    """

    prompt_tokens: int
    ids: Sequence[int]
    log_probs: Sequence[float]
    finish_reason: Mapping[str, Any] | None = None
    cached_tokens: int = 0
    weight_version: str = ""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A whole answer. message: in the form of OpenAI's chat protocol. log_probs: (text, log-prob) of each token, where
    they were asked for. finish_reason: stop, length or tool_calls; matched: the text among the stops that ended it, if
    one did."""

    message: JSON
    finish_reason: str
    matched: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    log_probs: list[tuple[str, float]] | None = None
