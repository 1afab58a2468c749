"""Names on the Hub: what counts as one, downloads, the cache, and what is said without a network."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.record import settings_text
from slime.launcher.hub.fetch import fetch
from slime.launcher.hub.names import HubName, dataset_name, model_name
from slime.types.errors import MissingFile, NotAvailable

NUM_GPUS = 0
COMMIT = "0" * 39 + "1"
FILES = {"config.json": b'{"model_type": "qwen3"}', "tokenizer.json": b"{}", "model.safetensors": b"weights"}
OTHERS = {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "onnx/model.json": b"{}"}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@v1.0", HubName("Qwen/Qwen3-0.6B", "v1.0")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", HubName("Qwen/Qwen3-0.6B", "refs/pr/1")),
        ("model", None),
        ("/models/Qwen3", None),
        ("./a/b", None),
        ("a/b/c", None),
    ],
)
def test_names_of_models(text: str, name: HubName | None) -> None:
    assert model_name(text) == name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("openai/gsm8k", HubName("openai/gsm8k")),
        ("openai/gsm8k:test", HubName("openai/gsm8k", split="test")),
        ("openai/gsm8k:main:test", HubName("openai/gsm8k", config="main", split="test")),
        ("openai/gsm8k:main:test@abc", HubName("openai/gsm8k", "abc", "main", "test")),
        ("data/train.jsonl", None),
        ("data/train.csv", None),
    ],
)
def test_names_of_data_sets(text: str, name: HubName | None) -> None:
    assert dataset_name(text) == name


def test_a_path_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_name("runs/model") is None and dataset_name("runs/gsm8k") is None
    assert model_name("walks/model") is not None


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the Hub does about one model, of which it has one commit."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/ORG/tiny/revision/"):
            siblings = [{"rfilename": name} for name in FILES | OTHERS]
            self.answer(json.dumps({"id": "ORG/tiny", "sha": COMMIT, "siblings": siblings}).encode(), {})
        elif path.startswith("/api/models/ORG/tiny/tree/"):
            tree = [{"type": "file", "path": name, "size": len(c), "oid": name} for name, c in (FILES | OTHERS).items()]
            self.answer(json.dumps(tree).encode(), {})
        elif path.startswith("/ORG/tiny/resolve/"):
            name = path.split("/", 5)[5]
            self.server.asked.append(name)  # type: ignore[attr-defined]
            self.answer(FILES[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    do_HEAD = do_GET

    def answer(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in (headers | {"Content-Length": str(len(content))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def hub() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def fetched(name: str, port: int, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Resolves a name in a process of its own: the library reads its settings when it is imported."""
    code = (
        "import sys\nfrom slime.launcher.hub.fetch import local_model\nfrom slime.types.errors import MissingFile\n"
        "try:\n    print(local_model(sys.argv[1], '--hf-checkpoint'))\n"
        "except MissingFile as error:\n    print(error)\n"
    )
    variables = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    variables |= {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"} | more
    return subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=120, check=True, env=variables
    )


def test_a_model_is_downloaded_once_and_then_taken_from_the_cache(tmp_path: Path) -> None:
    with hub() as server:
        port = server.server_port
        directory = Path(fetched("ORG/tiny@main", port, tmp_path).stdout.strip())
        assert {path.name: path.read_bytes() for path in directory.iterdir()} == FILES
        assert not set(OTHERS) & set(server.asked)  # type: ignore[attr-defined]
        missing = fetched("ORG/other", port, tmp_path).stdout
    assert "--hf-checkpoint ORG/other is neither a path here nor in the cache" in missing and "HF_TOKEN" in missing
    offline = fetched("ORG/tiny@main", port, tmp_path, HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == str(directory)
    gone = fetched("ORG/other@v2", port, tmp_path, HF_HUB_OFFLINE="1").stdout
    assert "could not be downloaded from the Hub" in gone
    assert "`hf download ORG/other --revision v2 --local-dir other`" in gone and "--hf-checkpoint other" in gone


def test_a_missing_library_is_named() -> None:
    # A module that is None in sys.modules cannot be imported.
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets", None)
        with pytest.raises(NotAvailable, match="--prompt-data openai/gsm8k requires the package datasets: pip install"):
            fetch({"prompt_data": "openai/gsm8k"})


DATASETS = '''"""Stands for the library `datasets`, which is not installed for tests."""
import os
import pyarrow, pyarrow.parquet

__version__ = "3.6.0"

class Table:
    def __init__(self, revision):
        file = {"filename": f"/cache/openai___gsm8k/main/0.0.0/{'ab' * 20}/gsm8k-test.arrow"}
        self.cache_files = [file] if revision == "v1" else []
        self._fingerprint = revision
    def to_parquet(self, file):
        pyarrow.parquet.write_table(pyarrow.table({"question": ["1 + 1"], "answer": ["2"]}), file)

def load_dataset(name, config, split, revision):
    if (name, config, split) != ("openai/gsm8k", "main", "test"):
        raise ConnectionError(f"Couldn't reach {name!r} on the Hub")
    return Table(revision)
'''


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module that stands for `datasets`, whose rows are kept below tmp_path/cache."""
    (tmp_path / "datasets.py").write_text(DATASETS)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("datasets", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield tmp_path / "datasets.py"
    sys.modules.pop("datasets", None)


def test_a_library_that_may_run_code_of_a_data_set_is_refused(library: Path) -> None:
    library.write_text(DATASETS.replace("3.6.0", "2.21.0"))
    with pytest.raises(NotAvailable, match=r"openai/gsm8k:main:test requires datasets 3.0 or later: 2.21.0 is"):
        fetch({"prompt_data": "openai/gsm8k:main:test"})


def test_a_run_records_the_commits_of_what_it_fetched(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("huggingface_hub")
    module.snapshot_download = lambda name, **_: f"/cache/models--ORG--tiny/snapshots/{COMMIT}"
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    values = {
        "hf_checkpoint": "ORG/tiny@main",
        "prompt_data": "openai/gsm8k:main:test@v1@[0:1]",
        "eval_prompt_data": [["held", "openai/gsm8k:main:test@v1"], ["mine", "rows.csv"]],
    }
    data = f"openai/gsm8k:main:test@{'ab' * 20}"
    assert fetch(values) == {
        "hf_checkpoint": f"ORG/tiny@{COMMIT}",
        "prompt_data": f"{data}@[0:1]",
        "eval_prompt_data": [["held", data], ["mine", "rows.csv"]],
    }
    words = ["--hf-checkpoint", "ORG/tiny", "--prompt-data", "p.jsonl", "--rm-type", "math", "--num-rollout", "1"]
    (library.parent / "p.jsonl").write_text('{"input": "1"}\n')
    monkeypatch.chdir(library.parent)
    monkeypatch.setattr("slime.launcher.config.run_config.check_files", lambda *_: None)
    monkeypatch.setattr("slime.launcher.config.run_config.check_learning", lambda *_: None)
    config = run_config.parse([*words, "--n-samples-per-prompt", "2"], environment={})
    assert f"hf_checkpoint: ORG/tiny@{COMMIT}\n" in settings_text(config)
    # Sets of a file stay there: named beside it, they would be refused.
    (library.parent / "sets.yaml").write_text("eval: {datasets: [{name: held, path: 'openai/gsm8k:main:test@v1'}]}\n")
    more = ["--eval-config", "sets.yaml", "--eval-interval", "1"]
    config = run_config.parse([*words, *more, "--n-samples-per-prompt", "2"], environment={})
    assert config.flat["eval_prompt_data"][0][1].endswith(".parquet")
    (library.parent / "again.yaml").write_text(settings_text(config))
    again = run_config.parse(["--config", "again.yaml"], environment={})
    assert again.flat["eval_prompt_data"] == config.flat["eval_prompt_data"]


def test_a_data_set_becomes_a_file_that_keeps_its_slice(library: Path, tmp_path: Path) -> None:
    name = "openai/gsm8k:main:test@v1"
    values = {"prompt_data": f"{name}@[0:1]", "eval_prompt_data": [[name]]}
    fetch(values)
    path, rows = str(values["prompt_data"]).split("@")
    assert rows == "[0:1]" and Path(path).parent == tmp_path / "cache" / "slime" / "datasets"
    assert Path(path).name.startswith("openai--gsm8k--main--test--") and path.endswith(".parquet")
    assert values["eval_prompt_data"] == [["gsm8k", path]]
    # The library may hold data sets in memory, without files.
    revisions: list[dict[str, Any]] = [{"prompt_data": f"openai/gsm8k:main:test@{word}"} for word in ("v2", "v3")]
    for each in revisions:
        fetch(each)
    assert len({path, *(each["prompt_data"] for each in revisions)}) == 3
    with pytest.raises(MissingFile, match=r"--eval-prompt-data held openai/gsm8k is neither .* Couldn't reach"):
        fetch({"eval_prompt_data": [["held", "openai/gsm8k"]]})


def test_paths_stay_as_they_are(tmp_path: Path) -> None:
    values = {"hf_checkpoint": "model", "prompt_data": "a/b.jsonl@[0:2]", "eval_prompt_data": [["x", "y.csv"], ["z"]]}
    before = dict(values)
    assert not fetch(values) and values == before
