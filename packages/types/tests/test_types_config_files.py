"""YAML files in which a key occurs twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from slime.types.config_files import load, read_config
from slime.types.errors import InvalidFile


@pytest.mark.parametrize("text", ["a: 1\na: 1", "b: {a: 1, a: 2}", "- {'a': 1, a: 2}"])
def test_a_key_that_occurs_twice_is_an_error_with_its_place(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="the key 'a' occurs twice.*\n.*line"):
        load(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", ", line 2: the key 'a' occurs twice"),
        ("a: [1\nb: 2\n", ", line 2: expected ',' or ']', but got ':' (while parsing a flow sequence)"),
        ("a: 1\nb: 2026-13-45\n", ", line 2: cannot read a value as YAML's type timestamp: month must be in 1..12"),
        (
            "a: !!float x\n",
            ", line 1: cannot read a value as YAML's type float: could not convert string to float: 'x'",
        ),
        ("a: [!!bool x]\n", ", line 1: cannot read a value as YAML's type bool"),
        ("- 1\n", " must be a mapping of settings, got [1]"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(InvalidFile) as caught:
        read_config(file)
    assert str(caught.value) == f"--config {file}{message}"


def test_a_number_of_more_digits_than_python_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("seed: " + "1" * 5000)
    with pytest.raises(InvalidFile, match="line 1: cannot read a value as YAML's type int: Exceeds the limit"):
        read_config(tmp_path / "run.yaml")


def test_merged_keys_may_be_given_again() -> None:
    text = "p: {q: &q {<<: &a {x: 1}, x: 2}}\nc: {<<: *q, x: 3}\nd: {<<: [*a, *q]}\n"
    assert load(text) == yaml.safe_load(text) == {"p": {"q": {"x": 2}}, "c": {"x": 3}, "d": {"x": 1}}


@pytest.mark.parametrize("text", ["lr: 1\nlr: 2", "eps-clip: 1\neps_clip: 2", "a: " + "[" * 3000])
def test_a_file_of_settings_that_contradicts_itself_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InvalidFile, match="--config .*run.yaml[,:] "):
        read_config(tmp_path / "run.yaml")
