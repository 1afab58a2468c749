"""`slime-rollout generate --openai-url`: prompts that a server with OpenAI's protocol answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.cli import main
from slime.rollout.generate import openai_server


class TextServer:
    """Answers with digits backwards. statuses: of the first answers, in place of 200; bodies: what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.statuses: list[int] = []
        self.answer: Callable[[str], Any] | None = None
        self.port = 0

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._respond)
        app.router.add_post("/v1/completions", self._respond)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _respond(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization"))
        if self.statuses:
            return web.json_response({"error": {"message": "not now"}}, status=self.statuses.pop(0))
        chat = "messages" in body
        text = (body["messages"][-1]["content"] if chat else body["prompt"]).strip(">")[::-1]
        if self.answer is not None:
            return web.json_response(self.answer(text))
        reason = "length" if len(text) > body["max_tokens"] else "stop"
        content = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        return web.json_response({"choices": [{"index": 0, "finish_reason": reason, **content}]})


@pytest.fixture
def server() -> Iterator[TextServer]:
    loop, found = LoopThread(), TextServer()
    loop.run(found.start())
    try:
        yield found
    finally:
        loop.run(found.stop())
        loop.stop()


Generate = Callable[..., tuple[int, Path]]


@pytest.fixture
def generate(checkpoint: Path, server: TextServer, tmp_path: Path) -> Generate:
    def run(*flags: str, prompts: tuple[str, ...] = ("12>", "345>")) -> tuple[int, Path]:
        file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        file.write_text("".join(json.dumps({"input": text, "label": text[-2::-1]}) + "\n" for text in prompts))
        words = f"--hf-checkpoint {checkpoint} --prompts {file} --output {output} --rm-type exact_partial "
        words += f"--openai-url http://127.0.0.1:{server.port}/v1 --openai-model m --rollout-max-response-len 8"
        return main(["generate", *words.split(), *flags]), output

    return run


def test_texts_of_the_server_become_scored_samples(
    generate: Generate, server: TextServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = generate("--n-samples-per-prompt", "2", "--rollout-stop", "x", "--rollout-top-k", "5")
    told = capsys.readouterr()
    assert code == 0 and "no log-probs" in told.err and json.loads(told.out)["rollout/raw_reward"] == 1.0
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert [s["response"] for s in samples] == ["21", "21", "543", "543"]
    first = samples[0]
    assert first["status"] == "completed" and first["response_length"] == 2 and first["tokens"] == [3, 4, 12, 4, 3]
    assert first["rollout_log_probs"] is None
    assert server.bodies[0] == {
        "model": "m", "temperature": 1.0, "top_p": 1.0, "max_tokens": 8, "stop": ["x"], "top_k": 5, "prompt": "12>",
    }  # fmt: skip


def test_chats_go_to_the_chat_address_as_messages(
    generate: Generate, server: TextServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    code, output = generate("--apply-chat-template", "--rollout-max-response-len", "2", prompts=("12", "345"))
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert code == 0 and [s["status"] for s in samples] == ["completed", "truncated"]
    # The server renders the messages for its model, and the sample has the prompt as the tokenizer renders it.
    assert samples[0]["prompt"] == "12>"
    assert sorted(body["messages"][0]["content"] for body in server.bodies) == ["12", "345"]
    assert server.bodies[0]["messages"][0]["role"] == "user" and server.keys == ["Bearer secret"] * 2


def test_an_empty_answer_is_a_sample_without_tokens(generate: Generate, server: TextServer) -> None:
    server.answer = lambda _: {"choices": [{"finish_reason": "stop", "message": {"content": None}}]}
    code, output = generate(prompts=("12>",))
    (sample,) = map(json.loads, output.read_text().splitlines())
    assert code == 0 and (sample["response"], sample["response_length"], sample["reward"]) == ("", 0, 0.0)


@pytest.mark.parametrize(
    ("reason", "status"), [("length", "truncated"), ("content_filter", "failed"), ({"type": "x"}, "completed")]
)
def test_an_answer_that_did_not_end_by_itself_says_so(
    generate: Generate, server: TextServer, reason: Any, status: str
) -> None:
    server.answer = lambda _: {"choices": [{"finish_reason": reason, "text": "1"}]}
    code, output = generate(prompts=("12>",))
    (sample,) = map(json.loads, output.read_text().splitlines())
    assert code == 0 and (sample["response"], sample["status"]) == ("1", status)


def test_a_busy_server_is_asked_again_and_told_of_once(
    generate: Generate, server: TextServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(openai_server, "FIRST_WAIT_SECONDS", 0.0)
    server.statuses = [429, 503]
    code, output = generate(prompts=("12>",))
    assert code == 0 and len(server.bodies) == 3 and output.is_file()
    (told,) = [message for message in caplog.messages if "retrying" in message]
    assert "with 429: not now; retrying up to 7 times" in told


def test_a_server_that_stays_busy_ends_the_command_and_the_same_command_goes_on(
    generate: Generate, server: TextServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(openai_server, "FIRST_WAIT_SECONDS", 0.0)
    server.statuses = [503] * openai_server.ATTEMPTS
    assert generate(prompts=("12>",))[0] == 1
    assert "with 503: not now" in capsys.readouterr().err
    code, _ = generate(prompts=("12>",))
    assert code == 0


@pytest.mark.parametrize(
    ("status", "message"),
    [(401, "--openai-api-key-file, or set OPENAI_API_KEY"), (404, "answered POST /completions with 404: not now")],
)
def test_a_refusal_is_told(
    generate: Generate, server: TextServer, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.statuses = [status]
    assert generate(prompts=("12>",))[0] in (1, 2)
    assert message in capsys.readouterr().err and len(server.bodies) == 1


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": {"content": 3}}]}, [1], "x"])
def test_an_answer_of_another_form_is_told(
    generate: Generate, server: TextServer, answer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda _: answer
    assert generate(prompts=("12>",))[0] == 1
    assert "answered without choices[0].message.content" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answer", "told"), [("\ud83d", "text that is not Unicode"), ("1" * 8193, "8,193 characters for 8 tokens")]
)
def test_text_that_is_no_answer_is_told_with_its_prompt(
    generate: Generate, server: TextServer, answer: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda text: {"choices": [{"text": answer if text == "543" else text}]}
    assert generate()[0] == 1
    assert f"prompt 1, counted from 0: --openai-url: the server answered with {told}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--deterministic", "--openai-url and --deterministic cannot be used together"),
        ("--rollout-num-engines 2", "--openai-url and --rollout-num-engines cannot be used together"),
        ("--openai-url 127.0.0.1:8000", "--openai-url must be the base of the server's paths"),
        ("--openai-url http://h:99999/v1", "--openai-url must be the base of the server's paths"),
        ("--openai-url http://me:secret@h/v1", "--openai-url must be the base of the server's paths"),
        ("--openai-api-key-file nowhere", "--openai-api-key-file"),
    ],
)
def test_settings_that_have_no_effect_are_refused(
    generate: Generate, server: TextServer, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(*flags.split())[0] == 2
    assert message in capsys.readouterr().err and not server.bodies


def test_the_url_needs_the_name_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    base = "generate --hf-checkpoint x --prompts y --output z".split()
    assert main([*base, "--openai-url", "http://h/v1"]) == 2
    assert "--openai-url requires --openai-model NAME" in capsys.readouterr().err
    assert main([*base, "--openai-model", "m"]) == 2
    assert "--openai-model requires --openai-url URL" in capsys.readouterr().err
