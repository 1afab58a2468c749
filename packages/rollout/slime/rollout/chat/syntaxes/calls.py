"""Syntaxes of tool calls, one for each family of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from slime.rollout.chat.pieces import ToolCall
from slime.rollout.chat.syntaxes.base import JSON, CallSyntax, ParseBlock, dump, load_object, typed


def _call_of(value: JSON | None) -> ToolCall | None:
    """Reads {"name": ..., "arguments": {...}}; Llama names the arguments "parameters"."""
    if value is None or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else dump(arguments))


def _json(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    call = _call_of(load_object(block))
    return [call] if call else None


def _llama(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads one JSON object, or several separated by semicolons."""
    whole = _json(block, schemas)
    if whole:
        return whole
    calls = [_call_of(load_object(part)) for part in re.split(r"(?<=\})\s*;\s*(?=\{)", block.strip())]
    return None if not all(calls) else [call for call in calls if call]


def _enclosed(text: str, start: str, end: str, *, cut: bool = False) -> Iterator[str]:
    """Yields the text between each start mark and the next end mark; with `cut`, also after one that has no end.

    Runs in linear time: a model may write 100,000 start marks, for each of which a regular expression would scan the
    rest of the text.
    """
    place = text.find(start)
    while place >= 0:
        place += len(start)
        stop = text.find(end, place)
        if stop < 0:
            if cut:
                yield text[place:]
            return
        yield text[place:stop]
        place = text.find(start, stop + len(end))


def _coder(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads <function=NAME><parameter=KEY>VALUE</parameter></function>."""
    calls = []
    for function in _enclosed(block, "<function=", "</function>", cut=True):
        name, mark, body = function.partition(">")
        if not mark or not name or "\n" in name:
            continue
        known = schemas.get(name.strip(), {})
        values = {}
        for parameter in _enclosed(body, "<parameter=", "</parameter>"):
            key, mark, value = parameter.partition(">")
            if mark and key and "\n" not in key:
                value = value.removeprefix("\n").removesuffix("\n")
                # Without a schema the value is taken as text.
                values[key.strip()] = typed(value, known.get(key.strip(), {"type": "string"}))
        calls.append(ToolCall(name.strip(), dump(values)))
    return calls or None


_GLM_NAME = re.compile(r"\s*([\w.:-]+)\s*(?=<arg_key>|\Z)")


def _glm(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>."""
    match = _GLM_NAME.match(block)
    if match is None:
        return None
    known = schemas.get(match[1], {})
    values = {}
    for pair in _enclosed(block, "<arg_key>", "</arg_value>"):
        key, mark, value = pair.partition("</arg_key>")
        value = value.lstrip()
        if mark and value.startswith("<arg_value>"):
            values[key.strip()] = typed(value.removeprefix("<arg_value>"), known.get(key.strip()))
    return [ToolCall(match[1], dump(values))]


CALL_BEGIN, CALL_SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _v3(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads function<｜tool▁sep｜>NAME, followed by the arguments in a Markdown code block."""
    named_calls = []
    for call in _enclosed(block, CALL_BEGIN, CALL_END, cut=True):
        name, mark, arguments = call.partition(CALL_SEPARATOR)[2].partition("\n```json\n")
        arguments = arguments.rstrip()
        if mark and arguments.endswith("\n```"):
            named_calls.append((name, arguments.removesuffix("```")))
    return _named(named_calls)


def _named_json(begin: str, separator: str, end: str) -> ParseBlock:
    """Returns a parser of blocks in which each call is a name followed by JSON arguments."""

    def parse(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
        parts = [call.partition(separator) for call in _enclosed(block, begin, end)]
        return _named([(name, arguments) for name, mark, arguments in parts if mark])

    return parse


def _named(named_calls: Sequence[tuple[str, str]]) -> Sequence[ToolCall] | None:
    stripped = [(name.strip(), arguments.strip()) for name, arguments in named_calls]
    right = [name and not {"<", "\n"} & set(name) and load_object(text) is not None for name, text in stripped]
    return [_numbered(name, arguments) for name, arguments in stripped] if right and all(right) else None


_NUMBERED = re.compile(r"functions\.(.+):\d+")


def _numbered(name: str, arguments: str) -> ToolCall:
    """Returns a call. Kimi names calls functions.NAME:INDEX, which its template expects as the id of the call."""
    match = _NUMBERED.fullmatch(name)
    return ToolCall(match[1], arguments, name) if match else ToolCall(name, arguments)


def _dsml(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads <｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>."""
    calls = []
    for invoke in _enclosed(block, '<｜DSML｜invoke name="', "</｜DSML｜invoke>"):
        name, mark, body = invoke.partition('">')
        if not mark or not name or '"' in name:
            continue
        values = {}
        for parameter in _enclosed(body, '<｜DSML｜parameter name="', "</｜DSML｜parameter>"):
            head, _, value = parameter.partition('">')
            key, _, text = head.partition('" string="')
            if key and text in ("true", "false"):
                values[key] = typed(value, {"type": "string"} if text == "true" else None)
        calls.append(ToolCall(name, dump(values)))
    return calls or None


def _minimax(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads <invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>."""
    calls = []
    for invoke in _enclosed(block, '<invoke name="', "</invoke>"):
        name, mark, body = invoke.partition('">')
        if not mark or not name or {'"', "\n"} & set(name):
            continue
        known = schemas.get(name, {})
        values = {}
        for parameter in _enclosed(body, '<parameter name="', "</parameter>"):
            key, mark, value = parameter.partition('">')
            if mark and key and "\n" not in key:
                value = value.removeprefix("\n").removesuffix("\n")
                # Without a schema the value is taken as text.
                values[key] = typed(value, known.get(key, {"type": "string"}))
        calls.append(ToolCall(name, dump(values)))
    return calls or None


_TAGS = (("<tool_call>", "</tool_call>"),)
_DEEPSEEK = (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)
QWEN = CallSyntax(_TAGS, _json)
QWEN3_CODER = CallSyntax(_TAGS, _coder)
GLM = CallSyntax(_TAGS, _glm)
DEEPSEEK_V3 = CallSyntax(_DEEPSEEK, _v3, special=True)
DEEPSEEK_V31 = CallSyntax(_DEEPSEEK, _named_json(CALL_BEGIN, CALL_SEPARATOR, CALL_END), special=True)
DEEPSEEK_V32 = CallSyntax((("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),), _dsml)
KIMI_K2 = CallSyntax(
    (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
    _named_json("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    special=True,
)
# Kept also by a tokenizer for which the marks are special tokens.
MINIMAX_M2 = CallSyntax((("<minimax:tool_call>", "</minimax:tool_call>"),), _minimax, special=True)
LLAMA3 = CallSyntax((("<|python_tag|>", ""),), _llama, special=True, bare=True)
