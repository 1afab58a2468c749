"""Problems of data, rewards or the model end a run, or its dry run, before Ray is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher_machines import write_model, write_rows

from slime.launcher.cli import main
from slime.launcher.doctor import data
from slime.launcher.loops import session
from slime.launcher.platform import probes


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(probes, "gpus", lambda: [])
    write_model(tmp_path / "model")
    write_rows(tmp_path / "p.jsonl")
    return [
        "--hf-checkpoint", str(tmp_path / "model"), "--prompt-data", str(tmp_path / "p.jsonl"), "--label-key", "label",
        "--num-rollout", "3", "--n-samples-per-prompt", "2", "--output-dir", str(tmp_path / "out"),
    ]  # fmt: skip


def no_rewards(directory: Path) -> str:
    return "--rm-type or --custom-rm-path is required: nothing would score the samples"


def bad_row(directory: Path) -> str:
    rows = [json.dumps({"input": "x", "label": "y"})] * 5000 + ["{"]
    (directory / "p.jsonl").write_text("\n".join(rows) + "\n")
    return "line 5001"


def wrong_column(directory: Path) -> str:
    (directory / "p.jsonl").write_text('{"question": "x", "label": "y"}\n')
    return "no column 'input'; it has 'question', 'label'"


def chat_messages_without_a_template(directory: Path) -> str:
    rows = [{"input": "x", "label": "y"}, {"input": [{"role": "user", "content": "x"}], "label": "y"}]
    (directory / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        f"--prompt-data {directory}/p.jsonl, line 2: the prompt is chat messages, but the tokenizer of --hf-checkpoint "
        f"{directory}/model has no chat template"
    )


def unknown_reward_of_a_row(directory: Path) -> str:
    rows = [{"input": "x", "label": "y", "metadata": {"rm_type": name}} for name in ("math", "boxed_f1", "mth")]
    (directory / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "line 3: metadata.rm_type: "


def row_without_a_label(directory: Path) -> str:
    (directory / "p.jsonl").write_text('{"input": "x", "label": "y"}\n{"input": "x", "label": null}\n')
    return "line 2: no label, and the reward math compares with it; fix or remove that row"


def prompt_that_is_no_text(directory: Path) -> str:
    (directory / "p.jsonl").write_text('{"input": "x", "label": "y"}\n{"input": "\\ud800", "label": "y"}\n')
    return "line 2: column 'input' holds \"\\ud800\", expected text that UTF-8 can hold"


def empty_file(directory: Path) -> str:
    (directory / "p.jsonl").write_text("")
    return "no rows"


def broken_tokenizer(directory: Path) -> str:
    (directory / "model" / "tokenizer.json").write_text("{}")
    return "its tokenizer does not load: tokenizer.json"


def broken_settings_of_the_tokenizer(directory: Path) -> str:
    (directory / "model" / "tokenizer_config.json").write_text('{"tokenizer_class": ')
    return "its tokenizer does not load: tokenizer_config.json is not a JSON object"


def tokenizer_without_its_words(directory: Path) -> str:
    """A download of some files leaves such a directory."""
    (directory / "model" / "tokenizer.json").unlink()
    return "its tokenizer cannot be loaded"


def broken_template(directory: Path) -> str:
    (directory / "model" / "chat_template.jinja").write_text("{% for message in messages %}\n{{ message.content ")
    (directory / "p.jsonl").write_text('{"input": [{"role": "user", "content": "x"}], "label": "y"}\n')
    return (
        f"--prompt-data {directory}/p.jsonl, line 1: the chat template of --hf-checkpoint {directory}/model cannot be "
        "read: chat_template.jinja, line 2"
    )


def truncated_weights(directory: Path) -> str:
    shard = max((directory / "model").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-8])
    return "--hf-checkpoint"


def missing_shard(directory: Path) -> str:
    max((directory / "model").glob("*.safetensors")).unlink()
    return "shards missing"


@pytest.mark.parametrize("dry", [True, False], ids=["dry run", "run"])
@pytest.mark.parametrize(
    "spoil",
    [
        no_rewards,
        bad_row,
        wrong_column,
        chat_messages_without_a_template,
        unknown_reward_of_a_row,
        row_without_a_label,
        prompt_that_is_no_text,
        empty_file,
        broken_tokenizer,
        broken_settings_of_the_tokenizer,
        tokenizer_without_its_words,
        broken_template,
        truncated_weights,
        missing_shard,
    ],  # fmt: skip
)
def test_it_is_said_before_ray(
    words: list[str], tmp_path: Path, spoil, dry: bool, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(session, "ray_cluster", started)
    rewards = [] if spoil is no_rewards else ["--rm-type", "math"]
    message = spoil(tmp_path)
    assert main(["train", *words, *rewards, *(["--dry-run"] if dry else [])]) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("slime: error: --") and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_that_the_model_has_no_weights_and_a_run_is_refused(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*args: object, **kwargs: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(session, "ray_cluster", started)
    for file in (tmp_path / "model").glob("*.safetensors*"):
        file.unlink()
    words += ["--rm-type", "math"]
    assert main(["train", *words, "--dry-run"]) == 0, capsys.readouterr().err
    assert f"note: --hf-checkpoint {tmp_path}/model: no .safetensors files yet" in capsys.readouterr().out
    assert main(["train", *words]) == 2
    assert f"--hf-checkpoint: {tmp_path}/model has no weights; expected" in capsys.readouterr().err
    # Engines that others started have weights of their own.
    external = ["--rollout-external-engine-addrs", "h:1", "--debug-rollout-only", "--dry-run"]
    assert main(["train", *words, *external]) == 0, capsys.readouterr().err
    assert "no .safetensors files" not in capsys.readouterr().out


@pytest.mark.parametrize(("name", "content"), [("p.json", b'[{"input": "x"}, '), ("p.parquet", b"PAR1")])
def test_a_damaged_file_is_to_be_repaired_and_not_a_row_of_it(
    words: list[str], name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["train", *words, "--prompt-data", str(tmp_path / name), "--dry-run"]) == 2
    assert capsys.readouterr().err.endswith("; repair the file, or write it again\n")


def test_a_dry_run_says_how_many_rows_it_read_and_a_run_reads_all(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SECONDS", 0.0)
    rows = [json.dumps({"input": "x", "label": "y"})] * (data.ROWS + 1) + ['{"input": "x", "label": null}']
    (tmp_path / "p.jsonl").write_text("\n".join(rows) + "\n")
    words += ["--rm-type", "math"]
    assert main(["train", *words, "--dry-run"]) == 0, capsys.readouterr().err
    assert f"note: --prompt-data {tmp_path}/p.jsonl: only the first 2000 rows read" in capsys.readouterr().out
    assert main(["train", *words]) == 2
    error = capsys.readouterr().err
    assert f"p.jsonl, line {data.ROWS + 2}: no label" in error and "p.jsonl: 2,000 rows checked so far" in error


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"model_type": ["qwen3"]}', '{"architectures": 3}', "{"]
)
def test_a_damaged_config_of_a_model_is_no_traceback(
    words: list[str], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "model" / "config.json"
    config.write_text(text)
    assert main(["train", *words, "--rm-type", "math", "--dry-run"]) == 2
    assert str(config.parent) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        (b"1", "iter_0000001: no .metadata, latest_checkpointed_iteration.txt names this checkpoint"),
        (b"\xff\xfe", "expected a number or release"),
    ],
)
def test_a_checkpoint_that_its_directory_lacks_is_named(
    words: list[str], tmp_path: Path, tracker: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "load" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "load" / "latest_checkpointed_iteration.txt").write_bytes(tracker)
    load = ["--load", str(tmp_path / "load"), "--rm-type", "math"]
    assert main(["train", *words, *load, "--dry-run"]) == 2
    error = capsys.readouterr().err
    assert "error: --load" in error and message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save-interval", "1", "--save-hf", "out/{rollout_id.__class__}"], "--save-hf must be a path with"),
        (["--rollout-stop", ""], "--rollout-stop must be strings that are not empty"),
        (["--tb-project-name", "../../x"], "--tb-project-name must be a name below tensorboard/, without .., got"),
        (["--tb-experiment-name", "/x"], "--tb-experiment-name must be a name below tensorboard/, without .., got"),
        (["--train-env-vars", '{"A=B": "x"}'], "--train-env-vars must be names of variables, without = and NUL"),
        (["--train-env-vars", '{"A": "x\\u0000"}'], "--train-env-vars A must be text without NUL"),
        (["--custom-config-path", "custom.yaml"], "'__class__' cannot be the name of a setting or an attribute"),
    ],
)
def test_values_that_would_reach_beyond_their_place_are_refused(
    words: list[str], tmp_path: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "custom.yaml").write_text("__class__: 3\n")
    assert main(["train", *words, "--rm-type", "math", "--dry-run", *flags]) == 2
    assert message in capsys.readouterr().err


def test_rows_may_name_their_own_reward(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"input": "x", "label": "y", "metadata": {"rm_type": "math"}}
    (tmp_path / "p.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["train", *words, "--dry-run"]) == 0, capsys.readouterr().err
    # A reward function of the user's knows names of its own.
    (tmp_path / "p.jsonl").write_text(json.dumps(row | {"label": None, "metadata": {"rm_type": "mine"}}) + "\n")
    (tmp_path / "own.py").write_text("def score(args, sample, **kwargs):\n    return 1.0\n")
    assert main(["train", *words, "--custom-rm-path", f"{tmp_path}/own.py", "--dry-run"]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("place", ["tokenizer_config.json", "chat_template.jinja", "the flags", ""])
def test_text_that_is_to_be_rendered_needs_a_template(
    words: list[str], tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words += ["--rm-type", "math", "--dry-run", "--apply-chat-template"]
    template = "{{ messages }}"
    if place == "tokenizer_config.json":
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / "model" / place).write_text(json.dumps(config))
    elif place == "chat_template.jinja":
        (tmp_path / "model" / place).write_text(template)
    elif place:
        words += ["--apply-chat-template-kwargs", json.dumps({"chat_template": template})]
    assert main(["train", *words]) == (0 if place else 2)
    error = capsys.readouterr().err
    assert place or "p.jsonl, line 1: --apply-chat-template is given, but the tokenizer of --hf-checkpoint" in error


def test_an_evaluation_set_is_checked_by_its_own_columns(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"question": "x", "answer": "y"}\n')
    sets = tmp_path / "eval.yaml"
    text = f"eval: {{datasets: [{{name: own, path: {held_out}, input_key: question, label_key: LABEL}}]}}"
    check = [*words, "--rm-type", "math", "--eval-config", str(sets), "--dry-run"]
    sets.write_text(text.replace("LABEL", "answer"))
    assert main(["train", *check]) == 0, capsys.readouterr().err
    sets.write_text(text.replace("LABEL", "solution"))
    assert main(["train", *check]) == 2
    assert "no column 'solution'; it has 'question', 'answer'" in capsys.readouterr().err


def test_a_reward_that_compares_with_labels_needs_their_column(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del words[words.index("--label-key") : words.index("--label-key") + 2]
    (tmp_path / "own.py").write_text("def score(args, sample, **kwargs):\n    return 1.0\n")
    for scorer, code in ((["--rm-type", "math"], 2), (["--rm-type", "boxed_f1"], 2), (["--rm-type", "random"], 0),
                         (["--custom-rm-path", f"{tmp_path}/own.py"], 0)):  # fmt: skip
        assert main(["train", *words, *scorer, "--dry-run"]) == code, scorer
        error = capsys.readouterr().err
        assert code == 0 or "line 1: no label, and the reward" in error and "--label-key names the column" in error


def test_an_evaluation_alone_needs_a_reward(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = words[words.index("--prompt-data") + 1]
    alone = [*words, "--num-rollout", "0", "--debug-rollout-only", "--eval-prompt-data", "sums", file]
    assert main(["train", *alone]) == 2
    error = capsys.readouterr().err
    assert "--rm-type or --custom-rm-path is required: nothing would score the samples" in error and file in error
    assert main(["train", *alone, "--rm-type", "random", "--dry-run"]) == 0
    rows = [{"input": "x", "label": "1", "metadata": {"rm_type": "random"}}]
    Path(file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["train", *alone, "--dry-run"]) == 0
