"""First examples of the packages' READMEs run as they are printed.

Substituted: MODEL_DIR is a tiny model, and ports are free ones. Installing is left out.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kept_ports import kept_port

from pages import ROOT, blocks, content

NUM_GPUS = 0

# package, heading, and what the output holds in the end.
EXAMPLES = [
    ("types", "First example", ""),
    ("buffer", "First example", ""),
    ("rollout", "First example: generate and score a file", "rollout/raw_reward"),
    ("rollout", "Serve", "0 ["),
    ("trainer", "First example", "tensor"),
    ("trainer", "Train with three services", "train/loss"),
    ("converters", "First example", ""),
    ("launcher", "First example", "trained model"),
]
PORTS = ("7000", "7001", "7002")
# Until a port is open; a server that has ended will never open it.
WAIT = """until (exec 3<>/dev/tcp/127.0.0.1/{port}) 2>/dev/null; do
  for pid in $(jobs -p); do kill -0 $pid || exit 1; done
  sleep 0.1
done"""


def section(package: str, heading: str) -> list[tuple[str, str]]:
    """The blocks of a README under a heading, up to the next one of its level: (language, text)."""
    page = ROOT / "packages" / package / "README.md"
    start = content(page).index(f"\n## {heading}\n") + 1
    end = content(page).find("\n## ", start)
    first, last = (content(page).count("\n", 0, at if at >= 0 else None) + 1 for at in (start, end))
    return [(block.language, block.text) for block in blocks(page) if first <= block.line <= last]


def script(parts: list[tuple[str, str]], model: Path) -> str:
    """One bash script; what it started in the background ends with it."""
    lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT"]
    text = "\n".join(text for _, text in parts)
    free = {port: str(kept_port()) for port in PORTS if port in text}
    started = "".join(text for language, text in parts if language == "bash")
    for language, text in parts:
        for port, other in free.items():
            text = text.replace(port, other)
        text = text.replace("MODEL_DIR", shlex.quote(str(model)))
        if language == "python":
            # Until every server that was started listens.
            lines += [WAIT.format(port=other) for port, other in free.items() if port in started]
            lines.append(f"{shlex.quote(sys.executable)} - <<'PYTHON'\n{text}PYTHON")
        elif language == "bash":
            lines.append(re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", text, flags=re.M))
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 with a tokenizer of characters and a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    characters = ["<pad>", "<eos>", *(chr(code) for code in range(32, 127))]
    config = Qwen3Config(
        vocab_size=len(characters), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(directory)
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(characters)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the commands of the packages, as an installation has them."""
    directory = tmp_path_factory.mktemp("bin")
    modules = {
        "slime": "launcher", "slime-buffer": "buffer", "slime-rollout": "rollout", "slime-trainer": "trainer",
        "slime-convert": "converters",
    }  # fmt: skip
    for name, package in modules.items():
        path = directory / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m slime.{package}.cli "$@"\n')
        path.chmod(0o755)
    return directory


@pytest.mark.parametrize(("package", "heading", "printed"), EXAMPLES)
def test_an_example_runs_as_printed(
    tmp_path: Path, model: Path, programs: Path, package: str, heading: str, printed: str
) -> None:
    parts = section(package, heading)
    assert parts
    # Flags beside the example's, for a model and a machine of the reader's.
    parts = [(language, text) for language, text in parts if "slime train " not in text]
    bash = shutil.which("bash")
    assert bash is not None
    environment = os.environ | {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [bash, "-c", script(parts, model)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert printed in done.stdout
