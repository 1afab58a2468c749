"""Tokenizers of model directories: the class that AutoTokenizer would take, without torch where the files tell it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slime.rollout.prompts.tokenizer import PLAIN_CLASSES, TRUSTED_TYPES, is_plain, load_tokenizer


def directory_with(checkpoint: Path, target: Path, config: object, of_tokenizer: dict[str, object]) -> str:
    """Copies the tokenizer of `checkpoint`, with this config.json, and with these changes of tokenizer_config.json."""
    shutil.copytree(checkpoint, target)
    settings = json.loads((target / "tokenizer_config.json").read_text())
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer_config.json").write_text(json.dumps(settings | of_tokenizer))
    return str(target)


@pytest.mark.parametrize("model_type", TRUSTED_TYPES)
@pytest.mark.parametrize("name", PLAIN_CLASSES)
def test_a_plain_tokenizer_is_of_the_class_that_transformers_takes(checkpoint, tmp_path, model_type, name):
    from transformers import AutoTokenizer

    directory = directory_with(checkpoint, tmp_path / "model", {"model_type": model_type}, {"tokenizer_class": name})
    assert is_plain(directory)
    found, expected = load_tokenizer(directory), AutoTokenizer.from_pretrained(directory)
    assert type(found) is type(expected)
    assert found("12>7")["input_ids"] == expected("12>7")["input_ids"]
    messages = [{"role": "user", "content": "12"}]
    both = [t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) for t in (found, expected)]
    assert both == ["12>", "12>"]


@pytest.mark.parametrize(
    ("config", "of_tokenizer"),
    [
        ({"model_type": "qwen2"}, {}),
        ({"model_type": "llama"}, {"tokenizer_class": "LlamaTokenizer"}),
        ({"model_type": "llama"}, {"tokenizer_class": None}),
        ({"model_type": "llama"}, {"auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}}),
        ({}, {}),
        ([], {}),
    ],
)
def test_transformers_chooses_wherever_it_may_know_better(checkpoint, tmp_path, config, of_tokenizer):
    assert not is_plain(directory_with(checkpoint, tmp_path / "model", config, of_tokenizer))


def test_a_tokenizer_of_other_files_is_not_plain(checkpoint, tmp_path):
    directory = directory_with(checkpoint, tmp_path / "model", {"model_type": "llama"}, {})
    assert is_plain(directory)
    (Path(directory) / "tokenizer.json").unlink()
    assert not is_plain(directory)
    assert not is_plain("somebody/model-of-the-hub")


def test_a_plain_tokenizer_loads_without_torch(checkpoint, tmp_path):
    directory = directory_with(checkpoint, tmp_path / "model", {"model_type": "llama"}, {})
    code = (
        "import sys; from slime.rollout.prompts.tokenizer import load_tokenizer\n"
        "print(load_tokenizer(sys.argv[1])('12')['input_ids'], 'torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, check=True)
    assert ran.stdout == f"{load_tokenizer(directory)('12')['input_ids']} False\n"
