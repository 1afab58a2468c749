"""`slime-rollout generate` with prompts that cannot be used, and with plug-ins that raise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.cli import main

Generate = Callable[..., tuple[int, Path]]


async def answer(request: web.Request) -> web.Response:
    await request.read()
    return web.json_response({"choices": [{"index": 0, "finish_reason": "stop", "text": "21"}]})


@pytest.fixture
def generate(checkpoint: Path, tmp_path: Path) -> Iterator[Generate]:
    app = web.Application()
    app.router.add_post("/v1/completions", answer)
    runner, loop = web.AppRunner(app), LoopThread()
    loop.run(runner.setup())
    loop.run(web.TCPSite(runner, "127.0.0.1", 0).start())

    def run(prompts: list[str], *flags: str) -> tuple[int, Path]:
        file, output = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        file.write_text("".join(json.dumps({"input": text, "label": "21"}) + "\n" for text in prompts))
        words = f"--hf-checkpoint {checkpoint} --prompts {file} --output {output} --rollout-max-prompt-len 4 "
        words += f"--openai-url http://127.0.0.1:{runner.addresses[0][1]}/v1 --openai-model m"
        return main(["generate", *words.split(), "--rollout-max-response-len", "8", *flags]), output

    yield run
    loop.run(runner.cleanup())
    loop.stop()


def test_the_other_prompts_are_answered(generate: Generate, capsys: pytest.CaptureFixture[str]) -> None:
    code, output = generate(["12>", "", "3456789>", "34>", ""], "--rm-type", "exact_partial")
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert [json.loads(line)["group_index"] for line in output.read_text().splitlines()] == [0, 3]
    assert "no answers to 3 of 5 prompts (1 prompt_too_long, 2 prompt_unusable)" in printed.err
    metrics = json.loads(printed.out)
    assert (metrics["rollout/prompt_too_long"], metrics["rollout/prompt_unusable"]) == (1, 2)


@pytest.mark.parametrize("prompts", [["", ""], ["3456789>"]])
def test_without_any_usable_prompt_nothing_is_written(
    generate: Generate, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, output = generate(prompts, "--rm-type", "exact_partial")
    assert code == 2 and not list(output.parent.glob("out*"))
    assert f"--prompts must be prompts that the model can read, got '{len(prompts)} of" in capsys.readouterr().err


def test_an_error_of_a_reward_is_one_line_with_its_place(
    generate: Generate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text("def reward(args, sample, **kwargs):\n    raise ValueError('boom')\n")
    code, _ = generate(["12>"], "--custom-rm-path", f"{tmp_path}/mine.py:reward")
    assert code == 1
    assert capsys.readouterr().err.endswith(
        "mine.py:reward raised ValueError: boom (mine.py, line 2, in reward) for sample 0\n"
    )
