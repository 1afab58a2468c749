"""A tokenizer of ChatML, an engine that says its lines, and a client of the gateway."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from rollout_fakes import FakeEngine

from slime.rollout.agents.gateway import Gateway
from slime.rollout.agents.merge import merge_turns
from slime.rollout.agents.sessions import Session
from slime.types import Sample

END = 3
TEMPLATE_START, TEMPLATE_END = "<|im_start|>", "<|im_end|>"


class Letters:
    """ChatML, a token a letter; the end of a message is one token, and so is its start."""

    eos_token = TEMPLATE_END
    chat_template = "chatml"
    all_special_ids = (2, END)
    all_special_tokens = (TEMPLATE_START, TEMPLATE_END)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(c) for c in text.replace(TEMPLATE_START, "\x02").replace(TEMPLATE_END, chr(END))]

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        text = "".join(map(chr, ids))
        start, end = ("", "") if skip_special_tokens else (TEMPLATE_START, TEMPLATE_END)
        return text.replace("\x02", start).replace(chr(END), end)

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
        text = f"tools {json.dumps(tools)}\n" if tools else ""
        for message in messages:
            calls = "".join(
                f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in message.get("tool_calls", ())
            )
            text += f"{TEMPLATE_START}{message['role']}\n{message['content']}{calls}{TEMPLATE_END}\n"
        return text + f"{TEMPLATE_START}assistant\n"


class Speaker(FakeEngine):
    """Says its lines in turn, each with log-probs -1, -2, ...; one that does not fit is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def _output(self, prompt: list[int], params: dict[str, Any], aborted: bool) -> dict[str, Any]:
        ids = [*map(ord, self.lines.pop(0)), END][: params["max_new_tokens"]]
        kind = "abort" if aborted else "stop" if ids[-1] == END else "length"
        pairs = [[-float(i), token, None] for i, token in enumerate(ids, start=1)]
        meta = {"finish_reason": {"type": kind}, "weight_version": "4", "output_token_logprobs": pairs}
        return {"output_ids": ids, "meta_info": meta}


class Client:
    def __init__(self, gateway: Gateway, session: Session, base_url: str) -> None:
        self.gateway, self.session, self.base_url = gateway, session, base_url

    def call(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Status and body; the body as text where it is not JSON."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        request = urllib.request.Request(self.base_url + path, data, sent)
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                status, content = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        try:
            return status, json.loads(content)
        except ValueError:
            return status, content.decode()

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        status, answer = self.call("/chat/completions", {"messages": messages, "model": "m"} | more)
        assert status == 200, answer
        return answer

    def samples(self) -> list[Sample]:
        decode = self.gateway.state.tokenizer.decode
        return merge_turns(self.session.turns, Sample(index=7, group_index=1), decode)
