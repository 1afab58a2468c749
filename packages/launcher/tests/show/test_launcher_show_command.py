"""`slime runs`, `slime compare` and `slime show --text`, as commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher_run_files import Row, checked, make_run

from slime.launcher.cli import main
from slime.launcher.run_directory.state import recorded
from slime.launcher.show.answers import Answers
from slime.launcher.show.run_files import RunFiles


def shift(rows: list[Row]) -> None:
    for row in rows:
        row["loss_mask"] = [0, 1, 1, 1]


def test_runs_lists_state_progress_reward_and_scores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "one")
    two = make_run(tmp_path / "below" / "two", settings="num_rollout: 9\n")
    with pytest.raises(KeyboardInterrupt), recorded(two, "train"):
        raise KeyboardInterrupt
    assert main(["runs", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "steps", "reward", "scores", "age", "model"]
    rows = {line.split()[0]: line.split() for line in lines[1:]}
    assert rows["two"][1:7] == ["stopped", "6/9", "0.04", "gsm", "0.250", "→"] and rows["one"][1:3] == [
        "unknown",
        "6/6",
    ]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["two"]["state"] == "stopped" and found["two"]["scores"] == {"gsm": {"first": 0.25, "last": 0.75}}
    assert found["one"]["reward"] == pytest.approx(0.04) and found["one"]["model"] == "tiny"


def test_a_single_evaluation_shows_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    late = [row for row in rows if "eval/gsm" not in row or row["step"]]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in late))
    assert main(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "gsm 0.750" in out and "→" not in out
    assert main(["compare", str(run), str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"] == {"gsm": [[None, 0.75], [None, 0.75]]}
    assert main(["compare", str(run), str(run)]) == 0
    assert ["gsm", "0.75", "0.75"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_run_that_started_after_now_has_no_age(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    with recorded(run, "train"):
        pass
    state = json.loads((run / "state.json").read_text())
    (run / "state.json").write_text(json.dumps(state | {"started": state["started"] + 86400}))
    assert main(["runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["age_seconds"] is None
    assert main(["runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["-", "tiny"]


def test_compare_shows_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", 3, settings="num_rollout: 3\nseed: 5\n")
    assert main(["compare", str(one), str(two)]) == 0
    out = capsys.readouterr().out
    assert "seed" in out and "rollout/raw_reward  0.04  0.01" in out and "lr" not in out
    assert main(["compare", str(one), str(two), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"] == {"num_rollout": [6, 3], "seed": [None, 5]}
    assert found["scores"] == {"gsm": [[0.25, 0.75]] * 2}
    assert main(["compare", str(one)]) == 2 and "at least two" in capsys.readouterr().err


def test_show_text_prints_state_findings_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", fault=shift)
    assert main(["show", str(run), "--text", "--step", "3"]) == 0
    out = capsys.readouterr().out
    for part in (
        "run: unknown, 6 of 6 steps", "Loss mask       8 found", "'21'   [mask]", "0.25 after 0, 0.75 after 6",
        "step 3, sample 0: does not train on response token 0",
    ):  # fmt: skip
        assert part in out, out


def test_a_file_of_samples_that_cannot_be_read_hides_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    newest = max(path for path in (run / "samples").iterdir() if path.name[0].isdigit())
    newest.write_bytes(b"")
    assert main(["show", str(run), "--text"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run: unknown, 6 of 6 steps") and "reward  " in out and "checks of" in out
    assert f"step {int(newest.stem)}: cannot read samples/{newest.name}" in out


def test_a_finding_names_a_sample_by_its_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def renumber(rows: list[Row]) -> None:
        shift(rows)
        for row in rows:
            row["index"] += 4000

    run = make_run(tmp_path / "run", fault=renumber)
    assert main(["show", str(run), "--text"]) == 0
    assert "step 3, sample 4000: does not train" in capsys.readouterr().out
    # Its row leads to it on the page.
    assert [(f["row"], f["index"]) for f in checked(Answers([RunFiles(run)]))["findings"]][:2] == [(0, 4000), (1, 4001)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "nowhere"], "nowhere: not the directory of a run: there is no such directory"),
        (["show", "FILE"], "metrics.jsonl: not the directory of a run: it is not a directory"),
        (["show", "LOOP"], "loop: not the directory of a run: there is no such directory"),
        (["compare", "RUN", "LOOP"], "loop: not the directory of a run"),
        (["runs", "nowhere"], "nowhere: no such directory"),
        (["runs", "FILE"], "metrics.jsonl: is not a directory; name the directory that holds"),
        (["show", "ABOVE"], "lists the runs below it"),
        (["show", "RUN", "--text", "--step", "88"], "--step must be a step of which samples were kept, got 88"),
        (["show", "RUN", "--text", "--step", "-5"], "--step must be at least 0, got -5"),
        (["show", "RUN", "--step", "0"], "--step 0 requires --text"),
        (["show", "RUN", "--text", "--html", "page.html"], "--text and --html page.html cannot be used together"),
        (["show", "RUN", "--html", "."], "--html"),
        (["show", "RUN", "--port", "99999"], "--port must be from 0 to 65535, got 99999"),
        (["show", "RUN", "--text", "--port", "0"], "--text and --port 0 cannot be used together"),
        (["show", "RUN", "--html", "x.html", "--no-browser"], "--html and --no-browser cannot be used together"),
        (["sho", "x"], "did you mean show?"),
        (["show"], "slime: error: RUN is required"),
        (["show", "RUN", "--stp", "3"], "unknown option --stp; did you mean --step?"),
        (["show", "RUN", "--step", "last"], "--step must be an integer, got 'last'"),
        (["runs", "--jsn"], "unknown option --jsn; did you mean --json?"),
    ],
)
def test_a_wrong_argument_is_one_line(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    (tmp_path / "loop").symlink_to("loop")
    places = {
        "RUN": str(run), "ABOVE": str(tmp_path), "FILE": str(run / "metrics.jsonl"), "LOOP": str(tmp_path / "loop"),
    }  # fmt: skip
    assert main([places.get(word, word) for word in words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_run_that_is_compared_with_itself_is_named_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(make_run(tmp_path / "run"))
    assert main(["compare", run, run, "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["runs"]} == {run}


def test_a_reader_that_has_had_enough_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=40)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = f"{sys.executable} -m slime.launcher.cli show {run} --text | head -n 1"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("run: ") and done.stderr == ""


def test_looking_at_runs_imports_neither_torch_nor_ray(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code = (
        "import sys\nfrom slime.launcher.cli import main\n"
        f"main(['runs', {str(tmp_path)!r}]); main(['show', {str(run)!r}, '--html', {str(tmp_path / 'x.html')!r}])\n"
        "assert not {'torch', 'ray', 'transformers'} & set(sys.modules), sorted(sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
