"""Tool calls in answers of the embedded engine, and the flags that choose their syntax."""

from __future__ import annotations

import pytest

from slime.rollout.engines.registry import KINDS, choose_engine
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidSetting, NotAvailable
from slime.types.setting_values import flag_name


def test_the_flags_of_sglang_choose_the_parsers_of_the_embedded_engine() -> None:
    def parsers(**flags: str) -> tuple[str | None, str | None]:
        (start,) = KINDS["embedded"].starts(RolloutSettings(hf_checkpoint="none", sglang_args=flags), [])
        options = start.args[0]  # type: ignore[attr-defined]
        return options.tool_call_parser, options.reasoning_parser

    assert parsers(tool_call_parser="qwen25", reasoning_parser="qwen3") == ("qwen25", "qwen3")
    assert parsers(tool_call_parser="glm45") == ("glm45", None)
    assert parsers() == (None, None)


def test_a_parser_that_the_embedded_engine_lacks_is_refused_with_those_that_it_has() -> None:
    for name in ("tool_call_parser", "reasoning_parser"):
        flags = {name: "of-nobody"}
        found = f"{flag_name(f'sglang_{name}')} of-nobody is not supported yet: the embedded engine .*; use .*glm45"
        with pytest.raises(NotAvailable, match=found):
            choose_engine(RolloutSettings(hf_checkpoint="none", sglang_args=flags), [], assume_installed=True)
        with pytest.raises(NotAvailable, match=found):
            RolloutSettings(hf_checkpoint="none", rollout_engine="embedded", sglang_args=flags)


def test_flags_of_sglang_that_the_embedded_engine_takes_may_be_given_to_it_by_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parsers = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    assert RolloutSettings(hf_checkpoint="none", rollout_engine="embedded", sglang_args=parsers).sglang_args == parsers
    others = {**parsers, "mem_fraction_static": 0.5}
    with pytest.raises(InvalidSetting, match="embedded and --sglang-mem-fraction-static cannot be used together"):
        RolloutSettings(hf_checkpoint="none", rollout_engine="embedded", sglang_args=others)
    choose_engine(RolloutSettings(hf_checkpoint="none", sglang_args=parsers), [], assume_installed=True)
    assert not caplog.records
    choose_engine(RolloutSettings(hf_checkpoint="none", sglang_args=others), [], assume_installed=True)
    (record,) = caplog.records
    assert "the embedded engine ignores --sglang-mem-fraction-static: " in record.getMessage()
