"""Tool calls in answers of the embedded engine, and the flags that choose their syntax."""

from __future__ import annotations

from slime.rollout.engines.registry import KINDS
from slime.rollout.settings.rollout import RolloutSettings


def test_the_flags_of_sglang_choose_the_parsers_of_the_embedded_engine() -> None:
    def parsers(**flags: str) -> tuple[str | None, str | None]:
        (start,) = KINDS["embedded"].starts(RolloutSettings(hf_checkpoint="none", sglang_args=flags), [])
        options = start.args[0]  # type: ignore[attr-defined]
        return options.tool_call_parser, options.reasoning_parser

    assert parsers(tool_call_parser="qwen25", reasoning_parser="qwen3") == ("qwen25", "qwen3")
    assert parsers(tool_call_parser="glm45") == ("glm45", None)
    assert parsers(tool_call_parser="of-another-engine") == parsers() == (None, None)
