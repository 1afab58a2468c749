"""Syntaxes of tool calls and reasoning under SGLang's names for their parsers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.rollout.chat.syntaxes import calls
from slime.rollout.chat.syntaxes.base import AnswerParser, CallSyntax, Thinking, schemas_of
from slime.rollout.chat.syntaxes.blocks import BlockParser
from slime.rollout.chat.syntaxes.harmony import HarmonyParser
from slime.types.errors import InvalidSetting, NotAvailable

HARMONY = "gpt-oss"
TOOL_CALLS: dict[str, CallSyntax | None] = {
    "qwen": calls.QWEN, "qwen25": calls.QWEN, "hermes": calls.QWEN,
    "qwen3_coder": calls.QWEN3_CODER, "mimo": calls.QWEN3_CODER,
    "glm": calls.GLM, "glm45": calls.GLM, "glm47": calls.GLM,
    "deepseekv3": calls.DEEPSEEK_V3, "deepseekv31": calls.DEEPSEEK_V31, "deepseekv32": calls.DEEPSEEK_V32,
    "kimi_k2": calls.KIMI_K2,
    "minimax-m2": calls.MINIMAX_M2,
    "llama3": calls.LLAMA3,
    HARMONY: None,
}  # fmt: skip
REASONING: dict[str, Thinking | None] = {
    "qwen3": Thinking(), "qwen3-thinking": Thinking(begins=True),
    "deepseek-r1": Thinking(begins=True), "deepseek-v3": Thinking(),
    "glm45": Thinking(), "kimi_k2": Thinking(), "mimo": Thinking(),
    "kimi": Thinking("◁think▷", "◁/think▷"),
    "minimax": Thinking(begins=True), "minimax-append-think": Thinking(kept=True),
    HARMONY: None,
}  # fmt: skip
TOOL_CALL_PARSERS = tuple(TOOL_CALLS)
REASONING_PARSERS = tuple(REASONING)


@dataclass(frozen=True)
class AnswerSyntax:
    """The syntax of a model's answers. tool_calls, reasoning: keys of `TOOL_CALLS` and `REASONING`, or None."""

    tool_calls: str | None = None
    reasoning: str | None = None

    def check(self, unknown: str) -> None:
        """Raises NotAvailable, with the reason `unknown`, for a name that is not in its table, and InvalidSetting for a
        pair of names that do not go together."""
        for flag, name, known in (
            ("--sglang-tool-call-parser", self.tool_calls, TOOL_CALL_PARSERS),
            ("--sglang-reasoning-parser", self.reasoning, REASONING_PARSERS),
        ):
            if name is not None and name not in known:
                raise NotAvailable.unavailable(f"{flag} {name}", unknown, f"one of {', '.join(known)}")
        if self.tool_calls and self.reasoning and (self.tool_calls == HARMONY) != (self.reasoning == HARMONY):
            raise InvalidSetting.conflict(
                f"--sglang-tool-call-parser {self.tool_calls}", f"--sglang-reasoning-parser {self.reasoning}",
                "gpt-oss writes both in a syntax of its own",
            )  # fmt: skip

    @property
    def keeps_special_tokens(self) -> bool:
        """True if the parser needs the special tokens in the text of an answer."""
        syntax = TOOL_CALLS.get(self.tool_calls or "")
        return HARMONY in (self.tool_calls, self.reasoning) or (syntax is not None and syntax.special)

    def parser(self, tools: Sequence[Any] | None, prompt_end: str) -> AnswerParser:
        """Returns the parser of one answer. tools: the request's; without tools, blocks of calls stay content.
        prompt_end: the last characters of the prompt, which may open the reasoning."""
        if HARMONY in (self.tool_calls, self.reasoning):
            return HarmonyParser()
        thinking = REASONING.get(self.reasoning or "")
        opened = thinking is not None and prompt_end.rstrip().endswith(thinking.open)
        syntax = TOOL_CALLS.get(self.tool_calls or "") if tools else None
        return BlockParser(syntax, thinking, opened=opened, schemas=schemas_of(tools))
