"""Metrics to Weights & Biases: what the package is told, by a stand-in for it."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slime.launcher.config import run_config
from slime.launcher.metrics.report import Report
from slime.launcher.metrics.sinks.base import Sink, TrackedRun
from slime.launcher.metrics.sinks.registry import open_sinks, shown_settings
from slime.launcher.metrics.sinks.wandb import take_key
from slime.types.errors import InvalidSetting, NotAvailable

BASE = ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "2"]


class Run:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.exit_code: int | None = None
        self.axes: dict[str, str] = {}

    def define_metric(self, name: str, step_metric: str) -> None:
        self.axes[name] = step_metric

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    made: list[Run] = []

    def init(**options: Any) -> Run:
        if options["project"] == "locked":
            raise module.Error("no permission")
        made.append(Run(options))
        return made[-1]

    module: Any = ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.init, module.Settings, module.Error = (
        init,
        lambda **options: SimpleNamespace(**options),
        type("E", (Exception,), {}),
    )
    monkeypatch.setitem(sys.modules, "wandb", module)
    return made


@pytest.fixture
def begin(tmp_path: Path) -> Callable[..., Sink]:
    def make(*words: str) -> Sink:
        config = run_config.parse([*BASE, "--use-wandb", *words], check=False, environment={})
        run = TrackedRun(name="mine", output_dir=tmp_path, config=shown_settings(config.flat))
        (sink,) = open_sinks(config.launcher, run, None)
        return sink

    return make


def test_a_run_is_named_and_described(runs: list[Run], begin: Callable[..., Sink], tmp_path: Path) -> None:
    words = (
        "--wandb-project p --wandb-group g --wandb-team t --wandb-run-id 7 --wandb-mode offline --wandb-host http://h"
    )
    begin(*words.split(), "--disable-wandb-random-suffix", "--train-env-vars", '{"TOKEN": "secret"}')
    options = runs[0].options
    assert {key: options[key] for key in ("project", "entity", "group", "name", "id", "resume", "mode")} == {
        "project": "p", "entity": "t", "group": "g", "name": "g", "id": "7", "resume": "allow", "mode": "offline"
    }  # fmt: skip
    assert options["dir"] == str(tmp_path) and options["settings"].base_url == "http://h"
    assert options["config"]["num_rollout"] == 2 and "secret" not in str(options["config"])
    begin()
    assert runs[1].options["name"].startswith("mine-") and runs[1].options["resume"] is None
    with pytest.raises(InvalidSetting, match="--use-wandb: E: no permission"):
        begin("--wandb-project", "locked")


def test_a_report_sends_its_metrics(runs: list[Run], begin: Callable[..., Sink], tmp_path: Path) -> None:
    with Report(tmp_path, num_steps=1, sinks=[begin()], console=Console(quiet=True)) as report:
        report.started(1, 0)
        report.evaluation(0, {"eval/sums": 0.5}, [])
        report.step(0, {"train/loss": 1.0}, [])
    assert runs[0].logged == [(0, {"eval/sums": 0.5}), (0, {"train/loss": 1.0})] and runs[0].exit_code == 0


def test_charts_go_over_updates_where_that_is_asked_for(runs: list[Run], begin: Callable[..., Sink]) -> None:
    sink = begin("--wandb-always-use-train-step")
    for step, metrics in (
        (0, {"eval/sums": 0.5}), (0, {"train/step": 4.0, "train/loss": 1.0}), (1, {"eval/sums": 0.6}),
    ):  # fmt: skip
        sink.write(step, metrics)
    sink.close(failed=False)
    assert runs[0].axes == {"*": "train/step"}
    assert runs[0].logged == [
        (0, {"eval/sums": 0.5, "train/step": 0.0}),
        (0, {"train/step": 4.0, "train/loss": 1.0}),
        (1, {"eval/sums": 0.6, "train/step": 4.0}),
    ]
    resumed = begin("--wandb-run-id", "7", "--wandb-always-use-train-step")
    resumed.write(5, {"eval/sums": 0.7})
    resumed.close(failed=False)
    assert runs[1].logged == [(5, {"eval/sums": 0.7})], "a resumed run does not know the number of updates yet"


def test_a_run_that_fails_is_marked_as_failed(runs: list[Run], begin: Callable[..., Sink], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), Report(tmp_path, num_steps=1, sinks=[begin()], console=Console(quiet=True)):
        raise RuntimeError
    assert runs[0].exit_code == 1


def test_its_flags_need_it(runs: list[Run]) -> None:
    for words in ("--wandb-project p", "--disable-wandb-random-suffix"):
        with pytest.raises(InvalidSetting, match=f"{words} requires --use-wandb"):
            run_config.parse([*BASE, *words.split()], check=False, environment={})
    with pytest.raises(NotAvailable, match="--wandb-key.*WANDB_API_KEY"):
        run_config.parse([*BASE, "--use-wandb", "--wandb-key", "x"], check=False, environment={})


@pytest.mark.parametrize("words", [["--wandb-key", "s3cret"], ["--wandb-key=s3cret"]])
def test_a_key_on_the_command_line_goes_to_the_environment_with_a_warning(
    words: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "another")
    assert take_key(["--use-wandb", *words, "--lr", "1"]) == ["--use-wandb", "--lr", "1"]
    assert os.environ["WANDB_API_KEY"] == "s3cret"
    assert "--wandb-key" in caplog.text and "s3cret" not in caplog.text


def test_a_key_without_a_value_is_refused() -> None:
    for words in (["--wandb-key"], ["--wandb-key", "--lr", "1"]):
        with pytest.raises(InvalidSetting, match="--wandb-key requires one value"):
            take_key(words)


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        NotAvailable, match="--use-wandb requires the package wandb: pip install .slime-launcher.wandb."
    ):
        run_config.parse([*BASE, "--use-wandb"], check=False, environment={})
