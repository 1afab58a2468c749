"""Answers from any server that speaks OpenAI's HTTP protocol, for `slime-rollout generate --openai-url`.

Such a server takes text and answers with text. The tokens of a sample are what the tokenizer of `--hf-checkpoint` makes
of it, and there are no log-probs.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from slime.rollout.engines.http import EngineHTTP
from slime.rollout.engines.keys import read_key
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import EngineError, InvalidSetting, SlimeError, Unauthenticated, counted
from slime.types.wire.json_fields import is_utf8

log = logging.getLogger(__name__)
FLAG = "--openai-url"
KEY_FLAG = "--openai-api-key-file"
KEY_VARIABLE = "OPENAI_API_KEY"
# The answers of a server that is busy, or is started again behind its proxy.
BUSY = (429, 500, 502, 503, 504)
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 30.0
ATTEMPTS = 8
# Answers that did not end by themselves: a filter has taken away all of one, or the rest of it.
ENDS = {"length": Sample.Status.TRUNCATED, "content_filter": Sample.Status.FAILED}
# Characters: vocabularies have tokens of 128 spaces, or of as many hyphens.
LONGEST_TOKEN = 1024
# Settings of engines, which a server of somebody else does not have, and of functions that generate in its place.
ENGINE_SETTINGS = (
    "deterministic", "custom_generate_function_path", "custom_agent_path", "rollout_external_engine_addrs",
    "rollout_engine_api_key_file", "rollout_engine", "rollout_num_engines", "rollout_num_gpus",
    "rollout_num_gpus_per_engine", "sglang_args", "sglang_config", "prefill_num_servers",
)  # fmt: skip
LOST = (
    f"{FLAG}: the answers are text. Their tokens are what the tokenizer of --hf-checkpoint makes of it, and they have "
    "no log-probs: they can be scored, read and used for fine-tuning; training that compares with the log-probs of "
    "the engine, and replays of a rollout, need samples of an SGLang or embedded engine."
)


@dataclass(frozen=True)
class OpenAIAddress:
    """A model at a server. url: its base, which ends in /v1 as a rule. api_key_file: else $OPENAI_API_KEY is sent."""

    url: str
    model: str
    api_key_file: str | None = None

    def __post_init__(self) -> None:
        """Raises InvalidSetting."""
        try:
            parts = urlsplit(self.url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
            whole = whole and parts.username is None and (parts.port is None or parts.port > 0)
        except ValueError:
            whole = False
        if not whole:
            raise InvalidSetting.must_be(
                FLAG, "the base of the server's paths, such as http://HOST:PORT/v1", got=self.url
            )


def check_settings(settings: RolloutSettings) -> None:
    """Raises InvalidSetting for a setting of engines, which would have no effect."""
    defaults = {field.name: field for field in fields(settings)}
    for name in ENGINE_SETTINGS:
        value, field = getattr(settings, name), defaults[name]
        if value and value != field.default:
            flag = "--sglang-*" if name == "sglang_args" else f"--{name.replace('_', '-')}"
            raise InvalidSetting.conflict(FLAG, flag, "that server answers in place of engines and functions")


class OpenAIServer(EngineHTTP):
    """Generates responses at a server. Chats go to /chat/completions, text prompts to /completions."""

    def __init__(self, address: OpenAIAddress, timeout_seconds: float) -> None:
        key = read_key(address.api_key_file, KEY_FLAG) if address.api_key_file else os.environ.get(KEY_VARIABLE)
        super().__init__(address.url, FLAG, timeout_seconds=timeout_seconds, api_key=key or None)
        self._model = address.model
        self._is_busy = False

    async def generate(self, args: RolloutArgs, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
        """Generates the response of `sample`, as text, in place. Raises what `EngineHTTP` raises, naming the prompt."""
        body: dict[str, Any] = {
            "model": self._model, "temperature": sampling_params["temperature"], "top_p": sampling_params["top_p"],
            "max_tokens": sampling_params["max_new_tokens"],
        }  # fmt: skip
        body |= {name: sampling_params[name] for name in ("stop", "stop_token_ids") if sampling_params.get(name)}
        # Beyond OpenAI's protocol, as the next ones: vLLM and SGLang take them. Sent only where the user set them.
        if sampling_params.get("top_k", -1) > 0:
            body["top_k"] = sampling_params["top_k"]
        messages = getattr(sample, "prompt_messages", None) or sample.prompt
        if not isinstance(messages, str) and args.apply_chat_template_kwargs:
            body["chat_template_kwargs"] = args.apply_chat_template_kwargs
        path, asked = ("/completions", "prompt") if isinstance(messages, str) else ("/chat/completions", "messages")
        try:
            answer = await self._patiently(path, body | {asked: messages})
            sample.response, finished = _answer(answer, body["max_tokens"])
        except SlimeError as error:
            raise error.restore(
                f"prompt {sample.group_index}, counted from 0: {error.message}",
                field=error.field, value=error.value, expected=error.expected,
            ) from error  # fmt: skip
        sample.status = ENDS.get(finished, Sample.Status.COMPLETED)
        return sample

    async def _patiently(self, path: str, body: dict[str, Any]) -> Any:
        """Posts, and posts again while the server is busy."""
        wait = FIRST_WAIT_SECONDS
        for attempt in range(ATTEMPTS):
            try:
                answer = await self.post(path, body, repeatable=True)
                self._is_busy = False
                return answer
            except EngineError as error:
                if error.value not in map(str, BUSY) or attempt == ATTEMPTS - 1:
                    raise
                if not self._is_busy:
                    # Other prompts wait for the same server.
                    times = counted(ATTEMPTS - 1, "time")
                    log.warning("%s; retrying up to %s, 1 to 30 s apart", error, times)
                self._is_busy = True
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_WAIT_SECONDS)

    def _refusal(self, method: str, path: str, status: int, body: bytes) -> SlimeError:
        error = super()._refusal(method, path, status, body)
        if status == 401:
            message = f"{self.url} answered {method} {path} with 401: name the file of its key by {KEY_FLAG}, or set "
            return Unauthenticated(f"{message}{KEY_VARIABLE}", field=KEY_FLAG, expected="the API key of the server")
        # These can be retried, so they are no refusals.
        return EngineError(str(error), field=FLAG, value=status) if status in BUSY else error


def _answer(answer: Any, max_tokens: int) -> tuple[str, str]:
    """Returns (text, finish reason) of the first choice. Raises EngineError, also for a text that cannot be one of
    `max_tokens` tokens: a tokenizer takes minutes for 50 MB."""
    try:
        choice = answer["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        if not isinstance(text, str | None):
            raise TypeError
        text, finished = text or "", str(choice.get("finish_reason"))
    except (KeyError, IndexError, TypeError, AttributeError):
        raise EngineError(
            f"{FLAG}: the server answered without choices[0].message.content: {str(answer)[:200]}", field=FLAG
        ) from None
    if not is_utf8(text):
        raise EngineError(f"{FLAG}: the server answered with text that is not Unicode", field=FLAG)
    if len(text) > max_tokens * LONGEST_TOKEN:
        size = f"{len(text):,} characters for {counted(max_tokens, 'token')}"
        raise EngineError(f"{FLAG}: the server answered with {size}", field=FLAG)
    return text, finished
