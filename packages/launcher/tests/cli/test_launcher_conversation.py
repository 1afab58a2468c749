"""Conversations of `slime chat` with an engine; test_launcher_projects.py has its arguments, tests/e2e whole chats."""

from __future__ import annotations

import io
import socket
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from slime.launcher import cli
from slime.launcher.cli.chat import Conversation
from slime.launcher.tiny_model import write_model
from slime.types.errors import EngineError

NUM_GPUS = 0


def test_an_answer_that_the_engine_cuts_off_is_an_error_of_the_engine() -> None:
    class Engine(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b'80\r\ndata: {"choices": []}\n')
            self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        conversation = Conversation(f"http://127.0.0.1:{server.server_port}", None, "", has_template=False)
        with pytest.raises(EngineError, match="the engine does not answer: IncompleteRead"):
            list(conversation.answer("x"))


def test_an_engine_that_hangs_is_an_error_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.launcher.cli.chat.PIECE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        conversation = Conversation(f"http://127.0.0.1:{hanging.getsockname()[1]}", None, "", has_template=False)
        with pytest.raises(EngineError, match="the engine does not answer: timed out"):
            list(conversation.answer("x"))


def test_letters_without_a_token_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", "0123456789:", seed=0)
    conversation = Conversation("http://127.0.0.1:1", None, str(model), has_template=False)
    conversation.warn_unknown("12 7:")
    assert capsys.readouterr().err == ""
    conversation.warn_unknown("is 7\u00e9 is:")
    expected = "slime: warning: the tokenizer has no tokens for 'i', 's', '\u00e9': the model does not see them\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    ("words", "typed", "message"),
    [
        (["--temperature", "nan"], b"7:", "--temperature must be from 0 to 100, got nan"),
        (["--system", "Be brief."], b"7:", "--system requires a model with a chat template"),
        ([], b" \n", "a message is required: the input is empty"),
        ([], b"\xff", "the input must be UTF-8 text, got "),
    ],
)
def test_a_chat_that_cannot_be_is_refused_before_an_engine_starts(
    words: list[str],
    typed: bytes,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = write_model(tmp_path / "model", "0123456789:", seed=0)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(typed)))
    monkeypatch.setattr("slime.rollout.launch.start_engines", None)
    assert cli.main(["chat", str(model), *words]) == 2
    assert message in capsys.readouterr().err
