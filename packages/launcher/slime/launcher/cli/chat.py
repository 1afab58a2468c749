"""`slime chat MODEL`: talks to a model in the terminal."""

from __future__ import annotations

import http.client
import json
import shlex
import sys
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from slime.launcher.cli.recorded_run import is_run, read_run
from slime.launcher.config.help import CommandParser
from slime.launcher.run_directory.checkpoints import held
from slime.rollout.engines.registry import KINDS
from slime.types.errors import ConfigError, EngineError, InvalidSetting, SlimeError
from slime.types.settings import build

# Tokens of an answer of a model that comes from no run.
MOST_TOKENS = 512
MOST_TEMPERATURE = 100
# Longest wait for the next piece of an answer: a large model on a CPU reads a long message for minutes.
PIECE_SECONDS = 3600.0


def parser(command: str) -> CommandParser:
    reader = CommandParser(
        prog="slime chat",
        description="Talks to the model of a run, a Hugging Face directory or a model on the Hub. Ctrl-C ends an "
        "answer and, at the prompt, the chat; /new forgets the conversation. A model without a chat template "
        "continues the text. With a pipe as input, its text is one message: echo 2+2? | slime chat RUN",
    )
    reader.add_argument("model", metavar="RUN|MODEL", help="Output directory of a run, model directory, or ORG/NAME")
    reader.add_argument("--system", metavar="TEXT", help="System message (default: none)")
    reader.add_argument("--temperature", type=float, default=1.0, metavar="X", help="Sampling temperature; 0 is greedy")
    reader.add_argument(
        "--max-tokens", type=int, metavar="N",
        help=f"Maximum tokens per answer (default: the run's --rollout-max-response-len; {MOST_TOKENS} for a model)",
    )  # fmt: skip
    reader.add_argument("--engine", choices=tuple(KINDS), default="embedded", help="Engine to start")
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    from slime.rollout.prompts.tokenizer import has_chat_template

    try:
        options = parser(command).parse_strict(argv)
        if not 0 <= options.temperature <= MOST_TEMPERATURE:
            raise InvalidSetting.must_be("--temperature", f"from 0 to {MOST_TEMPERATURE}", got=options.temperature)
        if options.max_tokens is not None and options.max_tokens < 1:
            raise InvalidSetting.must_be("--max-tokens", "at least 1", got=options.max_tokens)
        max_tokens = options.max_tokens or most_tokens(Path(options.model))
        with held(lambda: Path(model_directory(options.model))) as found:
            directory = str(found)
            if options.system is not None and not has_chat_template(directory):
                raise InvalidSetting.requires("--system", "a model with a chat template")
            typed = None if sys.stdin is not None and sys.stdin.isatty() else _read_message()
            with engine(directory, options.engine) as conversation:
                conversation.params = {"temperature": options.temperature, "max_tokens": max_tokens}
                conversation.warn_unknown(options.system or "")
                conversation.start(options.system)
                if typed is None:
                    talk(conversation)
                else:
                    say(conversation, typed)
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:
        return 0
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _read_message() -> str:
    """Reads a message from the pipe at standard input. Raises InvalidSetting if it is empty or not text."""
    try:
        text = sys.stdin.buffer.read().decode().strip() if sys.stdin is not None else ""
    except UnicodeDecodeError as error:
        raise InvalidSetting.must_be("the input", "UTF-8 text", got=str(error)) from None
    if not text:
        raise InvalidSetting.required("a message", "the input is empty")
    return text


def most_tokens(path: Path) -> int:
    """Returns how many tokens an answer may have: as many as in the run at `path`, if there is one."""
    limit = read_run(path).settings.get("rollout_max_response_len") if is_run(path) else None
    return limit if isinstance(limit, int) and limit > 0 else MOST_TOKENS


def model_directory(text: str, name: str = "RUN|MODEL") -> str:
    """Returns the directory of the model, which has a config.json, a tokenizer and weights.

    text: a run, a model directory or ORG/NAME. name: the argument that errors name. Raises MissingFile, InvalidFile
    for a model without tokenizer or weights, and InvalidSetting for a checkpoint in another format.
    """
    from slime.launcher.cli.export import model_of
    from slime.launcher.config.checks.run import check_model
    from slime.launcher.hub.fetch import local_model

    path = Path(local_model(text, "MODEL"))
    model_path, _ = model_of(path, name=name)
    if not (model_path / "config.json").is_file():
        raise InvalidSetting(
            f"MODEL {path}: {model_path} is a Megatron checkpoint; `slime export {shlex.quote(str(path))}` converts it",
            field="MODEL", value=text, expected="a Hugging Face directory",
        )  # fmt: skip
    check_model(name, model_path, tokenizer=True, weights=True)
    return str(model_path)


class Conversation:
    """The messages so far, and the engine that answers. params: sampling parameters by OpenAI's names."""

    def __init__(self, url: str, api_key: str | None, directory: str, *, has_template: bool) -> None:
        self.params: dict[str, Any] = {}
        self._directory = directory
        self._url = url
        self._headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {api_key}"} if api_key else {}
        )
        self._has_template = has_template
        self._system: str | None = None
        self._messages: list[dict[str, str]] = []

    def start(self, system: str | None = None) -> None:
        """Starts anew with only the system message, which only a model with a chat template reads."""
        self._system = system if system is not None else self._system
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def warn_unknown(self, text: str) -> None:
        """Says which characters of a message the model does not see, since its tokenizer lacks them."""
        from slime.rollout.prompts.tokenizer import no_tokens, unknown_characters

        if unknown := unknown_characters(self._directory, text):
            print(f"slime: warning: the tokenizer {no_tokens(unknown)}", file=sys.stderr, flush=True)

    def answer(self, text: str) -> Generator[str, None, None]:
        """Yields an answer piece by piece. Adds `text` and the answer to the messages; if the caller stops early, the
        pieces so far."""
        if not self._has_template:
            yield from self._pieces("/v1/completions", {"prompt": text})
            return
        self._messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self._pieces("/v1/chat/completions", {"messages": self._messages}):
                pieces.append(piece)
                yield piece
        finally:
            self._messages.append({"role": "assistant", "content": "".join(pieces)})

    def _pieces(self, path: str, body: dict[str, Any]) -> Iterator[str]:
        content = json.dumps(body | self.params | {"stream": True, "model": "default"}).encode()
        request = urllib.request.Request(self._url + path, content, self._headers)
        # A proxy cannot reach our loopback interface.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=PIECE_SECONDS) as response:
                for line in response:
                    event = line.decode().strip().removeprefix("data: ")
                    if not event or event == "[DONE]":
                        continue
                    found = json.loads(event)
                    if "error" in found:
                        raise EngineError(str(found["error"].get("message", found["error"])))
                    for choice in found["choices"]:
                        yield choice.get("delta", choice).get("content" if "delta" in choice else "text") or ""
        except urllib.error.HTTPError as error:
            raise EngineError(f"the engine refused this: {error.read().decode(errors='replace')[:500]}") from None
        except (OSError, http.client.HTTPException, ValueError) as error:  # the last two: the answer was cut off
            raise EngineError(f"the engine does not answer: {error}") from None


@contextmanager
def engine(directory: str, kind: str) -> Iterator[Conversation]:
    """Starts an engine for a conversation, and stops it at the end of the block."""
    from slime.rollout.engines.gpus import visible_gpus
    from slime.rollout.engines.process import stop_all
    from slime.rollout.launch import start_engines
    from slime.rollout.prompts.tokenizer import has_chat_template
    from slime.rollout.settings.rollout import RolloutSettings

    values: dict[str, Any] = {"hf_checkpoint": directory, "rollout_engine": kind}
    if visible_gpus():
        values["rollout_num_gpus"] = 1
    if sys.stderr.isatty():
        print(f"loading {directory} ...", file=sys.stderr)
    engines = start_engines(build(RolloutSettings, values))
    try:
        (running,) = engines
        yield Conversation(running.url, running.api_key, directory, has_template=has_chat_template(directory))
    finally:
        stop_all(engines)


def talk(conversation: Conversation) -> None:
    """Reads messages from the terminal until end of file, or Ctrl-C at the prompt."""
    try:
        import readline  # noqa: F401  (input() then edits the line and remembers earlier ones)
    except ImportError:
        pass
    while True:
        try:
            text = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if text == "/new":
            conversation.start()
        elif text:
            say(conversation, text)


def say(conversation: Conversation, text: str) -> None:
    """Prints the answer as it arrives. On a terminal Ctrl-C ends it."""
    conversation.warn_unknown(text)
    try:
        with closing(conversation.answer(text)) as pieces:
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
    print(flush=True)
