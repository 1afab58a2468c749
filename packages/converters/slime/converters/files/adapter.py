"""Files of a LoRA adapter in the format of the library peft, alone in a directory or below the model it is merged into.

adapter_config.json             rank, alpha, the layers
adapter_model.safetensors       the tensors
"""

from __future__ import annotations

import shutil
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
# Inside a directory of merged weights: beside them, transformers would add the adapter to them once more.
ADAPTER_DIR = "adapter"


def has_adapter(path: str | Path) -> bool:
    return (Path(path) / CONFIG_FILE).is_file()


def adapter_files(path: Path) -> list[Path]:
    """Returns both files of the adapter in a directory; empty where it holds none."""
    files = [path / CONFIG_FILE, path / WEIGHTS_FILE]
    return files if all(file.is_file() for file in files) else []


def copy_adapter(files: list[Path], directory: Path) -> None:
    """Copies the files of an adapter into `directory`, which is made if needed."""
    directory.mkdir(exist_ok=True)
    for file in files:
        shutil.copyfile(file, directory / file.name)
