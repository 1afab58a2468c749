"""`slime init NAME`: writes a small project that trains as it is, as a start for one's own."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from slime.launcher.config.help import CommandParser
from slime.types.directories import path_errors
from slime.types.errors import ConfigError, InvalidSetting, SlimeError
from slime.types.files import write_whole

TEMPLATE = "slime.launcher.cli.template"
DIVISORS = range(2, 10)

README = """# {name}

A model learns to write multiples of a number: after `7:` an answer such as `28`. The model is tiny and untrained, so
all of this runs on a laptop in a minute.

```bash
slime train config.yaml --output-dir runs/first
slime show runs/first                                  # curves and samples, in the browser
slime eval runs/first                                  # scores the trained model again
echo 7: | slime chat runs/first                        # asks it; without a pipe, a conversation
slime export runs/first --format hf --output exported  # a Hugging Face directory; --format gguf for llama.cpp
```

| file | |
|---|---|
| `config.yaml` | all settings; flags win over them: `slime train config.yaml --lr 1e-3` |
| `reward.py` | the function that scores a response |
| `data/prompts.jsonl` | one prompt per line, with its label |
| `model/` | an untrained model of two layers that knows ten digits and a colon |

## Make it yours

1. `data/prompts.jsonl`: your prompts, as text or as chat messages, `[{{"role": "user", "content": "..."}}]`. Files in
   `.json`, `.csv` and `.parquet` work too.
2. `reward.py`: your score of a response. Rewards that are built in (`rm_type: math`, ...) need no file.
3. `config.yaml`: your model in `hf_checkpoint`, longer responses in `rollout_max_response_len`, and a learning rate of
   about `1.0e-6`.
4. `slime doctor config.yaml` checks model, data and reward before a run costs money, and `slime train config.yaml
   --dry-run` prints placement and memory.
"""


def parser(command: str) -> CommandParser:
    reader = CommandParser(
        prog="slime init",
        description="Writes a small project into the new directory NAME: prompts, a reward function, settings, a tiny "
        "model and a README. It trains as it is.",
    )
    reader.add_argument("name", metavar="NAME", help="Directory to create; it may exist if it is empty")
    return reader


def main(command: str, argv: Sequence[str]) -> int:
    try:
        directory = Path(parser(command).parse_strict(argv).name)
        write_project(directory)
    except SlimeError as error:
        print(f"slime: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    print(f"wrote {directory}; next:\n  cd {shlex.quote(str(directory))}")
    print("  slime train config.yaml --output-dir runs/first")
    return 0


def write_project(directory: Path) -> None:
    """Writes the project, or nothing. Raises InvalidSetting for a path that exists and is not an empty directory."""
    with path_errors(directory, "NAME"):
        existed = directory.exists()
        if existed and (not directory.is_dir() or any(directory.iterdir())):
            raise InvalidSetting.must_be("NAME", "a new or an empty directory", got=str(directory))
    try:
        _write_files(directory)
    except BaseException:
        # Otherwise the next attempt would find a directory that is not empty.
        for path in directory.iterdir() if directory.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if not existed and directory.is_dir():
            directory.rmdir()
        raise


def _write_files(directory: Path) -> None:
    with path_errors(directory, "NAME"):
        (directory / "data").mkdir(parents=True, exist_ok=True)
        for name in ("config.yaml", "reward.py"):
            write_whole(directory / name, files(TEMPLATE).joinpath(name).read_text(encoding="utf-8"), field="NAME")
        rows = "".join(json.dumps({"prompt": f"{n}:", "label": str(n)}) + "\n" for n in DIVISORS)
        write_whole(directory / "data" / "prompts.jsonl", rows, field="NAME")
        write_whole(directory / "README.md", README.format(name=directory.resolve().name), field="NAME")
    # Imported here, so that help and errors do not wait for NumPy.
    from slime.launcher.tiny_model import write_model

    write_model(directory / "model", "0123456789:", seed=0)
