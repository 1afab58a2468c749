"""Files beside the weights of a Hugging Face directory: config, tokenizer, chat template, code of the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.converters.files.safetensors_dir import INDEX, disk_errors

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".distcp", ".index.json")
_OURS = ("trainer.json", "slime.json")


def side_files(directory: Path) -> list[Path]:
    """Lists the side files in sorted order, without hidden files and directories."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS)
        and path.name not in _OURS
    )


def copy_side_files(source: Path, target: Path, changes: Mapping[str, Any] | None = None) -> None:
    """Copies the side files of `source` into `target`, which is made if needed.

    changes: of config.json's keys; None takes a key out. `dtype` goes under the name that the config has for it.
    Without a change the file keeps its bytes. Raises OutOfSpace.
    """
    with disk_errors(target):
        target.mkdir(exist_ok=True)
        for path in side_files(source):
            shutil.copyfile(path, target / path.name)
        if changes:
            _change(target / "config.json", changes)


def config_changes(*, was_quantized: bool, dtype: str | None = None, vocab_size: int | None = None) -> dict[str, Any]:
    """Returns the changes of config.json after a conversion. dtype, vocab_size: None if the same as before."""
    changes: dict[str, Any] = {"quantization_config": None, "dtype": "bfloat16"} if was_quantized else {}
    return changes | {key: value for key, value in (("dtype", dtype), ("vocab_size", vocab_size)) if value is not None}


def _change(path: Path, changes: Mapping[str, Any]) -> None:
    config = json.loads(path.read_text())
    before = json.dumps(config)
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        elif key == "dtype":
            names = [name for name in ("dtype", "torch_dtype") if name in config]
            config.update(dict.fromkeys(names or ["dtype"], value))
        else:
            config[key] = value
    if json.dumps(config) != before:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def weight_map(directory: Path) -> dict[str, str]:
    """Returns the file of each tensor from the index; {} without an index."""
    index = directory / INDEX
    return dict(json.loads(index.read_text())["weight_map"]) if index.is_file() else {}
