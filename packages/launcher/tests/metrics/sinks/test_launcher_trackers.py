"""Trackers of metrics: failures that end no run, flags, secrets, and the real packages where they are installed."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slime.launcher.config import run_config
from slime.launcher.metrics.report import Report
from slime.launcher.metrics.sinks import base
from slime.launcher.metrics.sinks.base import Guarded, Metrics, Sink, TrackedRun
from slime.launcher.metrics.sinks.mlflow import Mlflow, MlflowSettings
from slime.launcher.metrics.sinks.registry import TRACKERS, open_sinks, shown_settings
from slime.launcher.platform.secret_variables import without_secrets
from slime.types.errors import InvalidSetting, NotAvailable, UnknownFlag

BASE = ["--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "2"]


class Failing(Sink):
    """Takes one row."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def write(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)
        if step == 1:
            raise ConnectionError("https://me:hunter22@host/api: refused sk-12345678\nTraceback")


def test_a_sink_that_fails_is_reported_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "sk-12345678")
    sink = Failing()
    with (
        caplog.at_level(logging.WARNING),
        Report(tmp_path, num_steps=4, sinks=[Guarded("--use-x", sink)], console=Console(quiet=True)) as report,
    ):
        report.started(1, 0)
        for step in range(4):
            report.step(step, {"train/loss": 1.0}, [])
    assert sink.steps == [0, 1] and len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 4
    (warning,) = [record.getMessage() for record in caplog.records if record.name == base.__name__]
    assert warning == "--use-x: ConnectionError: https://***@host/api: refused ***; the run goes on without it"


def test_a_sink_that_hangs_holds_up_neither_the_steps_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    ever = threading.Event()

    class Hanging(Sink):
        def write(self, step: int, metrics: Metrics) -> None:
            ever.wait()

    sink = Guarded("--use-x", Hanging(), close_seconds=0.05)
    for step in range(3):
        sink.write(step, {})
    sink.close(failed=False)
    assert "--use-x: not everything was sent within 0.05 s" in caplog.text
    ever.set()


def pretend_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real, names = importlib.util.find_spec, {tracker.name for tracker in TRACKERS}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name in names else real(name))


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> run_config.RunConfig:
    """The settings of a run whose tracker cannot be started."""
    module: Any = ModuleType("trackio")

    def init(**options: Any) -> None:
        raise ConnectionError("no route to host")

    module.init = init
    monkeypatch.setitem(sys.modules, "trackio", module)
    pretend_installed(monkeypatch)
    return run_config.parse([*BASE, "--use-trackio"], check=False, environment={})


def test_a_tracker_that_cannot_be_started_refuses_a_new_run_and_not_a_resumed_one(
    unreachable: run_config.RunConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TrackedRun(name="r", output_dir=tmp_path, config={})
    with pytest.raises(InvalidSetting, match="--use-trackio: ConnectionError: no route to host"):
        open_sinks(unreachable.launcher, run, tmp_path / "tensorboard")
    assert len(open_sinks(unreachable.launcher, run, tmp_path / "tensorboard", required=False)) == 1
    assert "--use-trackio: ConnectionError: no route to host; the run goes on without it" in caplog.text


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--trackio-project", "p"], "--use-trackio"),
        (["--mlflow-experiment", "p"], "--use-mlflow"),
        (["--swanlab-mode", "local"], "--use-swanlab"),
        (["--wandb-group", "g"], "--use-wandb"),
    ],
)
def test_settings_of_a_tracker_require_it(words: list[str], flag: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{' '.join(words)} requires {flag}"):
        run_config.parse([*BASE, *words], check=False, environment={})


@pytest.mark.parametrize("tracker", TRACKERS, ids=lambda tracker: tracker.name)
def test_a_tracker_requires_its_package(tracker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    expected = f'--use-{tracker.name} requires the package {tracker.name}: pip install "slime-launcher[{tracker.name}]"'
    with pytest.raises(NotAvailable, match=re.escape(expected)):
        run_config.parse([*BASE, f"--use-{tracker.name}"], check=False, environment={})


def test_no_secret_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch)
    uri = "--mlflow-tracking-uri=https://me:hunter22@host"
    with pytest.raises(InvalidSetting, match="MLFLOW_TRACKING_PASSWORD") as error:
        run_config.parse([*BASE, "--use-mlflow", uri], check=False, environment={})
    assert "hunter22" not in str(error.value)
    for words in (
        ["--rm-url", "http://me:hunter22@host/score"],
        ["--use-wandb", "--wandb-host", "https://:hunter22@host"],
    ):
        with pytest.raises(InvalidSetting, match=f"{words[-2]} must hold no password") as error:
            run_config.parse([*BASE, *words], check=False, environment={})
        assert "hunter22" not in str(error.value)
    run_config.parse([*BASE, "--rm-url", "http://host:80/a:b@c"], check=False, environment={})
    config = run_config.parse([*BASE, "--train-env-vars", '{"TOKEN": "hunter22"}'], check=False, environment={})
    assert "hunter22" not in str(shown_settings(config.flat)) and shown_settings(config.flat)["num_rollout"] == 2


def test_the_flag_of_other_tools_names_ours() -> None:
    with pytest.raises(UnknownFlag, match="--use-wandb or --use-trackio or --use-mlflow or --use-swanlab"):
        run_config.parse([*BASE, "--report-to", "mlflow"], check=False, environment={})


def installed(name: str) -> Any:
    return pytest.importorskip(name, reason=f"the package {name} is optional and not installed")


def tracked(tmp_path: Path, *words: str) -> None:
    """Two starts of a run with a tracker: steps 0 and 1, and again from step 1 to step 2."""
    for first, steps in ((0, (0, 1)), (1, (1, 2))):
        config = run_config.parse([*BASE, *words], check=False, environment={})
        run = TrackedRun(name="mine", output_dir=tmp_path, config=shown_settings(config.flat))
        sinks = open_sinks(config.launcher, run, None)
        with Report(tmp_path, num_steps=3, sinks=sinks, console=Console(quiet=True)) as report:
            report.started(1, first)
            for step in steps:
                report.step(step, {"train/loss": step / 2, "eval/sums-pass@2": 1.0}, [])


@pytest.fixture
def warned_never(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert not [record.getMessage() for record in caplog.get_records("call") if record.name.startswith("slime.")]


@pytest.mark.usefixtures("warned_never")
def test_mlflow_has_a_run_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = installed("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    tracked(tmp_path, "--use-mlflow", "--mlflow-tracking-uri", uri)
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("slime").experiment_id], order_by=["start_time"])
    assert [(run.info.run_name, run.info.status, run.data.params["num_rollout"]) for run in runs] == [
        ("mine", "FINISHED", "2")
    ] * 2
    history = [[m.step for m in client.get_metric_history(run.info.run_id, "train/loss")] for run in runs]
    assert sorted(history) == [[0, 1], [1, 2]]
    assert client.get_metric_history(runs[0].info.run_id, "eval/sums-pass_2")


def test_more_metrics_than_mlflow_takes_in_a_call_are_sent_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[Any]] = []
    client = SimpleNamespace(
        get_experiment_by_name=lambda name: SimpleNamespace(experiment_id="0"),
        create_run=lambda *_, **__: SimpleNamespace(info=SimpleNamespace(run_id="r")),
        log_batch=lambda run, metrics: sent.append(metrics),
    )
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=lambda **_: client))
    monkeypatch.setitem(sys.modules, "mlflow.entities", SimpleNamespace(Metric=lambda *words: words))
    sink = Mlflow(MlflowSettings(), TrackedRun(name="r", output_dir=Path("r"), config={}))
    sink.write(3, {f"m{i}": float(i) for i in range(2001)})
    assert [len(batch) for batch in sent] == [1000, 1000, 1]
    assert [metric[1] for batch in sent for metric in batch] == list(range(2001))


@pytest.mark.usefixtures("warned_never")
def test_trackio_has_a_run_for_each_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    installed("trackio")
    tracked(tmp_path, "--use-trackio", "--trackio-project", "tested")
    api = importlib.import_module("trackio").Api()
    runs = list(api.runs("tested"))
    assert [(run.name, run.config["num_rollout"]) for run in runs] == [("mine", 2)] * 2


@pytest.mark.usefixtures("warned_never")
@pytest.mark.parametrize("name", ["wandb", "swanlab"])
def test_an_offline_tracker_leaves_its_files(name: str, tmp_path: Path) -> None:
    installed(name)
    tracked(tmp_path, f"--use-{name}", f"--{name}-mode", "offline")
    if name == "wandb":
        # Its service may write the last of its files after a run has finished; this waits for the service.
        importlib.import_module(name).teardown()
    files = {path.resolve() for path in tmp_path.glob(f"**/*run*/*.{name}")}
    assert len(files) == 2 and all(file.stat().st_size > 1000 for file in files)


def test_a_secret_is_hidden_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    # The one is the beginning of the other; a password holds what separates it from the host.
    monkeypatch.setenv("A_TOKEN", "abcdef")
    monkeypatch.setenv("B_TOKEN", "abcdefgh")
    assert without_secrets("abcdef, abcdefgh") == "***, ***"
    assert without_secrets("at http://me:p@ss/w@host/x not") == "at http://***@host/x not"
    assert without_secrets("at http://host/x: a@b") == "at http://host/x: a@b"
