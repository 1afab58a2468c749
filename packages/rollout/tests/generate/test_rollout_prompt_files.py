"""The files that `slime-rollout generate --prompts` reads, which are those of `--prompt-data`, and its help."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime.rollout.cli import FIRST_OF_GENERATE, FIRST_OF_SERVE, main
from slime.rollout.generate.offline import UNREAD, read_prompts
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, NotAvailable
from slime.types.setting_values import flag_name, value_type

ROWS = [{"input": f"{n} + 1", "label": str(n + 1)} for n in range(4)]
READ = [{"prompt": row["input"], "label": row["label"], "metadata": {}} for row in ROWS]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


def prompts(source: Path | str) -> list[dict]:
    return read_prompts(str(source), "input", "label", "metadata")


def write(path: Path) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(LINES.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, ["input", "label"])
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        path.write_text(LINES)
    return path


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "p.csv", "p.parquet", "P.CSV", "prompts", "p.txt"])
def test_prompts_are_read_by_the_ending_of_their_file(name: str, tmp_path: Path) -> None:
    path = write(tmp_path / name) if name != "P.CSV" else write(tmp_path / "p.csv").rename(tmp_path / name)
    assert prompts(path) == READ
    assert prompts(f"{path}@[1:3]") == READ[1:3] and prompts(f"{path}@[-1:]") == READ[-1:]


def test_data_sets_of_reasoning_gym_are_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rows = prompts("reasoning_gym:chain_sum?size=3&seed=5")
    assert len(rows) == 3 and all(row["metadata"]["rm_type"] == "reasoning_gym" for row in rows)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("p.csv", "question\n1\n", InvalidFile, "line 2 must be an object with text .* key 'input'"),
        ("p.csv", "input,metadata\n1,x\n", InvalidFile, r"line 2: 'metadata' must be an object \(--metadata-key\)"),
        ("p.jsonl", '{"input": ["hi"]}\n', InvalidFile, "line 1: 'input' must be chat messages: objects with a role"),
        ("p.jsonl", '{"input": [{"content": "hi"}]}\n', InvalidFile, "line 1: 'input' must be chat messages"),
        ("p.jsonl", '{"input": []}\n', InvalidFile, r"must be chat messages: objects with a role, got \[\]"),
        ("p.jsonl", '{"input": "\\ud83d"}\n', InvalidFile, "line 1: 'input' must be text that UTF-8 can hold"),
        ("p.json", "{", InvalidFile, "--prompts.*p.json, line 1: not JSON"),
        ("p.jsonl", "\n", InvalidFile, "has no rows"),
        ("p.gz", "", InvalidSetting, "--prompts must be a file that ends in .jsonl, .jsonl.gz"),
    ],
)
def test_files_without_prompts_are_refused_by_name(
    name: str, text: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(error, match=message):
        prompts(tmp_path / name)


@pytest.mark.parametrize("name", UNREAD)
def test_settings_of_iterations_and_evaluations_are_refused_in_place_of_ignored(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {int: ["64"], float: ["0.5"], bool: []}.get(value_type(get_type_hints(RolloutSettings)[name])[0], ["a.b"])
    flag, output = flag_name(name), tmp_path / "out.jsonl"
    words = ["generate", "--hf-checkpoint", "m", "--prompts", str(write(tmp_path / "p.jsonl")), "--output", str(output)]
    assert main([*words, flag, *value]) == 2
    typed = " ".join([flag, *value])
    error = capsys.readouterr().err
    assert f"error: {typed} and slime-rollout generate cannot be used together: " in error, error
    assert not output.exists()


def test_a_data_set_on_the_hub_is_told_how_to_download_it() -> None:
    with pytest.raises(MissingFile, match="hf download openai/gsm8k --repo-type dataset .*--prompts gsm8k/FILE"):
        prompts("openai/gsm8k")


def test_a_missing_package_is_named_with_the_extra_of_slime_rollout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "p.parquet")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(NotAvailable, match=r'pip install "slime-rollout\[parquet\]"'):
        prompts(path)


@pytest.mark.parametrize(("command", "first"), [("generate", FIRST_OF_GENERATE), ("serve", FIRST_OF_SERVE)])
def test_help_has_the_flags_that_matter_first_by_task_and_help_all_every_flag(
    command: str, first: dict[str, tuple[str, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {}
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            main([command, flag])
        texts[flag] = capsys.readouterr().out
    names = [flag_name(name) for group in first.values() for name in group]
    assert re.findall(r"^  (--[a-z-]+)", texts["--help"], re.MULTILINE) == [*names, "--config", "--help-all"]
    assert all(f"\n{title}:\n" in texts["--help"] for title in first)
    assert len(texts["--help"].splitlines()) < 100
    for name in (*names, "--rollout-health-check-timeout", "--sglang-NAME"):
        assert re.search(rf"^  {name}\b", texts["--help-all"], re.MULTILINE), name
