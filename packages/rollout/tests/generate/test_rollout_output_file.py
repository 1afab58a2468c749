"""The output of `slime-rollout generate`: what is kept when it ends early, how it goes on, and Parquet."""

from __future__ import annotations

import errno
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from rollout_fakes import FakeEngine

from slime.rollout.cli import main
from slime.rollout.generate import offline
from slime.rollout.generate.output_file import FORMAT, KeptGroups, check_output, write_samples
from slime.rollout.settings.rollout import RolloutSettings
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, OutOfSpace

# Scores "12>" at once. "34>" waits until the first is kept, and fails once.
REWARD = """
import asyncio
from pathlib import Path

DIRECTORY = Path({directory!r})

async def reward(args, sample, **kwargs):
    with (DIRECTORY / "scored").open("a") as file:
        file.write(sample.prompt + "\\n")
    if sample.prompt == "34>" and not (DIRECTORY / "failed").exists():
        while (DIRECTORY / "out.jsonl.part").read_text().count("\\n") < 2:
            await asyncio.sleep(0.01)
        (DIRECTORY / "failed").touch()
        raise ValueError("no reward")
    return 1.0
"""


def samples(index: int) -> list[Sample]:
    values = {"tokens": [1, 2, index], "response_length": 1, "rollout_log_probs": [-0.5], "reward": {"a": 1.0}}
    return [Sample(index=index, group_index=index, metadata={"k": index}, status=Sample.Status.COMPLETED, **values)]


def failing_once(checkpoint: Path, engine: FakeEngine, directory: Path) -> tuple[Path, Path, list[str]]:
    """Returns the output, the file of REWARD and the flags of a command whose second prompt fails once."""
    prompts, output, reward = directory / "prompts.jsonl", directory / "out.jsonl", directory / "reward.py"
    prompts.write_text("".join(json.dumps({"input": text}) + "\n" for text in ("12>", "34>")))
    reward.write_text(REWARD.format(directory=str(directory)))
    flags = (
        f"--hf-checkpoint {checkpoint} --prompts {prompts} --output {output} --custom-rm-path {reward}:reward "
        f"--rollout-external-engine-addrs 127.0.0.1:{engine.port}"
    ).split()
    return output, reward, flags


def test_a_command_that_ended_early_goes_on_where_it_was(
    checkpoint: Path, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, reward, flags = failing_once(checkpoint, engine, tmp_path)
    assert main(["generate", *flags]) == 1
    told = capsys.readouterr().err
    assert "reward.py:reward raised ValueError: no reward (reward.py, line " in told
    assert f"1 of 2 prompts answered, in {output}.part: the same command goes on from there" in told
    assert not output.exists()

    assert main(["generate", *flags, "--rollout-temperature", "0.5"]) == 2
    assert "with other settings" in capsys.readouterr().err

    assert main(["generate", *flags]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["rollout/raw_reward"] == 1.0 and printed.err.endswith(f"wrote {output}\n")
    assert [json.loads(line)["prompt"] for line in output.read_text().splitlines()] == ["12>", "34>"]
    assert (tmp_path / "scored").read_text().splitlines() == ["12>", "34>", "34>"]
    assert not (tmp_path / "out.jsonl.part").exists()


def test_a_model_directory_that_is_not_there_is_named_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text('{"input": "12>"}\n')
    words = "generate --hf-checkpoint modl --prompts prompts.jsonl --output out.jsonl"
    assert main(words.split()) == 2
    assert capsys.readouterr().err == "slime-rollout: error: --hf-checkpoint: no such directory modl\n"


def test_a_line_that_was_cut_off_is_answered_again(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    kept = KeptGroups(output, "a")
    kept.add(1, samples(1))
    kept.add(0, samples(0))
    kept.close()
    kept.path.write_bytes(kept.path.read_bytes()[:-3])
    again = KeptGroups(output, "a")
    assert list(again.groups) == [1] and again.groups[1][0].metadata == {"k": 1}
    again.add(0, samples(0))
    assert [group[0].index for group in again.finish()] == [0, 1]
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert [json.loads(line)["tokens"] for line in output.read_text().splitlines()] == [[1, 2, 0], [1, 2, 1]]


def damaged(group: dict[str, Any], change: str) -> dict[str, Any]:
    first = group["samples"][0]
    changed = {
        "another prompt": {"prompt": 7}, "text": {"prompt": "1"}, "no samples": {"samples": []},
        "a field of another name": {"samples": [{"toks" if n == "tokens" else n: v for n, v in first.items()}]},
    }  # fmt: skip
    return group | changed[change]


@pytest.mark.parametrize("change", ["another prompt", "text", "no samples", "a field of another name"])
def test_a_kept_group_that_cannot_be_of_this_command_is_refused(change: str, tmp_path: Path) -> None:
    kept = KeptGroups(tmp_path / "out.jsonl", "a", total=2)
    kept.add(1, samples(1))
    kept.close()
    header, line = kept.path.read_text().splitlines()
    kept.path.write_text(f"{header}\n{json.dumps(damaged(json.loads(line), change))}\n")
    with pytest.raises(InvalidSetting, match="requires --overwrite: .* or is damaged"):
        KeptGroups(tmp_path / "out.jsonl", "a", total=2)


def test_a_reward_that_was_edited_meanwhile_is_told_of_and_loses_no_answers(
    checkpoint: Path, engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, reward, flags = failing_once(checkpoint, engine, tmp_path)
    assert main(["generate", *flags]) == 1
    reward.write_text(reward.read_text() + "# mended\n")
    capsys.readouterr()
    assert main(["generate", *flags]) == 0
    warning = f"WARNING: 1 prompt was answered, in {output}.part, before --custom-rm-path {reward}:reward changed"
    assert warning in capsys.readouterr().err


def test_values_that_json_cannot_hold_are_named(tmp_path: Path) -> None:
    kept = KeptGroups(tmp_path / "out.jsonl", "a")
    with pytest.raises(InvalidField, match=r"a value of a sample: got \{1\}, expected text, numbers"):
        kept.add(0, [Sample(metadata={"seen": {1}})])
    kept.close()


def test_a_full_disk_is_an_error_of_ours_also_when_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptGroups(tmp_path / "out.jsonl", "a")

    class Full(io.BytesIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self) -> None:
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")

    assert kept._file is not None
    kept._file.close()
    monkeypatch.setattr(kept, "_file", Full())
    with pytest.raises(OutOfSpace):
        kept.add(0, samples(0))
    with pytest.raises(OutOfSpace):
        kept.close()


def test_what_others_keep_beside_the_output_stays(tmp_path: Path) -> None:
    output, part = tmp_path / "out.jsonl", tmp_path / "out.jsonl.part"
    part.write_text("mine\n")
    for overwrite in (False, True):
        with pytest.raises(InvalidSetting, match=r"there is no out.jsonl.part of somebody else"):
            KeptGroups(output, "a", overwrite=overwrite)
    assert part.read_text() == "mine\n"
    part.write_text(json.dumps({"format": FORMAT, "identity": "b"}) + "\n")
    with pytest.raises(InvalidSetting, match="holds answers to other prompts"):
        KeptGroups(output, "a")
    first = KeptGroups(output, "a", overwrite=True)
    with pytest.raises(InvalidSetting, match="a file that no other process writes"):
        KeptGroups(output, "a")
    first.close()


def test_samples_are_written_as_parquet(tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    check_output(path, overwrite=False)
    write_samples(path, [*samples(0), *samples(1), Sample(prompt=[{"role": "user", "content": "x"}])])
    rows = pq.read_table(path).to_pylist()
    assert [row["index"] for row in rows] == [0, 1, None]
    assert rows[0]["tokens"] == [1, 2, 0] and np.allclose(rows[0]["rollout_log_probs"], [-0.5])
    assert json.loads(rows[1]["reward"]) == {"a": 1.0} and json.loads(rows[1]["metadata"]) == {"k": 1}
    assert json.loads(rows[2]["prompt"])[0]["content"] == "x"


@pytest.mark.parametrize(
    ("labels", "as_they_are"),
    [
        ([True, 3], False), ([2**70, 1], False), ([2**53 + 1, 0.5], False), ([[1], [True]], False), (["a", 1], False),
        ([[2**63], [1]], False), ([[1], [1.5]], True), ([True, None], True), ([1, 0.5], True), ([2**62, 1], True),
    ],
)  # fmt: skip
def test_parquet_takes_labels_of_any_kinds(labels: list[Any], as_they_are: bool, tmp_path: Path) -> None:
    path = tmp_path / "out.parquet"
    write_samples(path, [Sample(label=label) for label in labels])
    read = [row["label"] for row in pq.read_table(path).to_pylist()]
    assert (read if as_they_are else [json.loads(value) for value in read]) == labels


@pytest.mark.parametrize("name", ["out.csv", "out.json", "out.jsonl.gz", "out.txt"])
def test_an_ending_of_another_format_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=f"--output must be a file that ends in .jsonl or .parquet, got .*{name}"):
        check_output(tmp_path / name, overwrite=True)


@pytest.mark.parametrize("name", ["out.jsonl", "out.JSONL", "out", "out.PARQUET"])
def test_known_endings_in_capitals_and_names_without_one_are_accepted(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    check_output(path, overwrite=False)
    write_samples(path, samples(0))
    assert path.read_bytes().startswith(b"PAR1") == (name == "out.PARQUET")
    pipe = tmp_path / "pipe.txt"
    os.mkfifo(pipe)
    check_output(pipe, overwrite=False)


def test_the_file_of_a_function_is_found_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scores.py").write_text("def exact(args, sample, **kwargs):\n    return 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = [
        offline._sources(RolloutSettings(hf_checkpoint=str(tmp_path), custom_rm_path=path))
        for path in (f"{tmp_path}/own_scores.py:exact", "own_scores.exact")
    ]
    assert [len(each) for each in found] == [1, 1]
    assert list(found[0].values()) == list(found[1].values())
