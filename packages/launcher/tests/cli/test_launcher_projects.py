"""`slime init`, `resume`, `eval`, `export` and `chat`, as far as they do without a run; tests/e2e has the rest."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.converters.convert import to_hf
from slime.launcher import cli
from slime.launcher.cli import export
from slime.launcher.cli.chat import most_tokens
from slime.launcher.cli.evaluate import collect, evaluation_settings, score, words_of
from slime.launcher.cli.export import model_of, name_of
from slime.launcher.cli.init import write_project
from slime.launcher.cli.recorded_run import RecordedRun, read_run
from slime.launcher.cli.resume import resumed
from slime.launcher.config import run_config
from slime.launcher.config.record import write_record
from slime.launcher.hub import fetch
from slime.launcher.placement.plan import plan_placement
from slime.launcher.run_directory.state import RunState
from slime.rollout.metrics import evaluation_metrics
from slime.rollout.recordings.rollouts import record_evaluation
from slime.types import Sample
from slime.types.errors import InvalidSetting, MissingFile

NUM_GPUS = 0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project of `slime init`, the working directory of this module's tests."""
    directory = tmp_path_factory.mktemp("work") / "mine"
    write_project(directory)
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield directory
    finally:
        os.chdir(before)


MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(project: Path) -> MakeRun:
    """make_run(*FLAGS) records a run of the project in runs/NAME, and gives its directory."""

    def make(*flags: str, state: str = "stopped", checkpoints: tuple[int, ...] = ()) -> Path:
        run = Path("runs") / str(len(list(Path("runs").glob("*"))))
        run.mkdir(parents=True)
        words = ["config.yaml", *flags, "--output-dir", str(run)]
        write_record(run, run_config.parse(words, check=False), ["slime", "train", *words])
        recorded = RunState(run, "train")
        if state != "running":
            recorded.end(state)
        for step in checkpoints:
            (run / "checkpoints" / f"step_{step:06d}").mkdir(parents=True)
            (run / "checkpoints" / f"step_{step:06d}" / "trainer.json").write_text("{}")
        return run

    return make


def test_a_project_is_a_run_that_passes_its_checks(project: Path) -> None:
    config = run_config.parse(["config.yaml"])
    assert config.launcher.num_rollout == 40 and config.buffer.evaluation_sets() == {"multiples": "data/prompts.jsonl"}
    assert "slime train config.yaml" in (project / "README.md").read_text()
    assert (project / "README.md").read_text().startswith("# mine\n")


@pytest.mark.parametrize("kind", ["file", "full"])
def test_a_project_replaces_nothing(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "mine"
    kept = place if kind == "file" else place / "notes.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("mine")
    assert cli.main(["init", str(place)]) == 2
    assert capsys.readouterr().err == f"slime: error: NAME must be a new or an empty directory, got '{place}'\n"
    assert kept.read_text() == "mine" and not (place / "config.yaml").exists()


def test_the_next_commands_of_a_project_fit_a_name_with_a_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "my project"]) == 0
    assert "  cd 'my project'\n" in capsys.readouterr().out


def test_a_run_is_resumed_with_its_settings_from_the_newest_checkpoint(make_run: MakeRun) -> None:
    run = make_run("--lr", "0.5", "--run-name", "named", checkpoints=(19, 39))
    words = resumed(read_run(run), ["--watch"])
    config = run_config.parse(words)
    assert config.trainer.lr == 0.5 and config.launcher.run_name == "named" and config.launcher.watch
    assert config.trainer.load == str(run.absolute() / "checkpoints" / "step_000039")
    assert config.output_dir == run.absolute()


def test_a_resume_takes_the_newest_checkpoint_though_an_earlier_one_chose_a_step(make_run: MakeRun) -> None:
    run = make_run("--load", "x", "--ckpt-step", "19", checkpoints=(19, 39))
    config = run_config.parse(resumed(read_run(run), []))
    assert config.trainer.load == str(run.absolute() / "checkpoints" / "step_000039")


@pytest.mark.parametrize(
    ("state", "checkpoints", "flags", "message"),
    [
        ("running", (19,), (), r"is alive: process \d+ on .*, starting; stop it first"),
        ("done", (19,), (), "finished; to continue it, give a larger --num-rollout"),
        ("stopped", (), (), "it ended before iteration 20, the first to be saved"),
        ("failed", (), ("--save-interval", "7"), "before iteration 7"),
    ],
)
def test_a_run_that_cannot_go_on_is_refused(
    make_run: MakeRun, state: str, checkpoints: tuple[int, ...], flags: tuple[str, ...], message: str
) -> None:
    run = make_run(*flags, state=state, checkpoints=checkpoints)
    with pytest.raises(InvalidSetting, match=message):
        resumed(read_run(run), [])


def test_a_run_that_ended_goes_on_with_more_iterations(make_run: MakeRun) -> None:
    run = make_run(state="done", checkpoints=(39,))
    assert run_config.parse(resumed(read_run(run), ["--num-rollout", "60"])).launcher.num_rollout == 60
    for words in (["--num-rollout", "40"], ["--num-rollout=7"]):
        with pytest.raises(InvalidSetting, match=r"--num-rollout must be more than the 40 iterations that RUN .* has"):
            resumed(read_run(run), words)


def test_a_directory_of_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["resume", str(tmp_path)]) == 2
    assert "expected the output directory of a run, with run.yaml" in capsys.readouterr().err
    assert cli.main(["resume", str(tmp_path / "none")]) == 2
    assert "none: no such directory; `slime runs DIR` lists the runs below DIR" in capsys.readouterr().err
    (tmp_path / "run.yaml").write_bytes(b"\xbb")
    assert cli.main(["resume", str(tmp_path)]) == 2 and "run.yaml: not YAML" in capsys.readouterr().err


def test_an_evaluation_of_a_run_has_its_reward_and_columns_wherever_it_is_started(
    project: Path, make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run("--save-interval", "5", "--over-sampling-batch-size", "64"))
    (run.path / "model").symlink_to(project / "model")
    monkeypatch.chdir(tmp_path)
    settings = evaluation_settings(run)
    assert settings["custom_rm_path"] == f"{project}/reward.py:reward"
    assert settings["eval_prompt_data"] == [["multiples", f"{project}/data/prompts.jsonl"]]
    assert settings["label_key"] == "label" and settings["rollout_max_response_len"] == 3
    assert not settings.keys() & {"save_interval", "lr", "over_sampling_batch_size", "prompt_data"}
    config = run_config.parse(words_of(str(run.model()), run, None, ["--eval-temperature", "1"], tmp_path / "out"))
    assert config.launcher.num_rollout == 0 and config.rollout.eval_temperature == 1
    assert config.rollout.hf_checkpoint == str(run.path / "model")
    other = words_of(str(run.model()), run, f"{project}/data/prompts.jsonl@[:2]", [], tmp_path / "out", with_sets=False)
    assert run_config.parse(other).buffer.evaluation_sets() == {"prompts": f"{project}/data/prompts.jsonl@[:2]"}


def test_an_evaluation_of_a_run_has_its_gpus_evaluator_and_attributes(
    project: Path, make_run: MakeRun, tmp_path: Path
) -> None:
    (project / "custom.yaml").write_text("threshold: 0.5\nnum_rollout: 30\nn_samples_per_eval_prompt: 2\n")
    (project / "own.py").write_text("def rollout(args, rollout_id, data_source, evaluation=False): ...\n")
    flags = ["--colocate", "--actor-num-gpus-per-node", "8", "--rollout-num-gpus-per-engine", "2"]
    flags += ["--custom-config-path", "custom.yaml", "--rollout-function-path", "own.py:rollout"]
    run = read_run(make_run(*flags))
    (run.path / "model").symlink_to(project / "model")
    words = words_of(str(run.model()), run, None, ["--n-samples-per-eval-prompt", "4"], tmp_path / "out")
    config = run_config.parse(words)
    (engines,) = plan_placement(config.launcher, config.rollout, 8).engines
    assert engines.gpus == 8 and plan_placement(config.launcher, config.rollout, 0).engines[0].embedded == 1
    assert config.rollout.eval_function_path == f"{project}/own.py:rollout"
    assert config.flat["threshold"] == 0.5 and config.launcher.num_rollout == 0
    assert config.flat["n_samples_per_eval_prompt"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "RUN|MODEL is required"),
        (["model"], "DATA is required: a model alone has no evaluation sets"),
        (["nowhere"], "RUN|MODEL nowhere: no such directory"),
        (["model", "a.jsonl", "b.jsonl"], "unexpected argument 'b.jsonl'"),
        (["model", "a.jsonl", "--eval-prompt-data", "b.jsonl"], "DATA a.jsonl and --eval-prompt-data cannot be used"),
        (["model", "data/prompts.jsonl", "--rm-typ", "math"], "unknown option --rm-typ; did you mean --rm-type?"),
        (["model", "held_out.jsonl", "--rm-type", "math"], "error: DATA: no such file held_out.jsonl"),
        (["nowhere", "data/prompts.jsonl", "--rm-type", "math"], "RUN|MODEL nowhere: no such directory"),
        (["data", "data/prompts.jsonl", "--rm-type", "math"], "RUN|MODEL data: neither the output directory of a run"),
    ],
)
def test_a_wrong_evaluation_is_told_at_once(
    project: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["eval", *words]) == 2
    assert message in capsys.readouterr().err


def rows(groups: list[list[float]]) -> list[dict[str, float]]:
    return [{"group_index": number, "score": value} for number, group in enumerate(groups) for value in group]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(st.floats(0, 1), min_size=n, max_size=n), min_size=2)))
def test_the_error_of_a_score_is_that_of_the_mean_of_its_prompts(groups: list[list[float]]) -> None:
    means = [statistics.fmean(group) for group in groups]
    found = score(rows(groups))
    assert found.mean == pytest.approx(statistics.fmean(means), abs=1e-12)
    assert found.error == pytest.approx(statistics.stdev(means) / len(means) ** 0.5, abs=1e-9)
    assert (found.prompts, found.samples) == (len(groups), sum(map(len, groups)))


def test_a_recorded_evaluation_becomes_rows_with_the_score_that_the_reward_key_names(
    project: Path, tmp_path: Path
) -> None:
    rewards: list[Any] = [{"score": 1.0, "length": 3}, {"score": 0.0, "length": 9}]
    samples = [
        Sample(
            prompt="7:", response="28", label="7", index=i, group_index=i // 2, reward=reward, tokens=[1], metadata={}
        )
        for i, reward in enumerate(rewards)
    ]
    template = str(tmp_path / "recorded-{rollout_id}")
    record_evaluation(template, 0, {"held": {"samples": samples}})
    config = run_config.parse(["config.yaml", "--reward-key", "score", "--eval-reward-key", "length"])
    found = collect(tmp_path, config)
    assert [row["score"] for row in found] == [3.0, 9.0] and [row["reward"] for row in found] == rewards
    assert [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()] == found
    assert score(found)[:1] == (6.0,) and math.isnan(score(found).error)
    assert not list(tmp_path.glob("recorded-*"))


def test_segments_of_a_sample_count_once_and_an_episode_that_failed_is_worth_nothing(
    project: Path, tmp_path: Path
) -> None:
    values = [(0, 0, 1.0), (0, 0, 1.0), (0, 0, 1.0), (0, 1, 0.0), (1, 2, None), (1, 3, 1.0)]
    samples = [
        Sample(prompt="7:", response="x", index=i, group_index=group, rollout_id=rollout, reward=reward, tokens=[1])
        for i, (group, rollout, reward) in enumerate(values)
    ]
    record_evaluation(str(tmp_path / "recorded-{rollout_id}"), 0, {"held": {"samples": samples}})
    found = score(collect(tmp_path, run_config.parse(["config.yaml"])))
    assert (found.mean, found.prompts, found.samples) == (0.5, 2, 4)
    rewards = [reward or 0.0 for _, _, reward in values]
    args = SimpleNamespace(n_samples_per_eval_prompt=1, log_passrate=False, log_reward_category=None)
    trained = evaluation_metrics({"held": {"rewards": rewards, "samples": samples}}, args)
    assert trained["eval/held"] == found.mean


def test_the_score_of_one_prompt_has_no_error() -> None:
    found = score(rows([[0.0, 1.0]]))
    assert found.mean == 0.5 and found.error != found.error


def test_the_model_of_a_run_is_the_trained_one_or_that_of_a_checkpoint(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(MissingFile, match="nor a checkpoint: it ended before iteration 20, the first to be saved"):
        model_of(run)
    run = make_run("--rollout-seed", "1", checkpoints=(19, 39))
    assert model_of(run)[0].name == "step_000039" and model_of(run, 19)[0].name == "step_000019"
    with pytest.raises(MissingFile, match="--step: no checkpoint of step 7"):
        model_of(run, 7)
    (run / "model").mkdir()
    assert model_of(run)[0] == run.absolute() / "model"


def test_an_export_is_named_after_its_run_and_step(make_run: MakeRun, tmp_path: Path) -> None:
    run = make_run()
    (run / "model").mkdir()
    assert name_of(run) == name_of(run / "model") == run.name
    assert name_of(run, 19) == f"{run.name}-step-19" and name_of(tmp_path / "x" / "model") == "model"


def test_a_model_is_exported_and_not_pushed_unless_that_is_asked(
    project: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["export", "model", "--output", str(tmp_path / "hf")]) == 0
    assert (tmp_path / "hf" / "model.safetensors").is_file() and "pushed" not in capsys.readouterr().out
    assert cli.main(["export", "model", "--format", "gguf", "--output", str(tmp_path / "m.gguf")]) == 0
    assert (tmp_path / "m.gguf").read_bytes()[:4] == b"GGUF"
    tokenizer = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(tokenizer | {"model": {"type": "WordLevel"}}))
    assert cli.main(["export", str(tmp_path / "hf"), "--format", "gguf", "--output", str(tmp_path / "n.gguf")]) == 2
    assert f"error: RUN|MODEL {tmp_path / 'hf'}: GGUF of this model is not supported yet" in capsys.readouterr().err
    assert cli.main(["export", "model", "--private"]) == 2
    assert cli.main(["export", "model", "--step", "3"]) == 2
    assert "--step 3 requires a run: model is a model directory" in capsys.readouterr().err
    assert cli.main(["export", "nowhere"]) == 2
    assert "RUN|MODEL nowhere: no such directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", tmp_path / "file" / "below", project / "data"):
        assert cli.main(["export", "model", "--output", str(output)]) == 2
        assert "slime: error: --output: " in capsys.readouterr().err
    (tmp_path / "loop").symlink_to("loop")
    assert cli.main(["export", str(tmp_path / "loop")]) == 2
    assert "loop: no such directory" in capsys.readouterr().err


def test_a_name_on_the_hub_is_exported_and_gives_the_export_its_name(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        fetch, "local_model", lambda text, flag: asked.append(f"{flag} {text}") or str(project / "model")
    )
    assert cli.main(["export", "ORG/tiny@v1"]) == 0
    assert asked == ["RUN ORG/tiny@v1"] and (project / "exports" / "tiny" / "model.safetensors").is_file()


def test_a_checkpoint_of_megatron_takes_its_tokenizer_from_the_hub_where_the_run_began_there(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = make_run("--rollout-seed", "2", checkpoints=(19,))
    monkeypatch.setattr(RecordedRun, "began_with", lambda _: "ORG/tiny@v1")
    monkeypatch.setattr(fetch, "local_model", lambda text, flag: f"/cache/{text}")
    monkeypatch.setattr(to_hf, "needs_origin", lambda _: True)
    given: list[Any] = []
    monkeypatch.setattr(to_hf, "convert", lambda source, output, *, fallback_hf_dir: given.append(fallback_hf_dir))
    export.export(run, tmp_path / "out", "hf")
    monkeypatch.setattr(to_hf, "needs_origin", lambda _: False)
    export.export(run, tmp_path / "out", "hf")
    assert given == ["/cache/ORG/tiny@v1", None]


def test_an_evaluation_takes_the_key_of_wandb_as_a_training_does(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "")
    assert cli.main(["eval", "model", "data/prompts.jsonl", "--wandb-key", "s3cret", "--no-such-flag"]) == 2
    assert os.environ["WANDB_API_KEY"] == "s3cret"
    assert "unknown option --no-such-flag" in capsys.readouterr().err


def test_a_hub_that_does_not_answer_is_told(project: Path, tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    # Entries of PYTHONPATH may be relative to the directory that the tests were started in.
    variables |= {
        "HF_ENDPOINT": "http://127.0.0.1:9",
        "HF_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-m", "slime.launcher.cli", "export", "model", "--output", tmp_path / "hf", "--push", "a/b"],
        capture_output=True, text=True, timeout=200, env=variables,
    )  # fmt: skip
    assert done.returncode == 1 and "--push a/b: the upload failed:" in done.stderr, done.stderr
    assert "--push can be repeated" in done.stderr and (tmp_path / "hf" / "config.json").is_file()


def test_an_answer_may_be_as_long_as_in_the_run(make_run: MakeRun, tmp_path: Path) -> None:
    assert most_tokens(make_run("--rollout-max-response-len", "7")) == 7
    assert most_tokens(tmp_path) == 512


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model", "--temperature", "-1"], "--temperature must be from 0 to 100, got -1"),
        (["model", "--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["nowhere"], "RUN|MODEL nowhere: no such directory"),
        (["data"], "RUN|MODEL data: neither the output directory of a run, with run.yaml, nor a model directory"),
        ([], "RUN|MODEL is required"),
    ],
)
def test_a_wrong_chat_is_told_at_once(
    project: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["chat", *words]) == 2
    assert message in capsys.readouterr().err.replace("model is required", "RUN|MODEL is required")


@pytest.mark.parametrize("words", [["chat"], ["tinker", "--hf-checkpoint"]])
def test_a_model_without_tokenizer_or_weights_is_named_as_it_was_typed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = words[1] if words[1:] else "RUN|MODEL"
    (tmp_path / "config.json").write_text("{}")
    assert cli.main([*words, str(tmp_path)]) == 2
    assert f"{name}: {tmp_path} has no tokenizer" in capsys.readouterr().err
    (tmp_path / "tokenizer.json").write_text("{}")
    assert cli.main([*words, str(tmp_path)]) == 2
    assert f"{name}: {tmp_path} has no weights" in capsys.readouterr().err


def test_a_port_of_the_tinker_service_that_cannot_be_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tinker", "--hf-checkpoint", "m", "--port", "99999"]) == 2
    assert "--port must be at most 65535, got 99999" in capsys.readouterr().err
