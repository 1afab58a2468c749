"""Answers to the page about runs on disk: increments while a run goes on, pages of samples, differences of settings."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from launcher_run_files import add_steps, checked, group, kept_row, make_run, metrics_row

from slime.launcher.run_directory.kept_samples import DIRECTORY, write_file
from slime.launcher.run_directory.state import recorded
from slime.launcher.show import answers as answers_module
from slime.launcher.show.answers import POINTS, Answers, ranges, spread
from slime.launcher.show.run_files import RunFiles, find_runs, names
from slime.types.errors import InvalidField, InvalidSetting


def answers_about(*runs: Path) -> Answers:
    return Answers([RunFiles(run) for run in runs])


def test_a_run_that_goes_on_is_answered_in_increments(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    answers = answers_about(run)
    first = answers.curves({})
    assert first["whole"] and first["steps"] == [0, 1, 2, 3, 4, 5]
    assert first["values"]["rollout/raw_reward"] == [0, 0.01, 0.02, 0.03, 0.04, 0.05]
    assert "eval/gsm" not in first["values"]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_row(6)) + '\n{"step": 7, "rollout/raw')
    more = answers.curves({"after": "5", "edition": str(first["edition"])})
    assert (more["whole"], more["steps"], more["rows"]) == (False, [6], 7)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('_reward": NaN}\n')
    assert answers.curves({"after": "6", "edition": str(first["edition"])})["values"] == {"rollout/raw_reward": [None]}
    # A resumed run replaces the file: whoever has read more starts over.
    (run / "new").write_text(json.dumps(metrics_row(0, 0.5)) + "\n")
    (run / "new").replace(run / "metrics.jsonl")
    anew = answers.curves({"after": "7", "edition": str(first["edition"])})
    assert anew["whole"] and anew["steps"] == [0] and anew["edition"] != first["edition"]


def test_a_curve_of_very_many_steps_is_averaged(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=0)
    add_steps(run, range(10 * POINTS + 7))
    found = answers_about(run).curves({})
    assert len(found["steps"]) == POINTS and found["averaged"]
    assert found["steps"][0] == pytest.approx(4.5, abs=0.6)
    assert found["values"]["rollout/raw_reward"] == pytest.approx([step / 100 for step in found["steps"]], rel=1e-5)


def test_samples_come_by_page_and_one_with_every_token(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    rows = [kept_row(9, i, group_index=i // 4, response="x" * 1000) for i in range(600)]
    write_file(run / DIRECTORY / "000009.parquet", rows)
    answers = answers_about(run)
    assert answers.steps({}) == {"train": [[0, 5], [9, 9]], "eval": [[0, 0], [6, 6]]}
    page = answers.samples({"step": "9", "start": "255", "count": "3"})
    assert (page["total"], [row["row"] for row in page["rows"]]) == (600, [255, 256, 257])
    assert [row["index"] for row in page["rows"]] == [255, 256, 257] and len(page["rows"][0]["response"]) < 400
    sample = answers.sample({"step": "9", "row": "256"})
    assert sample["tokens"] == rows[256]["tokens"] and sample["prompt_length"] == 3
    assert sample["engine_log_probs"] == pytest.approx(rows[256]["engine_log_probs"], abs=1e-5)
    assert sample["weight_versions"] == ["9"] * 4 and len(sample["response"]) == 1000
    # Rows of a large file are checked as they are shown.
    rows[300]["loss_mask"] = [0, 1, 1, 1]
    write_file(run / DIRECTORY / "000009.parquet", rows)
    marked = answers_about(run).samples({"step": "9", "start": "256"})["rows"]
    assert [row["row"] for row in marked if "mask" in row["findings"]] == [300]
    assert answers_about(run).sample({"step": "9", "row": "300"})["findings"][0]["row"] == 300
    evaluation = answers.samples({"step": "6", "kind": "eval"})["rows"]
    assert [(row["dataset"], row["response"]) for row in evaluation] == [("gsm", "21")]


def test_samples_before_and_after_are_of_the_same_prompts(tmp_path: Path) -> None:
    found = answers_about(make_run(tmp_path / "run")).pairs({})
    assert (found["before"], found["after"], found["eval"]) == (0, 6, True)
    assert [(old["response"], new["response"]) for old, new in found["pairs"]] == [("9", "21")]


def test_settings_differ_where_their_values_do(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", settings="num_rollout: 6\n")
    two = make_run(tmp_path / "two", settings="num_rollout: 8\ncolocate: true\n")
    rows = {row["name"]: row for row in answers_about(one, two).settings({})}
    assert rows["num_rollout"] == {"name": "num_rollout", "values": ["6", "8"], "given": True, "differs": True}
    assert rows["colocate"]["values"] == [None, "True"]
    assert (rows["lr"]["values"], rows["lr"]["given"], rows["lr"]["differs"]) == (["1e-06", "1e-06"], False, False)


def test_the_overview_says_how_a_run_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "logs").mkdir()
    (run / "logs" / "rollout.log").write_text("fine\nERROR the engine died\nof hunger\n")
    with pytest.raises(ValueError), recorded(run, "train") as state:
        state.phase("generating 3/8", num_steps=6)
        going = answers_about(run).overview({})[0]
        assert (going["state"], going["phase"], going["step"], going["num_steps"]) == (
            "running",
            "generating 3/8",
            5,
            6,
        )
        raise ValueError("no engine")
    failed = answers_about(run).overview({})[0]
    assert (failed["state"], failed["error"]) == ("failed", "ValueError: no engine")
    assert failed["logs"] == [{"log": "rollout.log", "lines": ["ERROR the engine died", "of hunger"]}]
    assert failed["scores"] == {"gsm": [(0, 0.25), (6, 0.75)]} and failed["model"] == "tiny"


def test_every_row_of_a_large_file_is_checked_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers_module, "CHECKED_ROWS", 10)
    monkeypatch.setattr(answers_module, "CHECK_SECONDS", 0.0)
    run = make_run(tmp_path / "run", steps=1)
    rows = [row for number in range(12) for row in group(0, number)]
    rows[3]["loss_mask"] = rows[47]["loss_mask"] = [0, 1, 1, 1]
    rows[40]["tokens"] = rows[41]["loss_mask"] = rows[41]["engine_log_probs"] = None
    write_file(run / DIRECTORY / "000000.parquet", rows)
    answers, calls = answers_about(run), 1
    while (found := answers.checks({}))["checked"] < found["files"]:
        calls += 1
    assert calls >= 5
    places = [(finding["check"], finding["row"]) for finding in found["findings"] if not finding["eval"]]
    assert sorted(places) == [("mask", 3), ("mask", 47), ("numbers", 40)]
    assert answers.samples({"step": "0", "start": "47"})["rows"][0]["findings"] == ["mask"]


def test_long_samples_are_checked_in_small_memory(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1)
    length = 100_000
    long = {"tokens": np.zeros(length, np.int32), "response_length": length, "loss_mask": np.ones(length, np.uint8)}
    for name in ("engine_log_probs", "trainer_log_probs"):
        long[name] = np.full(length, -1.0, np.float32)
    spans = [{"start": 0, "end": length, "weight_version": "0"}]
    write_file(run / DIRECTORY / "000000.parquet", [row | long | {"spans": spans} for row in group(0, 0, 64)])
    answers = answers_about(run)
    tracemalloc.start()
    assert checked(answers)["findings"] == []
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6  # 83 MB of numbers, which as objects were 800


def test_a_file_that_a_resumed_run_writes_again_is_checked_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    answers = answers_about(run)
    assert checked(answers)["findings"] == []
    rows = group(5)
    rows[0]["loss_mask"] = [0, 1, 1, 1]
    write_file(run / DIRECTORY / "000005.parquet", rows)
    assert [row["findings"] for row in answers.samples({"step": "5"})["rows"]] == [["mask"], [], [], []]


@pytest.mark.parametrize(
    ("name", "query", "words"),
    [
        ("nothing", {}, "request"), ("curves", {"run": "1"}, "run"), ("curves", {"run": "-1"}, "run"),
        ("samples", {"step": "77"}, "step"), ("sample", {"step": "1", "row": "99"}, "row"),
        ("samples", {"step": "../1"}, "step"),
    ],
)  # fmt: skip
def test_a_request_that_does_not_fit_is_refused(tmp_path: Path, name: str, query: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        answers_about(make_run(tmp_path / "run")).answer(name, query)


def test_runs_are_found_below_a_directory_and_have_names_of_their_own(tmp_path: Path) -> None:
    for name in ("a/one", "b/one", "two"):
        make_run(tmp_path / name, steps=1)
    (tmp_path / "empty").mkdir()
    paths = find_runs(tmp_path)
    assert [str(path.relative_to(tmp_path)) for path in paths] == ["a/one", "b/one", "two"]
    assert list(names(paths)) == ["a/one", "b/one", "two"] and find_runs(tmp_path / "two") == [tmp_path / "two"]
    with pytest.raises(InvalidSetting, match="not the directory of a run"):
        RunFiles(tmp_path / "empty")


def test_files_are_checked_evenly_spread() -> None:
    files = list(range(100))
    order = spread(files)  # type: ignore[arg-type]
    assert sorted(order) == files
    for count in (4, 10, 30):
        done = sorted(order[:count])  # type: ignore[type-var]
        assert max(b - a for a, b in zip(done, [*done[1:], 100], strict=True)) <= 4 * 100 / count  # type: ignore
    assert ranges([0, 1, 2, 5, 7, 8]) == [[0, 2], [5, 5], [7, 8]]
