"""A run does not write over what another one, or somebody else, has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher import cli
from slime.launcher.config import run_config
from slime.launcher.doctor import run as doctor_run
from slime.launcher.doctor.finding import Subject
from slime.launcher.quickstart import reverse
from slime.launcher.run_directory import checkpoints
from slime.launcher.run_directory.earlier_run import check_unused, overwrite, resumes
from slime.launcher.run_directory.kept_samples import KeptSamples
from slime.launcher.run_directory.lock import run_directory
from slime.launcher.run_directory.state import recorded
from slime.rollout.recordings.rollouts import write_rollout
from slime.types import Sample
from slime.types.directories import whole_directory
from slime.types.errors import InvalidSetting, MissingFile


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    model = tmp_path / "hf"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (tmp_path / "p.jsonl").write_text('{"input": "1 + 1"}\n')
    return ["--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "p.jsonl"), "--num-rollout", "4",
            "--n-samples-per-prompt", "2", "--save-interval", "2", "--output-dir", str(tmp_path / "out")]  # fmt: skip


def model_at(path: Path, state: bool = False) -> Path:
    with whole_directory(path, "test") as partial:
        (partial / "config.json").write_text("{}")
        if state:
            (partial / "trainer.json").write_text("{}")
    return path


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """An output directory as a run leaves it, with a file of the user's."""
    out = tmp_path / "out"
    model_at(out / "model")
    for step in (1, 3):
        model_at(out / "checkpoints" / f"step_{step:06d}", state=True)
    (out / "metrics.jsonl").write_text('{"step": 0}\n')
    (out / "tensorboard").mkdir()
    (out / "tensorboard" / "events.out.tfevents.1").touch()
    (out / "notes.txt").write_text("precious")
    return out


def test_a_used_directory_is_refused_with_the_ways_on(words: list[str], used: Path) -> None:
    config = run_config.parse(words)
    with pytest.raises(InvalidSetting) as told:
        check_unused(config)
    message = str(told.value)
    for part in (f"--output-dir {used}", "metrics.jsonl", "model", f"--load {used}/checkpoints", "--overwrite"):
        assert part in message
    # A run that failed before its first step has left nothing that could be lost.
    for path in (used / "metrics.jsonl", *checkpoints.steps(used / "checkpoints").values(), used / "model"):
        path.rename(used.parent / f"moved-{path.name}")
    check_unused(config)


def test_train_refuses_it_before_anything_starts_and_says_nothing_else(
    words: list[str], used: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(used.rglob("*"))
    assert cli.main(["train", *words]) == 2
    assert "an earlier run left" in capsys.readouterr().err
    assert sorted(used.rglob("*")) == before


@pytest.mark.parametrize("load", ["checkpoints", "checkpoints/step_000001", ""])
def test_a_run_that_resumes_its_own_checkpoint_goes_on(words: list[str], used: Path, load: str) -> None:
    (used / "trainer.json").write_text("{}")
    config = run_config.parse([*words, "--load", str(used / load)])
    assert resumes(config)
    check_unused(config)


@pytest.mark.parametrize("flag", ["--load", "--save"])
def test_what_the_start_would_delete_is_not_what_to_keep(words: list[str], used: Path, flag: str) -> None:
    model_at(used / "recovery" / "step_000005", state=True)
    with pytest.raises(InvalidSetting, match=rf"{flag} .*restart points, which are deleted .*move it elsewhere"):
        run_config.parse([*words, flag, str(used / "recovery")])
    run_config.parse([*words, flag, str(used / "recovery"), "--output-dir", str(used.parent / "other")])


def test_a_run_from_elsewhere_is_no_resumption(words: list[str], used: Path, tmp_path: Path) -> None:
    other = model_at(tmp_path / "other" / "step_000009", state=True)
    config = run_config.parse([*words, "--load", str(other)])
    with pytest.raises(InvalidSetting, match="an earlier run left"):
        check_unused(config)


def test_checkpoints_exports_and_dumps_elsewhere_are_results_too(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "7.rollout").write_text("recorded")
    cases = {
        model_at(tmp_path / "save" / "step_000001", state=True): ["--save", str(tmp_path / "save")],
        model_at(tmp_path / "hf-3"): ["--save-hf", str(tmp_path / "hf-{rollout_id}")],
        model_at(tmp_path / "latest"): ["--save-hf", str(tmp_path / "latest")],
        tmp_path / "rollouts" / "7.rollout": [
            "--save-debug-rollout-data",
            f"{tmp_path}/rollouts/{{rollout_id}}.rollout",
        ],
    }
    for path, more in cases.items():
        with pytest.raises(InvalidSetting, match=f"an earlier run left .*{path}"):
            check_unused(run_config.parse([*words, *more]))
        check_unused(run_config.parse([*words, *more, "--overwrite"]))
    check_unused(run_config.parse(words))


@pytest.mark.parametrize("name", ["data.pt", "eval_data.pt"])
def test_one_file_of_all_iterations_is_a_result_and_never_replaces_that_of_somebody_else(
    name: str, words: list[str], tmp_path: Path
) -> None:
    more = ["--save-debug-rollout-data", str(tmp_path / "data.pt")]
    write_rollout(tmp_path / name, 0, [])
    with pytest.raises(InvalidSetting, match=f"an earlier run left {tmp_path}/{name};"):
        check_unused(run_config.parse([*words, *more]))
    check_unused(run_config.parse([*words, *more, "--overwrite"]))
    (tmp_path / name).write_text("precious")
    with pytest.raises(InvalidSetting, match=f"--save-debug-rollout-data: .*/{name} is not a recorded rollout, and is"):
        run_config.parse([*words, *more, "--overwrite"])
    other = ["--save-debug-train-data", words[words.index("--prompt-data") + 1], "--overwrite"]
    with pytest.raises(InvalidSetting, match=r"--save-debug-train-data: .*/p.jsonl is not a file of training data"):
        run_config.parse([*words, *other])


def test_samples_and_the_state_are_results_that_overwrite_removes(words: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in range(6):
        KeptSamples(out, None).write(step, [Sample(index=step)])
    (out / "samples" / "notes.txt").write_text("precious")
    with recorded(out, "train"):
        pass
    config = run_config.parse(words)
    with pytest.raises(InvalidSetting, match="an earlier run left samples;"):
        check_unused(config)
    overwrite(config)
    assert sorted(path.name for path in out.rglob("*")) == ["notes.txt", "samples"]
    check_unused(config)


def test_overwrite_removes_what_the_run_wrote_and_no_more(words: list[str], used: Path) -> None:
    config = run_config.parse([*words, "--overwrite"])
    check_unused(config)
    overwrite(config)
    left = sorted(path.relative_to(used).as_posix() for path in used.rglob("*"))
    assert left == ["checkpoints", "notes.txt", "tensorboard"]


def test_overwrite_stops_at_what_somebody_added(words: list[str], used: Path) -> None:
    (used / "model" / "results.csv").write_text("precious")
    with pytest.raises(InvalidSetting, match="--output-dir: .*model holds what slime did not write .results.csv"):
        run_config.parse([*words, "--overwrite"])


def test_an_evaluation_alone_works_on_a_used_directory(words: list[str], used: Path) -> None:
    held = ["--eval-prompt-data", "held", words[3]]
    check_unused(run_config.parse([*words, "--num-rollout", "0", *held]))


def test_a_dry_run_prints_its_plan_and_ends_as_the_run_would(
    words: list[str], used: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slime.launcher.plan.report.dry_run", lambda *_, **__: ("the plan\n", True))
    monkeypatch.setattr("slime.launcher.doctor.preflight.check_start", lambda _: [])
    assert cli.main(["train", *words, "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "the plan\n" and shown.err.startswith("slime: error: --output-dir ")
    assert "an earlier run left" in shown.err
    assert cli.main(["train", *words, "--dry-run", "--overwrite"]) == 0
    assert capsys.readouterr().err == ""


def test_the_doctor_warns_of_it(words: list[str], used: Path) -> None:
    config = run_config.parse(words, check=False)
    findings = list(doctor_run._earlier_run(Subject(config.flat, frozenset(), config)))
    assert [finding.status for finding in findings] == ["warn"] and "an earlier run left" in findings[0].what


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--save-hf", "HERE/mine"], "--save-hf: HERE/mine holds what slime did not write"),
        (["--save-hf", "HERE/mine", "--hf-checkpoint", "HERE/none"], "--save-hf: HERE/mine holds what slime did not"),
        (
            ["--load-debug-rollout-data", "HERE/{rollout_id}.none"],
            "--load-debug-rollout-data: no such file HERE",
        ),
        (["--ref-load", "HERE/mine"], "--ref-load: HERE/mine has no config.json"),
        (
            ["--use-opd", "--opd-type", "trainer", "--opd-teacher-load", "HERE/none"],
            "--opd-teacher-load: no such directory HERE/none",
        ),
    ],
)
def test_the_doctor_finds_what_a_run_refuses(words: list[str], tmp_path: Path, more: list[str], message: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious")
    here = [*words, *(word.replace("HERE", str(tmp_path)) for word in more)]
    config = run_config.parse(here, check=False)
    found = [finding.what for finding in doctor_run._files(Subject(config.flat, frozenset(), config))]
    assert len(found) == 1 and found[0].startswith(message.replace("HERE", str(tmp_path))), found


@pytest.mark.parametrize("flag", ["--save-hf", "--output-dir", "--save"])
def test_what_somebody_else_has_there_is_refused_by_name(words: list[str], tmp_path: Path, flag: str) -> None:
    paths = {
        "--save-hf": tmp_path / "mine-1", "--output-dir": tmp_path / "out" / "model",
        "--save": tmp_path / "save" / "step_000001",
    }  # fmt: skip
    more = ["--save-hf", str(tmp_path / "mine-{rollout_id}"), "--save", str(tmp_path / "save")]
    run_config.parse([*words, *more])
    path = paths[flag]
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(tmp_path)
    with pytest.raises(InvalidSetting, match=f"{flag}: {path} is a symbolic link"):
        run_config.parse([*words, *more])
    path.unlink()
    path.mkdir()
    run_config.parse([*words, *more])
    (path / "notes.txt").write_text("precious")
    with pytest.raises(InvalidSetting, match=rf"{flag}: {path} holds what slime did not write \(notes.txt\)") as told:
        run_config.parse([*words, *more])
    assert told.value.field == flag


def test_what_a_resumed_run_does_not_reach_may_be_anything(words: list[str], used: Path) -> None:
    (used / "checkpoints" / "step_000001" / "notes.txt").write_text("precious")
    run_config.parse([*words, "--load", str(used / "checkpoints")])
    with pytest.raises(InvalidSetting, match="step_000001 holds"):
        run_config.parse([*words, "--overwrite"])


def test_pruning_leaves_a_checkpoint_with_somebodys_files(used: Path) -> None:
    (used / "checkpoints" / "step_000001" / "notes.txt").write_text("precious")
    model_at(used / "checkpoints" / "step_000005", state=True)
    gone = checkpoints.prune(used / "checkpoints", keep=1, retain_interval=None)
    assert [path.name for path in gone] == ["step_000003"]
    assert sorted(path.name for path in (used / "checkpoints").iterdir()) == ["step_000001", "step_000005"]


def test_loading_what_was_not_saved_yet_starts_anew(words: list[str], tmp_path: Path) -> None:
    for more in (["--load", str(tmp_path / "save"), "--save", str(tmp_path / "save")],
                 ["--load", str(tmp_path / "out" / "checkpoints")]):  # fmt: skip
        config = run_config.parse([*words, *more])
        assert config.trainer.load is None and config.flat["load_root"] == more[1]
        # A run that was killed before its first checkpoint is begun again.
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 0}\n')
        check_unused(config)
        model_at(tmp_path / "out" / "model")
        with pytest.raises(InvalidSetting, match="an earlier run left"):
            check_unused(config)
        (tmp_path / "out" / "model").rename(tmp_path / f"moved{len(more)}")
    (tmp_path / "save").write_text("")
    with pytest.raises(MissingFile, match="--load"):
        run_config.parse([*words, "--load", str(tmp_path / "save"), "--save", str(tmp_path / "save")])


def test_a_quickstart_keeps_the_prompts_that_it_finds(tmp_path: Path) -> None:
    reverse.write_data(tmp_path, 0)
    reverse.write_data(tmp_path, 0)
    with pytest.raises(InvalidSetting, match="train.jsonl holds other prompts"):
        reverse.write_data(tmp_path, 1)


def test_the_directory_of_a_failed_start_goes_again(tmp_path: Path) -> None:
    with pytest.raises(KeyError), run_directory(tmp_path / "out"):
        raise KeyError
    assert not (tmp_path / "out").exists()
    with run_directory(tmp_path / "out"):
        (tmp_path / "out" / "log").touch()
    assert (tmp_path / "out" / "log").exists()


@pytest.mark.parametrize("flags_", [("--load",), ("--save",), ("--load", "--save"), ("--output-dir",), ("--save-hf",)])
@pytest.mark.parametrize("below", ["", "/x"])
def test_a_loop_of_links_is_refused_by_name(
    words: list[str], tmp_path: Path, flags_: tuple[str, ...], below: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    given = [word for flag in flags_ for word in (flag, f"{tmp_path}/a{below}")]
    assert cli.main(["train", *words, *given]) == 2
    message = capsys.readouterr().err
    assert any(message.startswith(f"slime: error: {flag}") for flag in flags_) and f"{tmp_path}/a" in message


@pytest.mark.parametrize("flag", ["--save-hf", "--save", "--output-dir", "--buffer-dir"])
@pytest.mark.parametrize("name", ["x", "x/y", "{rollout_id}"])
def test_a_place_that_takes_no_directories_is_refused_before_the_run_even_to_root(
    words: list[str], flag: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--save-interval", "1", flag, f"/proc/{name}"]
    assert cli.main(["train", *words, *given]) == 2
    found = capsys.readouterr().err
    assert found.startswith(f"slime: error: {flag}") and "/proc" in found


def test_a_run_whose_database_does_not_answer_is_refused_before_it_starts(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--buffer-dir", str(tmp_path / "samples"), "--buffer-store", f"postgresql:///none?host={tmp_path}"]
    assert cli.main(["train", *words, "--dry-run", *store]) == 2
    assert capsys.readouterr().err.startswith("slime: error: --buffer-store postgresql:///none: ")


def test_checking_a_place_leaves_nothing_there(words: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    run_config.parse(
        [*words, "--save-hf", str(tmp_path / "models" / "{rollout_id}"), "--buffer-dir", str(tmp_path / "b")]
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_ctrl_c_while_trackers_are_imported_leaves_no_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("slime.launcher.metrics.sinks.registry.open_sinks", interrupted)
    monkeypatch.setattr("slime.launcher.doctor.preflight.check_start", lambda config: [])
    assert cli.main(["train", *words]) == 130
    assert not (tmp_path / "out").exists()
