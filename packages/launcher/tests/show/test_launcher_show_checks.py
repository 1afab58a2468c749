"""Planted faults, which the checks of a run's samples must find, and runs without one, in which they find nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launcher_run_files import Row, checked, group, kept_row, make_run

from slime.launcher.show.answers import Answers
from slime.launcher.show.checks import Rules, run_checks
from slime.launcher.show.run_files import RunFiles


def shift_mask(rows: list[Row]) -> None:
    for row in rows:
        row["loss_mask"] = [0, *row["loss_mask"][:-1]]


def train_on_the_tool(rows: list[Row]) -> None:
    rows[0]["spans"] = [{"start": 0, "end": 2, "weight_version": "3"}]


def rewards_of_the_neighbour(rows: list[Row]) -> None:
    rewards = [row["reward"] for row in rows[:4]]
    for row, reward in zip(rows[:4], [*rewards[1:], rewards[0]], strict=True):
        row["reward"] = reward


def one_reward_for_another_sample(rows: list[Row]) -> None:
    rows[1]["reward"] = 0.0


def stale_weights(rows: list[Row]) -> None:
    for row in rows:
        row["spans"][0]["weight_version"] = "1"


def weights_of_the_future(rows: list[Row]) -> None:
    rows[0]["spans"][0]["weight_version"] = "9"


def shifted_log_probs(rows: list[Row]) -> None:
    for row in rows:
        row["engine_log_probs"] = [-0.2, -2.5, -0.4, -3.0]
        row["trainer_log_probs"] = [-2.5, -0.4, -3.0, -1.0]


def other_weights_in_the_engine(rows: list[Row]) -> None:
    rows[0]["trainer_log_probs"] = [value - 1.5 for value in rows[0]["engine_log_probs"]]


def infinite_reward(rows: list[Row]) -> None:
    rows[0]["reward"] = float("inf")


def impossible_log_prob(rows: list[Row]) -> None:
    rows[0]["engine_log_probs"][2] = 0.5


@pytest.mark.parametrize(
    ("fault", "check", "words"),
    [
        (shift_mask, "mask", "does not begin with the response"),
        (train_on_the_tool, "mask", "2 response tokens (2 to 3), which the model did not generate"),
        (rewards_of_the_neighbour, "rewards", "does not contain the label"),
        (one_reward_for_another_sample, "rewards", "has the same response"),
        (stale_weights, "weights", "version 1 in step 3; this run's may be 0 behind"),
        (weights_of_the_future, "weights", "did not exist"),
        (shifted_log_probs, "log_probs", "taken one token earlier"),
        (other_weights_in_the_engine, "log_probs", "differ by 1.50"),
        (infinite_reward, "numbers", "inf"),
        (impossible_log_prob, "numbers", "above 0"),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    tmp_path: Path, fault: Callable[[list[Row]], None], check: str, words: str
) -> None:
    answers = Answers([RunFiles(make_run(tmp_path / "run", fault=fault))])
    found = checked(answers)
    assert found["checked"] == found["files"] == 8
    assert {f["step"] for f in found["findings"]} == {3} and not any(f["eval"] for f in found["findings"])
    assert check in {f["check"] for f in found["findings"]}
    assert any(words in f["text"] for f in found["findings"] if f["check"] == check), found["findings"]
    assert {c["check"]: c["count"] > 0 for c in found["checks"]}[check]
    # The list of samples marks it, and the sample says it.
    rows = answers.samples({"step": "3"})["rows"]
    marked = [row for row in rows if check in row["findings"]]
    assert marked and answers.sample({"step": "3", "row": str(marked[0]["row"])})["findings"]


def test_nothing_is_found_in_a_run_without_a_fault(tmp_path: Path) -> None:
    assert checked(Answers([RunFiles(make_run(tmp_path / "run"))]))["findings"] == []


@pytest.mark.parametrize(
    ("change", "rules"),
    [
        # A tool's tokens are neither generated nor trained on.
        ({"loss_mask": [1, 1, 0, 1], "spans": [{"start": 0, "end": 2, "weight_version": "3"},
                                               {"start": 3, "end": 4, "weight_version": "3"}]}, Rules()),
        ({"loss_mask": [0, 0, 0, 0]}, Rules()),
        ({"loss_mask": None, "trainer_log_probs": None}, Rules()),
        ({"engine_log_probs": None, "spans": []}, Rules()),
        ({"engine_log_probs": [-1.0, 0.0, -1.0, -1.0], "spans": [], "trainer_log_probs": None}, Rules()),
        ({"engine_log_probs": None, "spans": [], "loss_mask": [0, 1, 1, 0]}, Rules()),
        ({"reward": None, "reward_json": '{"a": 1}'}, Rules()),
        ({"trainer_log_probs": [float("nan"), -1, -1, -1], "engine_log_probs": [0, -1, -1, -1]}, Rules()),
        ({"spans": [{"start": 0, "end": 4, "weight_version": "default"}]}, Rules()),
        ({"spans": [{"start": 0, "end": 4, "weight_version": "1"}]}, Rules(staleness=2)),
        ({"loss_mask": [0, 1, 1, 1]}, Rules(masks_old=True)),
        ({"response": "21"}, Rules(random=True)),
    ],
)  # fmt: skip
def test_what_a_run_may_do_is_no_finding(change: Row, rules: Rules) -> None:
    rows = group(3)
    rows[0] |= change
    assert run_checks(rows, rules) == []


def test_the_loop_says_how_old_weights_may_be() -> None:
    def allowed(asynchronous: bool = False, **settings: Any) -> int:
        return Rules.of(settings, asynchronous=asynchronous).staleness

    assert allowed() == 0
    assert allowed(update_weights_interval=3) == 2
    assert (allowed(True), allowed(True, async_buffer_size=4, update_weights_interval=2)) == (1, 5)
    for more in ({"partial_rollout": True}, {"rollout_function_path": "mine.py:generate"},
                 {"load_debug_rollout_data": "recorded/{rollout_id}"}):  # fmt: skip
        assert allowed(**more) > 10**6
    assert allowed(fully_async=True) > 10**6 and allowed(fully_async=True, max_staleness=3) == 3


@given(st.integers(0, 3), st.integers(2, 12))
def test_any_shift_of_a_mask_is_found(shift: int, length: int) -> None:
    row = kept_row(0, 0) | {
        "response_length": length, "tokens": [1] * (length + 2), "engine_log_probs": [-1.0] * length,
        "trainer_log_probs": [-1.0] * length, "spans": [{"start": 0, "end": length, "weight_version": "0"}],
        "loss_mask": ([0] * shift + [1] * length)[:length],
    }  # fmt: skip
    found = [finding.check for finding in run_checks([row], Rules())]
    assert found == (["mask"] if 0 < shift < length else [])


def test_rewards_are_graded_again_where_that_is_asked_for(tmp_path: Path) -> None:
    def swap(rows: list[Row]) -> None:
        rows[0]["response"], rows[0]["reward"], rows[1]["reward"] = "no 21?", 1.0, 0.0

    run = make_run(tmp_path / "run", settings="num_rollout: 6\nrm_type: integer\n", fault=swap)
    found = checked(Answers([RunFiles(run)], regrade=True))
    again = [f for f in found["findings"] if f["check"] == "regraded" and f["step"] == 3]
    assert [(f["row"], "reward 0, graded again 1" in f["text"]) for f in again] == [(1, True)]
    assert "regraded" not in {c["check"] for c in Answers([RunFiles(run)]).checks({})["checks"]}
