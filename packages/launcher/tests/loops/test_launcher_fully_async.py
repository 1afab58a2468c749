"""The fully asynchronous loop: what waits for what, and which flags fit together."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from slime.launcher import cli
from slime.launcher.config import run_config
from slime.launcher.config.advice import advice
from slime.launcher.config.checks.loop import FULLY_ASYNC_FUNCTION, check_asynchronous, check_synchronous
from slime.launcher.loops.fully_async import loop_fully_async
from slime.launcher.metrics import report as files_report
from slime.launcher.services.generation import ContinuousGeneration, pace_of
from slime.launcher.services.rollout_calls import RolloutCalls
from slime.types.clients.rollout import StopSignal
from slime.types.errors import EngineError, InvalidSetting
from slime.types.pace import TrainerPace

NUM_GPUS = 0
Metrics = dict[str, float]


class Run:
    """Services that note in which order they are called; an evaluation ends when somebody waits for it."""

    def __init__(self, num_rollout: int, first_step: int = 0) -> None:
        self.first_step, self.num_rollout = first_step, num_rollout
        self.events: list[tuple[str, int]] = []
        self.sums: Metrics = {}
        self.begun: list[Callable[[], Any]] = []
        self.examples: list[Any] = []

    def generating(self) -> ContinuousGeneration:
        return ContinuousGeneration(self, self._generate_on, TrainerPace(1, 1, self.num_rollout), self.first_step)

    def _generate_on(self, first: int, pace: TrainerPace, stop: StopSignal, note: Callable[[Metrics], None]) -> None:
        self.note = note
        self.events.append(("generate", first))
        stop.attach(lambda: self.events.append(("end", first)))

    def begin(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if not self.begun:
            future.set_result(function())
        else:
            self.events.append(("begin evaluation", len(self.begun)))
        self.begun.append(function)
        future.function = function  # type: ignore[attr-defined]
        return future

    def join(self, future: Future[Any]) -> Any:
        return future.result() if future.done() else future.function()  # type: ignore[attr-defined]

    def seal(self, step: int, generated: Metrics) -> None:
        self.events.append(("seal", step))
        self.sealed = dict(generated)

    def train_step(self, step: int) -> Metrics:
        self.events.append(("train", step))
        self.note({"perf/engine_wait_time": 1.5 * (step + 1)})
        return self.sealed

    def update_weights(self, version: int) -> Metrics:
        self.events.append(("push", version))
        return {}

    def save(self, step: int, path: Path, save_hf: str | None) -> Metrics:
        self.events.append(("save", step))
        return {}

    def evaluate(self, rollout_id: int) -> tuple[Metrics, list[Any]]:
        self.events.append(("evaluate", rollout_id))
        return {"eval/held": float(rollout_id)}, []


class Report:
    def __init__(self, lacks: bool = False) -> None:
        self.lacks = lacks
        self.metrics: list[Metrics] = []
        self.evaluated: list[int] = []

    def evaluation(self, step: int, metrics: Metrics, examples: list[Any]) -> None:
        assert metrics["eval/held"] == step
        self.evaluated.append(step)

    def lacks_evaluation(self, step: int) -> bool:
        return self.lacks

    def hold(self, step: int, metrics: Metrics) -> None: ...

    def step(self, step: int, metrics: Metrics, examples: list[Any]) -> None:
        self.metrics.append(metrics)


def config(*more: str) -> run_config.RunConfig:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p", *more]
    return run_config.parse(words, check=False, environment={})


def run_loop(run: Run, *more: str, lacks: bool = False) -> Report:
    report = Report(lacks)
    configured = config("--num-rollout", str(run.num_rollout), "--fully-async", *more)
    loop_fully_async(configured, run, report)  # type: ignore[arg-type]
    return report


def test_generation_lasts_from_the_first_step_to_the_last() -> None:
    run = Run(5, first_step=3)
    report = run_loop(run)
    assert run.events == [
        ("generate", 3), ("seal", 3), ("train", 3), ("push", 4), ("seal", 4), ("train", 4), ("push", 5), ("end", 3),
    ]  # fmt: skip
    assert [row.get("perf/engine_wait_time") for row in report.metrics] == [None, 6.0]


def test_metrics_are_what_was_added_since_the_last_step_but_for_those_of_the_engines_as_they_are() -> None:
    seen = {
        "perf/engine_wait_time": 2.0,
        "rollout/engines": 4.0,
        "rollout/concurrency": 100.0,
        "rollout/concurrency/min": 80.0,
    }
    run = Run(2)
    generation = run.generating()
    with generation:
        run.note(seen)
        assert generation.take_metrics() == seen
        # An engine has left, and the limit was tuned.
        run.note(
            {
                "perf/engine_wait_time": 2.5,
                "rollout/engines": 3.0,
                "rollout/concurrency": 90.0,
                "rollout/concurrency/min": 90.0,
            }
        )
        expected = {
            "perf/engine_wait_time": 0.5,
            "rollout/engines": 3.0,
            "rollout/concurrency": 90.0,
            "rollout/concurrency/min": 90.0,
        }
        assert generation.take_metrics() == expected


def test_a_rollout_service_that_was_started_again_has_no_more_engines_than_before(tmp_path: Path) -> None:
    class Supervisor:
        def call(self, attempt: Callable[[], None]) -> None:
            attempt()
            attempt()

    class Rollout:
        def generate_on(self, step: int, pace: TrainerPace, stop: StopSignal, note: Callable[[Metrics], None]) -> None:
            note({"rollout/aborted_groups": 1.0, "rollout/engines": 2.0})

        def requeue_groups(self, worker: str) -> None: ...

    calls = RolloutCalls(Supervisor(), Rollout(), Rollout(), None, lambda *_: None, 1.0)  # type: ignore[arg-type]
    sums: list[Metrics] = []
    calls.generate_on(0, TrainerPace(1, 1, 1), StopSignal(), sums.append)
    assert sums[-1] == {"rollout/aborted_groups": 2.0, "rollout/engines": 2.0}


def test_an_evaluation_goes_on_beside_the_training_and_ends_before_the_next_checkpoint_and_weights() -> None:
    run = Run(3)
    report = run_loop(run, "--eval-prompt-data", "held", "f", "--eval-interval", "1", "--save-interval", "2")
    assert run.events == [
        ("evaluate", 0), ("generate", 0),
        ("seal", 0), ("train", 0), ("push", 1), ("begin evaluation", 1),
        ("seal", 1), ("train", 1), ("evaluate", 1), ("save", 1), ("push", 2), ("begin evaluation", 2),
        ("seal", 2), ("train", 2), ("evaluate", 2), ("save", 2), ("push", 3), ("begin evaluation", 3),
        ("end", 0), ("evaluate", 3),
    ]  # fmt: skip
    assert report.evaluated == [0, 1, 2, 3]


@pytest.mark.parametrize("lacks", [True, False])
def test_an_evaluation_that_an_earlier_start_was_killed_in_is_made_up_for(lacks: bool) -> None:
    run = Run(5, first_step=4)
    flags = ("--eval-prompt-data", "held", "f", "--eval-interval", "2", "--skip-eval-before-train")
    assert run_loop(run, *flags, lacks=lacks).evaluated == ([4, 5] if lacks else [5])
    # After three steps none was due.
    assert run_loop(Run(5, first_step=3), *flags, lacks=lacks).evaluated == [4, 5]
    assert run_loop(Run(5), *flags, lacks=lacks).evaluated == [2, 4, 5]


def test_a_report_knows_which_evaluation_is_missing(tmp_path: Path) -> None:
    with files_report.Report(tmp_path, num_steps=9) as report:
        report.started(1, 4)
        assert not report.lacks_evaluation(4)  # nothing is there: no start of this run came before
        report.step(4, {}, [])
        report.evaluation(5, {"eval/held": 1.0, "perf/eval_time": 1.0}, [])
        assert report.lacks_evaluation(4) and not report.lacks_evaluation(5)


def test_generation_ends_with_the_loop_whatever_ends_it() -> None:
    run = Run(3)

    def fail(step: int) -> Metrics:
        raise EngineError("the trainer died")

    run.train_step = fail  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="the trainer died"):
        run_loop(run)
    assert run.events[-1] == ("end", 0)


def test_the_name_of_the_original_is_the_flag() -> None:
    ours = config("--num-rollout", "3", "--fully-async")
    theirs = config("--num-rollout", "3", "--rollout-function-path", FULLY_ASYNC_FUNCTION)
    assert theirs.launcher.fully_async and pace_of(theirs) == pace_of(ours)
    assert pace_of(ours) == TrainerPace(max_staleness=2, groups_per_step=32, stop_step=3, policy="wait")
    for one in (ours, theirs):
        check_asynchronous(one.flat)
    with pytest.raises(InvalidSetting, match="--fully-async requires slime train-async"):
        check_synchronous(ours.flat)
    with pytest.raises(InvalidSetting, match=f"{FULLY_ASYNC_FUNCTION} requires slime train-async"):
        check_synchronous(theirs.flat)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--async-buffer-size 2", "--async-buffer-size 2 and --fully-async cannot be used together: .*--max-staleness"),
        ("--rollout-function-path a.b", "--rollout-function-path a.b and --fully-async cannot be used together"),
        (
            "--rollout-prompt-wait-seconds 5",
            "--rollout-prompt-wait-seconds 5.0 and --fully-async cannot be used together: .*--rollout-timeout-seconds",
        ),
        ("--data-source-path a.B", "--data-source-path a.B and --fully-async cannot be used together"),
        ("--rollout-sample-filter-path a.b", "--rollout-sample-filter-path a.b and --fully-async cannot"),
        ("--dump-details d", "--dump-details d and --fully-async cannot be used together: it records the samples"),
        ("--update-weights-interval 4", "--update-weights-interval must be at most 3, so that samples are no older"),
        ("--deterministic", "--deterministic with --fully-async requires --max-staleness 0"),
        ("--debug-rollout-only", "--debug-rollout-only and --fully-async cannot be used together"),
        ("--colocate", "--colocate and slime train-async cannot be used together"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(flags: str, words: str) -> None:
    with pytest.raises(InvalidSetting, match=words):
        check_asynchronous(config("--num-rollout", "3", "--fully-async", *flags.split()).flat)


@pytest.mark.parametrize("flag", ["--max-staleness 3", "--staleness-policy drop"])
def test_the_staleness_needs_the_mode(flag: str) -> None:
    with pytest.raises(InvalidSetting, match=f"{flag} requires --fully-async"):
        config("--num-rollout", "3", *flag.split())


@pytest.mark.parametrize(("staleness", "warned"), [("0", False), ("1", True)])
def test_a_correction_is_advised_only_where_samples_are_of_older_weights(staleness: str, warned: bool) -> None:
    configured = config("--num-rollout", "3", "--fully-async", "--max-staleness", staleness)
    sentences = " ".join(advice(configured, asynchronous=True))
    assert ("rollouts of older weights" in sentences) is warned


def test_help_shows_the_mode(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train-async", "--help-all"])
    assert "--max-staleness" in capsys.readouterr().out
