"""Tool calls and reasoning as the families of models write them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.rollout.chat.pieces import message_of
from slime.rollout.chat.syntaxes.registry import REASONING, TOOL_CALLS, AnswerSyntax
from slime.rollout.chat.text import TextStream
from slime.types.errors import InvalidSetting

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": PROPERTIES}}}]
VALUES = {"city": "12 Löwen", "days": 3, "tags": ["a", 1]}
ARGUMENTS = json.dumps(VALUES, ensure_ascii=False)
ALSO = '{"city": "7"}'

QWEN = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
CODER = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n12 Löwen\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=tags>\n["a", 1]\n</parameter>\n</function>\n</tool_call>'
)
GLM = (
    "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12 Löwen</arg_value>\n<arg_key>days</arg_key>\n"
    '<arg_value>3</arg_value>\n<arg_key>tags</arg_key>\n<arg_value>["a", 1]</arg_value>\n</tool_call>'
)
V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{}\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>weather<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.weather:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">'
    '12 Löwen</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="tags" string="false">["a", 1]</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
INVOKE = (
    '<invoke name="weather">\n<parameter name="city">12 Löwen</parameter>\n<parameter name="days">3</parameter>\n'
    '<parameter name="tags">["a", 1]</parameter>\n</invoke>\n'
)
MINIMAX = f"<minimax:tool_call>\n{INVOKE}</minimax:tool_call>"
# Name -> the text of one call with VALUES.
ONE = {
    "qwen": QWEN, "qwen25": QWEN, "hermes": QWEN, "qwen3_coder": CODER, "mimo": CODER,
    "glm": GLM, "glm45": GLM, "glm47": GLM.replace("\n", ""),
    "deepseekv3": f"<｜tool▁calls▁begin｜>{V3.replace('{}', ARGUMENTS)}<｜tool▁calls▁end｜>",
    "deepseekv31": f"<｜tool▁calls▁begin｜>{V31.format(ARGUMENTS)}<｜tool▁calls▁end｜>",
    "deepseekv32": DSML,
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI.format(0, ARGUMENTS)}<|tool_calls_section_end|>",
    "minimax-m2": MINIMAX,
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "gpt-oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}",
}  # fmt: skip
# Texts that hold two calls, of VALUES and of ALSO.
TWO = {
    "qwen": QWEN + '\n<tool_call>{"name": "weather", "arguments": ' + ALSO + "}</tool_call>",
    "qwen3_coder": CODER + "\n<tool_call><function=weather><parameter=city>\n7\n</parameter></function></tool_call>",
    "glm45": GLM + "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>7</arg_value>\n</tool_call>",
    "deepseekv3": f"<｜tool▁calls▁begin｜>{V3.replace('{}', ARGUMENTS)}\n{V3.replace('{}', ALSO)}<｜tool▁calls▁end｜>",
    "deepseekv31": f"<｜tool▁calls▁begin｜>{V31.format(ARGUMENTS)}{V31.format(ALSO)}<｜tool▁calls▁end｜>",
    "kimi_k2": f"<|tool_calls_section_begin|>{KIMI.format(0, ARGUMENTS)}{KIMI.format(1, ALSO)}"
    "<|tool_calls_section_end|>",
    "minimax-m2": f'<minimax:tool_call>\n{INVOKE}<invoke name="weather">\n<parameter name="city">\n7\n</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "llama3": f'<|python_tag|>{{"name": "weather", "parameters": {ARGUMENTS}}}; '
    f'{{"name": "weather", "parameters": {ALSO}}}',
    "gpt-oss": f"{ONE['gpt-oss']}<|call|><|start|>assistant{ONE['gpt-oss'].replace(ARGUMENTS, ALSO)}",
}


def read(text: str, syntax: AnswerSyntax, *, tools: Any = TOOLS, prompt: str = "", cuts: Any = ()) -> dict[str, Any]:
    """The message of a text that arrives in parts, without the random part of calls."""
    parser = syntax.parser(tools, prompt)
    pieces = []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        pieces += parser.feed(text[start:end])
    message = message_of([*pieces, *parser.finish()])
    for call in message.get("tool_calls", ()):
        if call["id"].startswith("call_"):
            call["id"] = ""
    return message


def calls_of(message: dict[str, Any]) -> list[Any]:
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return [(name, json.loads(arguments)) for name, arguments in found]


def test_every_name_of_the_table_is_tried() -> None:
    assert ONE.keys() == TOOL_CALLS.keys()


@pytest.mark.parametrize("name", ONE)
def test_a_call_has_its_name_and_its_arguments_in_their_types(name: str) -> None:
    message = read(ONE[name], AnswerSyntax(name))
    assert calls_of(message) == [("weather", VALUES)] and message["content"] is None
    said = "<|channel|>final<|message|>I ask." if name == "gpt-oss" else "I ask.\n"
    after = read(said + ("<|end|><|start|>assistant" if name == "gpt-oss" else "") + ONE[name], AnswerSyntax(name))
    assert calls_of(after) == [("weather", VALUES)] and after["content"] == "I ask."


@pytest.mark.parametrize("name", TWO)
def test_calls_that_are_made_together_are_all_taken(name: str) -> None:
    message = read(TWO[name], AnswerSyntax(name))
    assert calls_of(message) == [("weather", VALUES), ("weather", json.loads(ALSO))] and message["content"] is None


def test_kimi_names_its_calls_itself() -> None:
    calls = read(TWO["kimi_k2"], AnswerSyntax("kimi_k2"))["tool_calls"]
    assert [call["id"] for call in calls] == ["functions.weather:0", "functions.weather:1"]


def test_llama_may_write_nothing_but_the_call() -> None:
    bare = f'{{"name": "weather", "parameters": {ARGUMENTS}}}'
    assert calls_of(read(bare, AnswerSyntax("llama3"))) == [("weather", VALUES)]
    assert read('{"a": 1}', AnswerSyntax("llama3")) == {"role": "assistant", "content": '{"a": 1}'}


@pytest.mark.parametrize("name", [name for name in ONE if name != "gpt-oss"])
def test_what_is_no_call_stays_text(name: str) -> None:
    for text in ("no call", "<tool_call>{nonsense}</tool_call>", "<tool_call>" + "[" * 5000, " a < b <to", "\n\n"):
        assert read(text, AnswerSyntax(name)) == {"role": "assistant", "content": text}
    assert read(ONE[name], AnswerSyntax(name), tools=None)["content"] == ONE[name], "no tools were offered"


LOOPS = {
    "qwen3_coder": ("<function=f>" + "<parameter=a>\n" * 50_000, " " * 500_000),
    "glm45": ("f" + "<arg_key>a</arg_key><arg_value>" * 30_000, " " * 500_000),
    "deepseekv3": (f"{V3[:18]}function<｜tool▁sep｜>f\n```json\n" * 20_000,),
    "deepseekv31": (f"{V31[:18]}f<｜tool▁sep｜>" * 30_000,),
    "deepseekv32": ('<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">' * 20_000,),
    "kimi_k2": ("<|tool_call_begin|>f<|tool_call_argument_begin|>" * 20_000,),
    "minimax-m2": (
        '<invoke name="f"><parameter name="a">' * 30_000,
        '<invoke name="f">' + '<parameter name="' * 50_000,
    ),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_model_that_repeats_itself_in_a_call_holds_up_nobody(name: str) -> None:
    start = next(text for text, _ in TOOL_CALLS[name].blocks)  # type: ignore[union-attr]
    for loop in LOOPS[name]:
        started = time.process_time()
        read(start + loop, AnswerSyntax(name))
        assert time.process_time() - started < 5


def test_an_argument_of_which_nothing_is_known_stays_text() -> None:
    assert calls_of(read(CODER, AnswerSyntax("qwen3_coder"), tools=[{}]))[0][1]["days"] == "3"
    assert calls_of(read(MINIMAX, AnswerSyntax("minimax-m2"), tools=[{}]))[0][1]["days"] == "3"
    assert calls_of(read(GLM, AnswerSyntax("glm45"), tools=[{}]))[0][1]["days"] == 3


THOUGHT = {"role": "assistant", "content": "Yes.", "reasoning_content": "Is it?\nIt is."}
THINKING = {name: thinking for name, thinking in REASONING.items() if thinking is not None and not thinking.kept}


@pytest.mark.parametrize("name", THINKING)
def test_reasoning_is_kept_apart_whoever_opens_it(name: str) -> None:
    opening, closing = THINKING[name].open, THINKING[name].close
    text = f"\nIs it?\nIt is.\n{closing}\n\nYes."
    assert read(opening + text, AnswerSyntax(None, name)) == THOUGHT
    assert read(text, AnswerSyntax(None, name), prompt=f"assistant\n{opening}\n") == THOUGHT
    cut = {"role": "assistant", "content": "", "reasoning_content": "Is"}
    assert read(f"{opening}\nIs", AnswerSyntax(None, name)) == cut
    if THINKING[name].begins:
        assert read(text, AnswerSyntax(None, name)) == THOUGHT
    else:
        assert read("Yes.", AnswerSyntax(None, name)) == {"role": "assistant", "content": "Yes."}


def test_reasoning_of_minimax_stays_in_the_content_with_the_mark_that_opened_it() -> None:
    syntax = AnswerSyntax("minimax-m2", "minimax-append-think")
    text = "Is it?\n</think>\n\nI ask."
    for cuts in ([], [3, 12]):
        message = read(f"{text}\n{MINIMAX}", syntax, prompt="]~b]ai\n<think>\n", cuts=cuts)
        assert message["content"] == f"<think>{text}" and calls_of(message) == [("weather", VALUES)]
        assert "reasoning_content" not in message
    assert read("Yes.", syntax, tools=None) == {"role": "assistant", "content": "<think>Yes."}


def test_channels_of_gpt_oss_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Is it?\nIt is.<|end|><|start|>assistant<|channel|>commentary<|message|>Wait. "
        "<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    )
    message = read(text, AnswerSyntax("gpt-oss", "gpt-oss"))
    assert message == THOUGHT | {"content": "Wait. Yes."}
    assert read("plain <b>", AnswerSyntax("gpt-oss"))["content"] == "plain <b>"
    with pytest.raises(InvalidSetting, match="--sglang-tool-call-parser qwen and --sglang-reasoning-parser gpt-oss"):
        AnswerSyntax("qwen", "gpt-oss").check("no such parser")


@st.composite
def answers(draw: st.DrawFn) -> tuple[AnswerSyntax, str, list[int]]:
    """A syntax, a text made of its marks and of others, and places at which it is cut."""
    tool_calls = draw(st.sampled_from(sorted(ONE)))
    reasoning = (
        tool_calls
        if tool_calls == "gpt-oss"
        else draw(st.sampled_from([None, "minimax-append-think", *sorted(THINKING)]))
    )
    thinking = REASONING.get(reasoning or "")
    marks = [ONE[tool_calls], TWO.get(tool_calls, ""), ONE["qwen"][:20], "text", " ", "\n", "<", "|>", "\n\n x"]
    marks += [thinking.open, thinking.close, thinking.close[:4]] if thinking else ["<|end|>", "<|message|>"]
    text = "".join(draw(st.lists(st.sampled_from(marks), max_size=7)))
    cuts = sorted(draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return AnswerSyntax(tool_calls, reasoning), text, cuts


@settings(deadline=None, max_examples=300)
@given(answers())
def test_where_a_text_is_cut_changes_nothing(made: tuple[AnswerSyntax, str, list[int]]) -> None:
    syntax, text, cuts = made
    assert read(text, syntax, cuts=cuts) == read(text, syntax)


class Bytes:
    """A token a byte; 0 is special."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return bytes(i for i in ids if i or not skip_special_tokens).decode(errors="replace")


def test_bytes_that_are_no_text_cost_no_more_than_others() -> None:
    class Counting(Bytes):
        decoded = 0

        def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
            self.decoded += len(ids)
            return super().decode(ids, skip_special_tokens)

    for wrong in (b"\x80", b"\xf0\x9f", b"\xe2\x82", b"ab\xf0"):
        ids, tokenizer = list(wrong * 500), Counting()
        stream = TextStream(tokenizer)
        told = [stream.feed([i]) for i in ids]
        assert "".join(told) + stream.finish({"type": "length"}) == bytes(ids).decode(errors="replace")
        assert tokenizer.decoded < 30 * len(ids)


@settings(deadline=None)
@given(st.text("aé😀x", max_size=12), st.lists(st.integers(0, 30)), st.sampled_from([(), ("x",), ("éx", "aa")]))
def test_tokens_become_the_same_text_however_they_arrive(text: str, cuts: list[int], stops: tuple[str, ...]) -> None:
    ids = list(text.encode())
    stream, told = TextStream(Bytes(), stops=stops, end_ids=[0]), ""
    ends = sorted({*cuts, len(ids)})
    for start, end in zip([0, *ends], ends, strict=False):
        told += stream.feed(ids[start:end])
        assert text.startswith(told)
    assert told + stream.finish({"type": "length"}) == text


def test_the_text_that_ends_an_answer_is_never_told() -> None:
    stream = TextStream(Bytes(), skip_special_tokens=False, stops=["END"], end_ids=[0])
    assert [stream.feed([i]) for i in b"oEn E"] == ["o", "", "En", " ", ""]
    assert stream.feed(list(b"NDx")) == "" and stream.finish({"type": "stop", "matched": "END"}) == ""
    ignored = TextStream(Bytes(), stops=["END"])
    assert ignored.feed(list(b"a END b")) + ignored.finish({"type": "length"}) == "a END b"
    ended = TextStream(Bytes(), skip_special_tokens=False, end_ids=[0])
    assert ended.feed([*b"ok", 0]) + ended.finish({"type": "stop", "matched": 0}) == "ok"
    going = TextStream(Bytes(), skip_special_tokens=False, end_ids=[0])
    assert going.feed([*b"ok", 0]) + going.feed(b"x") + going.finish({"type": "length"}) == "ok\0x"
