"""Files of a LoRA adapter in the format of the library peft, alone in a directory or below the model it is merged into.

adapter_config.json             rank, alpha, the layers
adapter_model.safetensors       the tensors
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from slime.converters.files.safetensors_dir import read_header
from slime.types.errors import InvalidFile, MissingFile

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Inside a directory of merged weights: beside them, transformers would add the adapter to them once more.
ADAPTER_DIR = "adapter"


def has_adapter(path: str | Path) -> bool:
    return (Path(path) / CONFIG_FILE).is_file()


def read_adapter(directory: Path) -> dict[str, Any]:
    """Returns the object of adapter_config.json. Raises MissingFile or InvalidFile for either file of an adapter that
    cannot be read, weights that are cut included."""
    path = directory / CONFIG_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise MissingFile(f"no such file {path}", field="path", value=str(path), expected="a JSON object") from None
    except OSError as error:
        raise InvalidFile(f"cannot read {path}: {error.strerror}", field="path", value=str(path)) from None
    try:
        about = json.loads(content)
    except (ValueError, RecursionError):
        about = content.decode("utf-8", "replace")
    if not isinstance(about, dict):
        raise InvalidFile.must_be(str(path), "a JSON object", got=about)
    read_header(directory / WEIGHTS_FILE)
    return about


def adapter_files(path: Path) -> list[Path]:
    """Returns both files of the adapter in a directory; empty where it holds none."""
    files = [path / CONFIG_FILE, path / WEIGHTS_FILE]
    return files if all(file.is_file() for file in files) else []


def copy_adapter(files: list[Path], directory: Path) -> None:
    """Copies the files of an adapter into `directory`, which is made if needed."""
    directory.mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, directory / file.name)
