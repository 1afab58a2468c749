"""Errors in an --eval-config file name the file, the set and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher.config.eval_config import apply_eval_config
from slime.types.errors import SlimeError


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ('{name: "", path: x}', "expected a mapping with the texts name and path"),
        ('{name: a, path: " "}', "expected a mapping with the texts name and path"),
        ("{name: a, path: x, temprature: 1}", "a: unknown key 'temprature'; did you mean temperature?"),
        ("{name: a, path: x, temperature: hot}", "a.temperature must be a number, at least 0, got 'hot'"),
        ("{name: a, path: x, apply_chat_template_kwargs: {1: 2}}", "must be a mapping of arguments by name"),
        ("{name: a, path: x, multimodal_keys: {image: 3}}", "a.multimodal_keys: {'image': 3}"),
        ("{name: a, path: x, multimodal_keys: image}", "expected a mapping {image: COLUMN}"),
        ("{name: a, path: x, input_key: {a: b}}", "expected the name of a column"),
    ],
)
def test_an_error_names_the_file_and_the_place(tmp_path: Path, entry: str, message: str) -> None:
    path = tmp_path / "sets.yaml"
    path.write_text(f"eval: {{datasets: [{entry}]}}\n")
    with pytest.raises(SlimeError) as caught:
        apply_eval_config({"eval_config": path})
    assert str(caught.value).startswith(f"--eval-config {path}: ") and message in str(caught.value)
