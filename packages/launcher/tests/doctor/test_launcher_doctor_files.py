"""The doctor on broken model directories, data sets and plug-ins."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launcher_machines import CONFIG, make_well, write_model, write_rows

from slime.converters.files.safetensors_dir import INDEX
from slime.launcher import cli, tiny_model
from slime.launcher.doctor.command import CHECKS, examine
from slime.launcher.doctor.finding import Finding


def look(check: str, *words: str) -> list[Finding]:
    return [f for f in examine(words, 60, {check: CHECKS[check]}) if f.check == check]


def failures(check: str, *words: str) -> list[str]:
    return [f.line() for f in look(check, *words) if f.status == "FAIL"]


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def lose_a_shard(model: Path) -> None:
    shards(model)[1].unlink()


def cut_a_shard(model: Path) -> None:
    data = shards(model)[0].read_bytes()
    shards(model)[0].write_bytes(data[:-7])


def cut_a_header(model: Path) -> None:
    shards(model)[0].write_bytes(shards(model)[0].read_bytes()[:5])


def lengthen_a_shard(model: Path) -> None:
    with shards(model)[0].open("ab") as file:
        file.write(b"more")


def swap_in_the_index(model: Path) -> None:
    index = json.loads((model / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = shards(model)[0].name
    (model / INDEX).write_text(json.dumps(index))


def break_the_index(model: Path) -> None:
    (model / INDEX).write_text('{"weights": {}}')


def lose_the_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()


def break_the_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")


def lose_the_config(model: Path) -> None:
    (model / "config.json").unlink()


def break_the_config(model: Path) -> None:
    (model / "config.json").write_text("{,")


def take_another_config(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 48}))


def want_more_layers(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 3}))


def lose_all_weights(model: Path) -> None:
    for file in [*shards(model), model / INDEX]:
        file.unlink()


@pytest.mark.parametrize(
    "damage, words",
    [
        (lose_a_shard, "shards missing: model-00002-of-"),
        (cut_a_shard, "model-00001-of-.*: cut short: .* bytes"),
        (cut_a_header, "model-00001-of-.*: not a safetensors file"),
        (lengthen_a_shard, "model-00001-of-.*: has .* bytes, but its header describes"),
        (swap_in_the_index, "the index names tensors that its files do not hold: model.norm.weight"),
        (break_the_index, "is not an index of shards"),
        (lose_the_tokenizer, "no tokenizer"),
        (break_the_tokenizer, "tokenizer does not load|tokenizer cannot be loaded"),
        (lose_the_config, "config.json"),
        (break_the_config, "config.json"),
        (take_another_config, "config.json says \\[48"),
        (want_more_layers, "11 tensors of the model are missing: model.layers.2"),
        (lose_all_weights, "no .safetensors files"),
    ],
)
def test_a_broken_model_directory_is_named_with_what_to_do(
    damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    import re

    model = write_model(tmp_path / "model")
    assert failures("model", "--hf-checkpoint", str(model)) == []
    damage(model)
    failed = failures("model", "--hf-checkpoint", str(model))
    assert failed and re.search(words, failed[0]) and "--hf-checkpoint" in failed[0] and " -> " in failed[0], failed


def test_a_family_without_a_table_is_a_warning(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt2"}))
    assert [f.status for f in look("model", "--hf-checkpoint", str(model))][0] == "warn"
    assert failures("model", "--hf-checkpoint", str(tmp_path / "none"))[0].startswith("FAIL  --hf-checkpoint")


def test_each_model_of_a_file_is_checked(tmp_path: Path) -> None:
    policy, judge, file = write_model(tmp_path / "policy"), write_model(tmp_path / "judge"), tmp_path / "models.yaml"
    models = [{"name": "policy", "server_groups": [{"num_engines": 1}]},
              {"name": "judge", "model_path": str(judge), "server_groups": [{"num_engines": 1}]}]  # fmt: skip
    file.write_text(json.dumps({"sglang": models}))
    flags = ("--hf-checkpoint", str(policy), "--sglang-config", str(file))
    run = (*flags, "--rm-type", "math", "--num-rollout", "1", "--prompt-data", str(write_rows(tmp_path / "rows.jsonl")))
    for words in (flags, run):
        assert not failures("model", *words)
    cut_a_shard(judge)
    for words in (flags, run):
        failed = failures("model", *words)
        assert failed and f"--sglang-config {file}: model judge: " in failed[0] and "cut short" in failed[0]
    judge.rename(tmp_path / "elsewhere")
    for words in (flags, flags[2:], run):
        (missing,) = failures("model", *words)
        assert f"--sglang-config {file}: model judge {judge}: no such directory  -> " in missing
    file.write_text("sglang: 3\n")
    (wrong,) = failures("model", *flags)
    assert f"--sglang-config {file}: sglang must be a list of models, got 3" in wrong


def test_data_is_read_and_the_broken_line_named(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good.jsonl")
    assert failures("data", "--prompt-data", str(good), "--label-key", "label") == []
    broken = tmp_path / "broken.jsonl"
    broken.write_text(good.read_text() + '{"input": "x", \n' + good.read_text())
    (failed,) = failures("data", "--prompt-data", str(broken))
    assert "broken.jsonl, line 4: not JSON" in failed
    assert failures("data", "--prompt-data", f"{broken}@[0:3]") == []

    (failed,) = failures("data", "--prompt-data", str(good), "--input-key", "prompt")
    assert "no column 'prompt'" in failed and "--input-key" in failed
    (failed,) = failures("data", "--prompt-data", str(good), "--label-key", "answer")
    assert "no column 'answer'" in failed and "--label-key" in failed
    (failed,) = failures("data", "--eval-prompt-data", "held", str(broken))
    assert "--eval-prompt-data held" in failed and "line 4" in failed


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("gone.jsonl", None, "no such file"),
        ("rows.tsv", "a,b", "unknown ending '.tsv'"),
        ("empty.jsonl", "\n", "no rows"),
        ("list.jsonl", "[1]\n", "line 1 must be a JSON object, got [1]"),
        ("table.parquet", "nothing of the kind", "not a parquet file"),
    ],
)
def test_data_that_cannot_be_read(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    (failed,) = failures("data", "--prompt-data", str(tmp_path / name))
    assert words in failed and " -> " in failed


def test_chat_messages_need_a_chat_template(tmp_path: Path) -> None:
    data, model = tmp_path / "chats.jsonl", write_model(tmp_path / "model")
    data.write_text(json.dumps({"input": [{"role": "user", "content": "1 + 1?"}]}) + "\n")
    words = ("--prompt-data", str(data), "--hf-checkpoint", str(model))
    (line,) = failures("data", *words)
    assert f"--prompt-data {data}, line 1: the prompt is chat messages, but the tokenizer of" in line
    assert not failures("data", *words, "--rollout-function-path", "own.rollout")
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert not failures("data", *words)


def test_labels_that_are_null_are_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "x", "label": null}\n')
    found = look("data", "--prompt-data", str(path), "--label-key", "label")
    assert [f.status for f in found] == ["warn", "ok"] and "1 of 1 label is" in found[0].what


@pytest.mark.parametrize(
    "source, words",
    [
        ("def other(args, sample): ...", "has no 'reward'"),
        ("def reward(args): ...", "it takes (args), but is called with (args, sample)"),
        ("reward = 3", "reward is a value of type int, not a function"),
        ("import nothing_like_it", "nothing_like_it"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plug_in_that_does_not_fit_is_named(source: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source + "\n")
    (failed,) = failures("plugins", "--custom-rm-path", f"{path}:reward")
    assert "--custom-rm-path" in failed and words in failed


def test_each_plug_in_has_its_own_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def reward(args, sample): ...\ndef keep(args): ...\n")
    found = look(
        "plugins", "--custom-rm-path", f"{path}:reward", "--dynamic-sampling-filter-path", f"{path}:keep",
        "--custom-generate-function-path", str(tmp_path / "none.py"), "--rm-type", "math",
    )  # fmt: skip
    assert sorted(f.status for f in found) == ["FAIL", "FAIL", "ok", "ok"]


def test_a_plug_in_that_prints_or_leaves_does_not_disturb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_well(monkeypatch)
    loud, gone = tmp_path / "loud.py", tmp_path / "gone.py"
    loud.write_text("print('hello')\ndef reward(args, sample): ...\n")
    gone.write_text("import sys\nsys.exit(0)\n")
    written = sys.dont_write_bytecode
    assert cli.main(["doctor", "--json", "--custom-rm-path", str(loud)]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert cli.main(["doctor", "--json", "--custom-rm-path", str(gone)]) == 1
    assert "SystemExit" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gone.py", "loud.py"]
    assert sys.dont_write_bytecode is written


def test_the_database_of_a_buffer_that_does_not_answer(tmp_path: Path) -> None:
    words = ["--buffer-dir", str(tmp_path / "samples"), "--buffer-store"]
    (found,) = failures("disk", *words, f"postgresql:///none?host={tmp_path}")
    assert "--buffer-store postgresql:///none: " in found and str(tmp_path) in found
    (found,) = failures("disk", *words, "postgresql://me:s3cret@host/none")
    assert "must hold no password" in found and "s3cret" not in found


def test_the_object_store_of_a_buffer_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{closed.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
            monkeypatch.setenv(name, "test")
        (found,) = failures("disk", "--buffer-dir", str(tmp_path / "state"), "--buffer-payloads", "s3://bucket/run")
    assert "--buffer-payloads s3://bucket/run: Could not connect to the endpoint URL" in found


def test_letters_without_a_token_are_a_warning(tmp_path: Path) -> None:
    model = tiny_model.write_model(tmp_path / "model", "0123456789:", seed=0)
    data = tmp_path / "p.jsonl"
    data.write_text('{"input": "7:"}\n{"input": [{"role": "user", "content": "g\u00e9 7:"}]}\n')
    words = ("--hf-checkpoint", str(model), "--prompt-data", str(data), "--rm-type", "random")
    warnings = [
        found.what for found in look("data", *words, "--rollout-function-path", "a.b") if found.status == "warn"
    ]
    assert len(warnings) == 1
    assert warnings[0].endswith("has no tokens for 'g', '\u00e9': the model does not see them")


def test_empty_prompts_are_a_warning_unless_a_template_is_around_them(tmp_path: Path) -> None:
    model = tiny_model.write_model(tmp_path / "model", "0123456789:", seed=0)
    data = tmp_path / "p.jsonl"
    data.write_text('{"input": "7:"}\n{"input": ""}\n{"input": ""}\n')
    words = ("--hf-checkpoint", str(model), "--prompt-data", str(data), "--rm-type", "random")
    (warning,) = [found for found in look("data", *words) if found.status == "warn"]
    assert warning.what.endswith("2 of 3 prompts are empty")
    rendered = (*words, "--apply-chat-template", "--apply-chat-template-kwargs", '{"chat_template": "x"}')
    assert [found.what for found in look("data", *rendered) if found.what.endswith("are empty")] == []
