"""Fenced blocks of every page: they name their language, and what is Python, JSON, YAML or TOML can be read."""

from __future__ import annotations

import ast
import importlib
import json
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from pages import ROOT, Block, blocks, content, pages

NUM_GPUS = 0

EVERY = [block for page in pages() for block in blocks(page)]


def of(*languages: str) -> list[Block]:
    return [block for block in EVERY if block.language in languages]


def test_every_block_names_its_language() -> None:
    assert [block.name for block in EVERY if not block.language] == []


@pytest.mark.parametrize("block", of("python"), ids=lambda block: block.name)
def test_python_compiles(block: Block) -> None:
    compile(block.text, block.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", of("json", "jsonl", "yaml", "toml"), ids=lambda block: block.name)
def test_data_can_be_read(block: Block) -> None:
    if block.language == "yaml":
        yaml.safe_load(block.text)
    elif block.language == "toml":
        tomllib.loads(block.text)
    else:
        texts = (
            [line for line in block.text.splitlines() if line.strip()] if block.language == "jsonl" else [block.text]
        )
        for text in texts:
            json.loads(text)


@pytest.mark.parametrize("block", of("python"), ids=lambda block: block.name)
def test_python_imports_what_is_there(block: Block) -> None:
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "slime":
            module = importlib.import_module(node.module or "")
            assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_dotted_names_of_ours_are_there(page: Path) -> None:
    """`slime.trainer.step` and the like, in the text and in commands."""
    named = set(re.findall(r"(?<![\w./-])slime(?:\.[a-zA-Z_]\w*)+(?![\w/*])", content(page)))
    missing = [name for name in sorted(named - ELSEWHERE) if not name.startswith("slime.v1") and not there(name)]
    said = content(page).partition("### Modules that are missing")[2].partition("\n## ")[0]
    assert missing == sorted(set(re.findall(r"`(slime\.[\w.]+)`", said)))


def there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


# Entry points, addresses and files: no Python.
ELSEWHERE = {"slime.training_flags", "slime.json", "slime.NAME"}
