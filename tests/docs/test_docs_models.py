"""The files of --sglang-config on docs/several-models.md are read as they are printed."""

from __future__ import annotations

import asyncio
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pages import ROOT, blocks
from slime.rollout.settings.model_file import GROUP_KEYS, MODEL_KEYS
from slime.rollout.settings.rollout import RolloutSettings

PAGE = ROOT / "docs" / "several-models.md"
FILES = [block for block in blocks(PAGE) if block.language == "yaml"]


@pytest.mark.parametrize("block", FILES, ids=lambda block: f"line-{block.line}")
def test_a_printed_file_is_read(block, tmp_path: Path) -> None:
    (tmp_path / "models.yaml").write_text(textwrap.dedent(block.text))
    settings = RolloutSettings(hf_checkpoint="models/policy", sglang_config=str(tmp_path / "models.yaml"))
    assert [(model.name, model.trained) for model in settings.served_models] == [("policy", True), ("judge", False)]


def test_a_model_that_a_command_names_is_one_of_the_file() -> None:
    named = re.findall(r"model://([a-z]+)/", PAGE.read_text())
    assert named and all(f"- name: {name}\n" in FILES[0].text for name in named)


def test_the_printed_reward_takes_an_empty_response() -> None:
    (block,) = [block for block in blocks(PAGE) if block.language == "python"]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(block.text), names)
    sample = SimpleNamespace(tokens=[1, 2, 3], response_length=0)
    assert asyncio.run(names["reward"](SimpleNamespace(), sample)) < -10


def test_every_key_is_on_the_page() -> None:
    rows = {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")}
    assert rows == {*MODEL_KEYS, *GROUP_KEYS} and len(FILES) == 3
