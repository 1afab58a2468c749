"""`from slime.launcher import train`: rewards that are shipped, settings that are checked, results that are read."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import slime.launcher
from slime.launcher.api.inputs import Inputs
from slime.launcher.api.reward_file import reward_path
from slime.launcher.api.trained_run import TrainedRun
from slime.launcher.api.training import train
from slime.launcher.config import run_config
from slime.launcher.quickstart import reverse
from slime.launcher.run_directory.kept_samples import KeptSamples
from slime.launcher.run_directory.state import RunState
from slime.types import Sample
from slime.types.errors import ConfigError, InvalidFile, InvalidSetting, MissingFile, UnknownFlag
from slime.types.plugins import load_plugin

NUM_GPUS = 0


def module_level(args: object, sample: Sample, **kwargs: object) -> float:
    return 1.0


def test_the_package_offers_it_without_loading_it() -> None:
    code = (
        "import sys, slime.launcher\nheavy = {'torch', 'ray', 'slime.launcher.api.training'} & set(sys.modules)\n"
        "assert not heavy, heavy\nfrom slime.launcher import train\nassert callable(train), train\n"
        "import slime.launcher.loops.synchronous\nfrom slime.launcher import train as again\nassert again is train\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert slime.launcher.train is train and slime.launcher.TrainedRun is TrainedRun


SCRIPT = '''
import json
import math as m
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from slime.launcher.api.inputs import Inputs
from slime.launcher.api.reward_file import reward_path

BONUS = {"extra": [0.5, 2]}
NUMBER = re.compile("[0-9]+", re.I)
LOADED = object()

class Judge:
    weight = BONUS["extra"][1]
    def score(self, text: str) -> float:
        return doubled(len(NUMBER.findall(text))) * self.weight

@cache
def doubled(number):
    return 2 * number

def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)

async def reward(args, sample, *, bonus=BONUS["extra"][0], **kwargs) -> float:
    """Uses the module around it in every way."""
    assert Counter(sample.response) and even(4)
    return m.floor(Judge().score(sample.response)) + bonus + sum(doubled(x) for x in [1])

def uses_object(args, sample, **kwargs):
    return float(LOADED is None)

def around():
    held = 1.0
    def inner(args, sample, **kwargs):
        return held
    return inner

class Callable:
    def __call__(self, args, sample, **kwargs):
        return 0.0

answers = []
for function in (reward, uses_object, around(), lambda args, sample, **kwargs: 0.0, Callable()):
    try:
        answers.append(reward_path(function, Inputs(Path(sys.argv[1]))))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
print(json.dumps(answers))
'''


def test_a_function_of_a_script_is_shipped_with_all_that_it_uses(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "inputs")], capture_output=True, text=True, timeout=120, check=True
    )
    path, *refused = json.loads(done.stdout)
    assert path == f"{tmp_path}/inputs/reward.py:reward"
    # In another process, without the script.
    script.unlink()
    code = textwrap.dedent("""
        import asyncio, sys
        from slime.types import Sample
        from slime.types.plugins import load_plugin
        function = load_plugin(sys.argv[1], flag="--custom-rm-path")
        print(asyncio.run(function(None, Sample(response="1 and 22"))))
    """)
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "10.5", done.stderr
    assert refused[0].startswith(
        "InvalidSetting: the reward function uses_object cannot be shipped to the processes of the run: it uses "
        "LOADED, a object; create it inside the function; or put the reward into a file"
    )
    assert "it uses held of the function around it; move it out of there" in refused[1]
    assert "reward must be a function with a name (def), got '<lambda>'" in refused[2]
    assert "reward must be a function with a name (def), got 'Callable'" in refused[3]


WRAPPED_SCRIPT = """
import functools
import json
import sys
import textwrap
from pathlib import Path

from slime.launcher.api.inputs import Inputs
from slime.launcher.api.reward_file import reward_path

def doubling(function):
    @functools.wraps(function)
    def doubled(*values):
        return 2 * function(*values)
    return doubled

def making(value):
    def made(text):
        return value
    return made

class Grader:
    def __call__(self, text):
        return 1.0

def one(text): return 1.0
alias = one
response = Grader()
twice = doubling(one)
def again(text): return 1.0
again = doubling(again)
foreign = doubling(textwrap.dedent)
made = making(1.0)
grader = Grader()
part = functools.partial(one)

def by_alias(args, sample, **kwargs): return alias(sample.response)
def by_twice(args, sample, **kwargs): return twice(sample.response)
def by_again(args, sample, **kwargs): return again(sample.response)
def by_foreign(args, sample, **kwargs): return len(foreign(sample.response))
def by_made(args, sample, **kwargs): return made(sample.response)
def by_grader(args, sample, **kwargs): return grader(sample.response)
def by_part(args, sample, **kwargs): return part(sample.response)

answers = {}
for function in (by_alias, by_twice, by_again, by_foreign, by_made, by_grader, by_part):
    try:
        answers[function.__name__] = reward_path(function, Inputs(Path(sys.argv[1])))
    except Exception as error:
        answers[function.__name__] = f"{type(error).__name__}: {error}"
print(json.dumps(answers))
"""


def test_what_a_reward_uses_under_another_name_or_wrapped_is_shipped_as_it_is_or_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WRAPPED_SCRIPT)
    command = [sys.executable, str(script), str(tmp_path / "inputs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answers = json.loads(done.stdout)
    # `sample.response` does not use the script's `response`.
    function = load_plugin(answers.pop("by_alias"), flag="--custom-rm-path")
    assert function(None, Sample(response="x")) == 1.0
    for name, answer in answers.items():
        used = name.removeprefix("by_")
        assert answer.startswith(f"InvalidSetting: the reward function {name} cannot be shipped"), answer
        assert f"it uses {used}, " in answer


def test_a_function_whose_source_is_unknown_is_refused(tmp_path: Path) -> None:
    names: dict[str, object] = {"__name__": "__main__"}
    exec("def reward(args, sample, **kwargs):\n    return 0.0\n", names)
    with pytest.raises(InvalidSetting, match="the source of reward is unknown here; or put the reward into a file"):
        reward_path(names["reward"], Inputs(tmp_path))  # type: ignore[arg-type]


def test_a_function_of_a_module_is_named_by_its_file_or_its_package(tmp_path: Path) -> None:
    path = reward_path(module_level, Inputs(tmp_path))
    assert path == f"{Path(__file__).absolute()}:module_level" or path.endswith(".module_level")
    assert load_plugin(path, flag="--custom-rm-path") is not None
    assert reward_path(reverse.reward, Inputs(tmp_path)) == "slime.launcher.quickstart.reverse.reward"
    assert not list(tmp_path.iterdir())


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that `train` starts, which do nothing here; tests/e2e runs one."""
    commands: list[list[str]] = []
    monkeypatch.setattr(
        "slime.launcher.api.training.run_attached", lambda command, *_, **__: commands.append(list(command))
    )
    reverse.write_model(tmp_path / "model", 0)
    return commands


def test_arguments_become_settings_and_rows_a_file(started: list[list[str]], tmp_path: Path) -> None:
    rows = [{"input": "1>", "label": "1"}, {"input": "2>", "label": "2"}]
    run = train(
        tmp_path / "model", rows, module_level, eval_data={"held": rows[:1]}, output_dir=tmp_path / "out",
        label_key="label", num_rollout=2, n_samples_per_prompt=4, lr=1e-3, asynchronous=True,
    )  # fmt: skip
    ((*_, command, path),) = started
    assert command == "train-async" and run.path == tmp_path / "out"
    config = run_config.parse([path])
    assert config.trainer.lr == 1e-3 and config.launcher.num_rollout == 2
    assert [json.loads(line) for line in Path(str(config.buffer.prompt_data)).read_text().splitlines()] == rows
    assert list(config.buffer.evaluation_sets()) == ["held"]
    assert str(config.rollout.custom_rm_path).endswith("module_level")


def test_settings_may_be_paths_and_numbers_of_numpy_and_evaluations_have_any_name(
    started: list[list[str]], tmp_path: Path
) -> None:
    held = {name: [{"input": name, "label": "1"}] for name in ("prompts", "settings")}
    train(
        tmp_path / "model", [{"input": "x", "label": np.int64(3)}], "math", eval_data=held, output_dir=tmp_path / "out",
        num_rollout=1, n_samples_per_prompt=2, label_key="label", lr=np.float64(1e-3), save_interval=1,
        save=tmp_path / "saved",
    )  # fmt: skip
    config = run_config.parse([started[-1][-1]])
    assert config.trainer.lr == 1e-3 and config.launcher.save == str(tmp_path / "saved")
    assert json.loads(Path(str(config.buffer.prompt_data)).read_text()) == {"input": "x", "label": 3}
    paths = config.buffer.evaluation_sets()
    assert {name: json.loads(Path(path).read_text())["input"] for name, path in paths.items()} == {n: n for n in held}


def test_the_inputs_of_another_run_stay_as_they_are(started: list[list[str]], tmp_path: Path) -> None:
    output = tmp_path / "out"

    def start(text: str, **more: Any) -> None:
        train(tmp_path / "model", [{"input": text, "label": "1"}], "math", output_dir=output, num_rollout=1,
              n_samples_per_prompt=2, label_key="label", **more)  # fmt: skip

    start("a")
    start("b")  # nothing has run there yet
    (output / "run.yaml").write_text("")
    start("b")
    for more in ({}, {"overwrite": True}):
        state = RunState(output, "train")
        with pytest.raises(InvalidSetting, match="prompts.jsonl belongs to another run, with another data; use"):
            start("c", **more)
        state.end("done")
    assert '"b"' in (output / "inputs" / "prompts.jsonl").read_text() and len(started) == 3
    start("c", overwrite=True)
    Inputs(tmp_path / "in").write("reward.py", "one", "reward")
    with pytest.raises(InvalidSetting, match="reward.py belongs to another run"):
        Inputs(tmp_path / "in", replace=False).write("reward.py", "two", "reward")


def test_a_reward_by_its_name(started: list[list[str]], tmp_path: Path) -> None:
    for reward, setting in (("math", "rm_type"), (f"{__file__}:module_level", "custom_rm_path")):
        train(tmp_path / "model", [{"input": "x", "label": "1"}], reward, output_dir=tmp_path / "out",
              num_rollout=1, n_samples_per_prompt=2, label_key="label")  # fmt: skip
        assert yaml.safe_load(Path(started[-1][-1]).read_text())[setting] == reward


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"learning_rte": 1}, UnknownFlag, "learning_rte"),
        ({"lr": -1.0}, ConfigError, "--lr must be greater than 0"),
        ({"num_rollout": None}, ConfigError, "--num-rollout is required"),
        ({"model": "nowhere"}, MissingFile, "--hf-checkpoint: no such directory nowhere"),
        ({"reward": 3}, InvalidSetting, "reward must be a function or a name, got 3"),
        ({"rm_type": "math"}, InvalidSetting, "rm_type and reward cannot be used together"),
        ({"hf_checkpoint": "other"}, InvalidSetting, "hf_checkpoint and model cannot be used together"),
        ({"lr": object()}, InvalidSetting, "lr: a file of settings cannot hold a object"),
        ({"data": [{"input": object()}]}, InvalidSetting, "data must be a file, a name on the Hub, or rows"),
        ({"model": 5}, InvalidSetting, "model must be a path, got 5"),
        ({"output_dir": 5}, InvalidSetting, "output_dir must be a path, got 5"),
        ({"output_dir": f"{__file__}/x"}, InvalidSetting, "cannot write .*Not a directory"),
        ({"eval_data": {5: "x.jsonl"}}, InvalidSetting, "eval_data must be sets by name, which is text, got 5"),
        ({"data": []}, InvalidFile, "--prompt-data .*: no rows"),
        ({"data": [{"input": 5}]}, InvalidFile, "--prompt-data: .*prompts.jsonl, line 1: column 'input' holds 5"),
        ({"num_rolout": 1}, UnknownFlag, "^unknown key 'num_rolout'; did you mean num_rollout"),
    ],
)
def test_wrong_settings_raise_before_anything_starts(
    started: list[list[str]], tmp_path: Path, changed: dict[str, object], kind: type[Exception], message: str
) -> None:
    given = {
        "model": tmp_path / "model", "data": [{"input": "x"}], "reward": module_level, "output_dir": tmp_path / "out",
        "num_rollout": 1, "n_samples_per_prompt": 2,
    }  # fmt: skip
    with pytest.raises(kind, match=message):
        train(**given | changed)  # type: ignore[arg-type]
    assert started == [] and not (tmp_path / "out").exists()


def rows(table: Any) -> list[dict[str, Any]]:
    """The rows of a DataFrame, or of what takes its place where pandas is not installed."""
    return table if isinstance(table, list) else table.to_dict("records")


def test_results_are_read_from_the_directory(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 0, "eval/x": 0.5, "perf/eval_time": 1.0}\n{"step": 0, "perf/step_time": 1.0, "train/loss": 2.0}\n'
        '{"step": 1, "perf'  # the machine died, or the run is about to write the rest
    )
    KeptSamples(tmp_path, 0).write(0, [Sample(prompt="a", response="b", reward=1.0, index=0, group_index=0)])
    run = TrainedRun(tmp_path)
    (step,), (evaluation,), (sample,) = rows(run.metrics), rows(run.evaluations), rows(run.samples)
    assert step["train/loss"] == 2.0 and evaluation["eval/x"] == 0.5 and sample["response"] == "b"
    assert run.state == "unknown"
    with pytest.raises(MissingFile, match="has no trained model"):
        _ = run.model_dir
    (tmp_path / "model").mkdir()
    assert run.model_dir == tmp_path / "model"


def test_the_output_of_a_run_reaches_a_notebook(capsys: pytest.CaptureFixture[str]) -> None:
    from slime.launcher.runner.ray_job import RunFailed, run_attached

    lines: list[str] = []
    run_attached(
        [sys.executable, "-c", "import os; print('one', flush=True); os.write(2, b'two')"], "it", show=lines.append
    )
    assert sorted(lines) == ["one", "two"]
    with pytest.raises(RunFailed):
        run_attached([sys.executable, "-c", "raise SystemExit(3)"], "it", show=lines.append)
