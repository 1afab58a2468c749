"""The fully asynchronous loop on a real buffer and rollout service, with an engine and a trainer that take time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from latent_run import LatentRun, NoReport, latent_run
from slime.launcher.loops.fully_async import loop_fully_async
from slime.launcher.loops.synchronous import loop

NUM_GPUS = 0
BATCH = ("--rollout-batch-size", "2", "--num-rollout", "4")
ASYNC = ("--fully-async", "--max-staleness", "1")
TOKEN_SECONDS = 0.002


def wait_until(condition: Callable[[], bool], run: LatentRun) -> None:
    """Waits for generation that goes on by itself while the trainer is busy."""
    import time

    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, run.events
        time.sleep(0.01)


def test_generation_fills_the_staleness_while_the_trainer_trains_and_no_further(tmp_path: Path) -> None:
    seen: dict[int, tuple[int, int]] = {}

    def train(step: int) -> None:
        # Steps 0 to K are generated with the first weights, whatever the trainer does meanwhile.
        wanted = min(2 * (1 + 1 + step), 8)
        wait_until(lambda: complete(run) >= wanted, run)
        seen[step] = complete(run), run.engine.running

    def complete(run: LatentRun) -> int:
        groups = run.buffer.stats().groups
        return sum(groups[state] for state in ("completed", "sealed", "acknowledged"))

    report = NoReport()
    with latent_run(tmp_path, [3] * 32, TOKEN_SECONDS, train, *BATCH, *ASYNC) as run:
        loop_fully_async(run.config, run, report)  # type: ignore[arg-type]
        assert seen == {0: (4, 0), 1: (6, 0), 2: (8, 0), 3: (8, 0)}
        assert run.buffer.stats().groups["leased"] == 0
    assert [row["rollout/staleness/max"] for row in report.rows] == [0, 1, 1, 1]


def test_weights_are_swapped_under_a_response_and_the_trainer_waits_for_it_where_it_is_due(tmp_path: Path) -> None:
    with latent_run(tmp_path, [5] * 32, TOKEN_SECONDS, lambda step: None, *BATCH, *ASYNC) as run:
        run.engine.ends_at = {0: 1}
        loop_fully_async(run.config, run, NoReport())  # type: ignore[arg-type]
    (sample,) = [sample for sample in run.sealed[1] if sample.group_index == 0]
    assert (sample.oldest_weight_version, sample.newest_weight_version, sample.response_length) == (0, 1, 5)
    assert all(step - s.oldest_weight_version <= 1 for step, samples in run.sealed.items() for s in samples)


def test_a_response_that_is_late_is_dropped_and_counted(tmp_path: Path) -> None:
    report, flags = NoReport(), (*ASYNC, "--staleness-policy", "drop")
    with latent_run(tmp_path, [5] * 32, TOKEN_SECONDS, lambda step: None, *BATCH, *flags) as run:
        run.engine.ends_at = {0: 100}
        loop_fully_async(run.config, run, report)  # type: ignore[arg-type]
    assert [step for name, step in run.events if name == "train"] == [0, 1, 2, 3]
    assert all(s.group_index != 0 for samples in run.sealed.values() for s in samples)
    assert [row["rollout/dropped_stale"] for row in report.rows] == [0, 0, 1, 0]
    assert max(row["rollout/staleness/max"] for row in report.rows) == 1


def test_a_response_that_is_late_is_kept_with_its_number(tmp_path: Path) -> None:
    report, flags = NoReport(), (*ASYNC, "--staleness-policy", "keep")
    with latent_run(tmp_path, [5] * 32, TOKEN_SECONDS, lambda step: None, *BATCH, *flags) as run:
        run.engine.ends_at = {0: 3}
        loop_fully_async(run.config, run, report)  # type: ignore[arg-type]
    (sample,) = [sample for sample in run.sealed[3] if sample.group_index == 0]
    assert (sample.oldest_weight_version, sample.newest_weight_version, sample.response_length) == (0, 3, 5)
    assert [row["rollout/staleness/max"] for row in report.rows][3] == 3
    assert sum(row["rollout/dropped_stale"] for row in report.rows) == 0


def test_without_staleness_the_steps_are_those_of_the_synchronous_loop(tmp_path: Path) -> None:
    lengths = [1 + number * 7 % 13 for number in range(32)]
    steps: dict[str, list[list[tuple[int, int, int, int]]]] = {}
    loops = {"sync": (loop, ()), "async": (loop_fully_async, ("--fully-async", "--max-staleness", "0"))}
    for name, (function, flags) in loops.items():
        with latent_run(tmp_path / name, lengths, TOKEN_SECONDS, lambda step: None, *BATCH, *flags) as run:
            function(run.config, run, NoReport())  # type: ignore[operator]
            steps[name] = [
                [(s.group_index, s.response_length, s.oldest_weight_version, s.newest_weight_version) for s in samples]
                for _, samples in sorted(run.sealed.items())
            ]
    assert steps["async"] == steps["sync"]
    assert [{s[2] for s in samples} for samples in steps["async"]] == [{0}, {1}, {2}, {3}]
