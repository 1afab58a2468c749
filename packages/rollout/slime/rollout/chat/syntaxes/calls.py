"""Blocks of tool calls as the families write them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from slime.rollout.chat.pieces import ToolCall
from slime.rollout.chat.syntaxes.base import JSON, CallSyntax, dump, load_object, typed


def _call_of(value: JSON | None) -> ToolCall | None:
    """{"name": ..., "arguments": {...}}; Llama calls the arguments parameters."""
    if value is None or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return ToolCall(value["name"], arguments if isinstance(arguments, str) else dump(arguments))


def _json(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    call = _call_of(load_object(block))
    return [call] if call else None


def _llama(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """Reads one object, or several with a semicolon between them."""
    whole = _json(block, schemas)
    if whole:
        return whole
    calls = [_call_of(load_object(part)) for part in re.split(r"(?<=\})\s*;\s*(?=\{)", block.strip())]
    return None if not all(calls) else [call for call in calls if call]


_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _coder(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """<function=NAME><parameter=KEY>VALUE</parameter></function>"""
    calls = []
    for name, body in _FUNCTION.findall(block):
        known = schemas.get(name.strip(), {})
        # A text of which nothing says that it is JSON stays one.
        values = {
            key.strip(): typed(value, known.get(key.strip(), {"type": "string"}))
            for key, value in _PARAMETER.findall(body)
        }
        calls.append(ToolCall(name.strip(), dump(values)))
    return calls or None


_ARGUMENT = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_GLM_NAME = re.compile(r"\s*([\w.:-]+)\s*(?=<arg_key>|\Z)")


def _glm(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>"""
    match = _GLM_NAME.match(block)
    if match is None:
        return None
    known = schemas.get(match[1], {})
    values = {key.strip(): typed(value, known.get(key.strip())) for key, value in _ARGUMENT.findall(block)}
    return [ToolCall(match[1], dump(values))]


_V3 = re.compile(
    r"<｜tool▁call▁begin｜>\w+<｜tool▁sep｜>([^\n]+)\n```json\n(.*?)\n```\s*(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL
)
_V31 = re.compile(r"<｜tool▁call▁begin｜>([^<\n]+)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
_KIMI = re.compile(
    r"<\|tool_call_begin\|>\s*([^<\s]+)\s*<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.DOTALL
)


def _named_json(pattern: re.Pattern[str]) -> Any:
    """Parses blocks of names with JSON arguments behind them."""

    def parse(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
        found = [(name.strip(), arguments.strip()) for name, arguments in pattern.findall(block)]
        if not all(load_object(arguments) is not None for _, arguments in found):
            return None
        return [_numbered(name, arguments) for name, arguments in found] or None

    return parse


_NUMBERED = re.compile(r"functions\.(.+):\d+")


def _numbered(name: str, arguments: str) -> ToolCall:
    """Kimi names a call functions.NAME:INDEX, and its template expects that as the id of the call."""
    match = _NUMBERED.fullmatch(name)
    return ToolCall(match[1], arguments, name) if match else ToolCall(name, arguments)


_INVOKE = re.compile(r'<｜DSML｜invoke name="([^"]+)">(.*?)</｜DSML｜invoke>', re.DOTALL)
_DSML = re.compile(
    r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', re.DOTALL
)  # fmt: skip


def _dsml(block: str, schemas: Mapping[str, JSON]) -> Sequence[ToolCall] | None:
    """<｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true">VALUE</｜DSML｜parameter>"""
    calls = []
    for name, body in _INVOKE.findall(block):
        values = {key: typed(value, {"type": "string"} if text == "true" else None) for key, text, value in
                  _DSML.findall(body)}  # fmt: skip
        calls.append(ToolCall(name, dump(values)))
    return calls or None


_TAGS = (("<tool_call>", "</tool_call>"),)
_DEEPSEEK = (("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),)
QWEN = CallSyntax(_TAGS, _json)
QWEN3_CODER = CallSyntax(_TAGS, _coder)
GLM = CallSyntax(_TAGS, _glm)
DEEPSEEK_V3 = CallSyntax(_DEEPSEEK, _named_json(_V3), special=True)
DEEPSEEK_V31 = CallSyntax(_DEEPSEEK, _named_json(_V31), special=True)
DEEPSEEK_V32 = CallSyntax((("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),), _dsml)
KIMI_K2 = CallSyntax(
    (("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),), _named_json(_KIMI), special=True
)
LLAMA3 = CallSyntax((("<|python_tag|>", ""),), _llama, special=True, bare=True)
