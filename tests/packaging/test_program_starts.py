"""The programs' starts: Ctrl-C while modules are imported ends them with exit code 130 and without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    name: target
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
    for name, target in tomllib.loads(path.read_text(encoding="utf-8"))["project"].get("scripts", {}).items()
}
COMMAND_MODULES = {name: target.partition(":")[0].replace("__main__", "cli") for name, target in SCRIPTS.items()}
# Starts a program as its script does, and gets SIGINT, as a terminal sends it, when a module is searched for.
START = """
import signal, sys
program, target, moment, *words = sys.argv[1:]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = [program, *words]
if target.endswith(".py"):
    import runpy

    runpy.run_path(target, run_name="__main__")
module, _, function = target.partition(":")
namespace = {}
exec(f"from {module} import {function} as main", namespace)
sys.exit(namespace["main"]())
"""


@pytest.mark.parametrize(
    ("program", "moment", "words"),
    [
        *((program, module, "--help") for program, module in COMMAND_MODULES.items()),
        *((program, "argparse", "--help") for program in SCRIPTS),
        *((program, "numpy", "--help") for program in SCRIPTS),
        ("slime", "slime.launcher.show.command", "runs"),
        ("scripts/train.py", "slime.launcher.cli", "--help"),
        ("scripts/train_async.py", "slime.launcher.cli.train", "--help"),
        ("slime", "grpc", "doctor"),
        ("slime-buffer", "grpc", "serve --help"),
        ("slime-rollout", "grpc", "serve --help"),
        ("slime-trainer", "grpc", "serve --help"),
        ("slime-rollout", "aiohttp", "generate --prompts a.jsonl --output b.jsonl --hf-checkpoint ."),
        ("slime-convert", "torch", "hf-to-torch-dist --hf-checkpoint . --save out"),
    ],
)
def test_an_interrupted_start_ends_without_a_traceback(program: str, moment: str, words: str, tmp_path: Path) -> None:
    target = SCRIPTS.get(program, str(ROOT / program))
    command = [sys.executable, "-c", START, program, target, moment, *words.split()]
    # The paths of this process may be relative, and the program starts elsewhere.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path if path)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr, ended.stdout) == (130, "", "")
