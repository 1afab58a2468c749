"""Mistakes in a user's reward function: the error names the function, its file and line, and what was scored."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.rollout.rewards.score import score_group, score_sample
from slime.types import Sample
from slime.types.errors import InvalidField, PluginError, Unavailable
from slime.types.plugins import load_plugin

DEADLINE = 60


def score(path: str, *, group: bool = False, key: str | None = None) -> None:
    args = SimpleNamespace(
        custom_rm_path=path, rm_type=None, group_rm=group, reward_key=key, eval_reward_key=None, overlong_mask=False,
        overlong_buffer_len=None,
    )  # fmt: skip
    samples = [Sample(index=index, group_index=4, prompt="p", response="r") for index in (7, 8)]

    async def run() -> None:
        await asyncio.wait_for(score_group(args, samples) if group else score_sample(args, samples[0]), DEADLINE)

    asyncio.run(run())


def written(directory: Path, name: str, body: str, start: str = "def reward(args, sample):") -> str:
    file = directory / f"{name}.py"
    file.write_text(f"import asyncio, json, sys\n{start}\n    {body}\n")
    return f"{file}:reward"


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("text", "return 'good'", "returned 'good' for sample 7, expected a finite number"),
        ("none", "pass", "returned None for sample 7, expected a finite number"),
        ("nan", "return float('nan')", "returned nan for sample 7, expected a finite number"),
        ("large", "return 10**400", "0 for sample 7, expected a finite number"),
        ("many", "return [1.0]", "returned [1.0] for sample 7, expected a finite number"),
        ("dict", "return {'a': 1.0}", "for sample 7: a dict requires --reward-key NAME, the entry that is the reward"),
        ("unprintable", "return type('X', (), {'__repr__': lambda self: 1 / 0})()", "returned a X, whose repr raised"),
    ],
)
def test_a_wrong_value_names_where_the_function_is_defined(tmp_path: Path, name: str, body: str, message: str) -> None:
    path = written(tmp_path, name, body)
    with pytest.raises(InvalidField) as raised:
        score(path)
    text = str(raised.value)
    assert text.startswith(path) and message in text and text.endswith(f" ({name}.py, line 2)")


@pytest.mark.parametrize("start", ["def reward(args, sample):", "async def reward(args, sample):"])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", "ZeroDivisionError: division by zero"),
        ("return json.loads('x')", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("return next(iter([]))", "StopIteration"),
        ("sys.exit(3)", "SystemExit: 3"),
        ("raise TimeoutError", "TimeoutError"),
        ("raise asyncio.CancelledError", "CancelledError"),
        ("return reward(args)", "TypeError: reward() missing 1 required positional argument: 'sample'"),
    ],
)
def test_an_exception_names_the_line_of_the_user(tmp_path: Path, start: str, body: str, message: str) -> None:
    path = written(tmp_path, "raises", body, start)
    with pytest.raises(InvalidField) as raised:
        score(path)
    text = str(raised.value)
    assert text.startswith(f"{path} raised ") and message in text
    assert text.endswith(" (raises.py, line 3, in reward) for sample 7")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "return 1.0",
            "returned 1.0, expected a list of 2 rewards, one for each sample of group 4 (group.py, l",
        ),
        ("return [1.0]", "returned 1 reward, expected a list of 2 rewards"),
        ("return [1.0, None]", "returned None for sample 8, expected a finite number (group.py, line 2)"),
        ("return sample[5]", "raised IndexError: list index out of range (group.py, line 3, in reward) for group 4"),
    ],
)
def test_a_function_of_whole_groups_is_named_too(tmp_path: Path, body: str, message: str) -> None:
    path = written(tmp_path, "group", body)
    with pytest.raises(InvalidField) as raised:
        score(path, group=True)
    assert str(raised.value).startswith(path) and message in str(raised.value)


def test_a_call_that_is_cancelled_stays_cancelled(tmp_path: Path) -> None:
    path = written(tmp_path, "waits", "await asyncio.sleep(1000)", "async def reward(args, sample):")

    async def run() -> None:
        args = SimpleNamespace(custom_rm_path=path, reward_key=None, overlong_mask=False, overlong_buffer_len=None)
        task = asyncio.create_task(score_sample(args, Sample(index=7)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_an_error_of_slime_keeps_its_kind(tmp_path: Path) -> None:
    body = "from slime.types.errors import Unavailable; raise Unavailable('the judge is away')"
    with pytest.raises(Unavailable, match="the judge is away"):
        score(written(tmp_path, "judge", body))


@pytest.mark.parametrize("start", ["def reward(args, sample):", "async def reward(args, sample):"])
def test_a_function_that_yields_is_refused_when_it_is_loaded(tmp_path: Path, start: str) -> None:
    path = written(tmp_path, "yields", "yield 1.0", start)
    with pytest.raises(PluginError, match=f"--custom-rm-path {path}: it has a `yield`, and so returns a generator"):
        load_plugin(path, flag="--custom-rm-path")
