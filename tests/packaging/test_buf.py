"""The contract passes `buf lint`, and `buf breaking` sees a change that would break a client."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def buf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("BUF_CACHE_DIR", str(tmp_path / "cache"))
    found = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert found, "the buf-bin package brings `buf`"
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_lint(buf: str) -> None:
    done = run(buf, "lint", str(ROOT / "proto"))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_broken_contract_is_seen(buf: str, tmp_path: Path) -> None:
    edited = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", edited)
    assert run(buf, "breaking", str(edited), "--against", str(ROOT / "proto")).returncode == 0

    file = edited / "slime" / "v1" / "tensor.proto"
    kept = file.read_text().replace(" = 1;", " = 101;", 1)
    assert kept != file.read_text()
    file.write_text(kept)
    done = run(buf, "breaking", str(edited), "--against", str(ROOT / "proto"))
    assert done.returncode != 0
    assert "tensor.proto" in done.stdout
