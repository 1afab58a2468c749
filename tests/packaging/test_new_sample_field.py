"""Adding a field to `Sample`, by hand, as CONTRIBUTING.md says: a line in the .proto and a line in the declaration.

The change is made to a copy of the tree. Nothing else is edited there, and the new field goes through everything that
a field goes through.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import uv

ROOT = Path(__file__).resolve().parents[2]
DECLARATION = Path("packages/types/slime/types/sample/sample.py")
PROTO = Path("proto/slime/v1/sample.proto")

WIRE_LINE = "  Tensor rollout_entropies = 100;\n"
PYTHON_LINE = (
    "    rollout_entropies: PerToken[list[float] | None] = array_field(np.float32, RowCount.RESPONSE, fill=0.0)\n"
)

ROUND_TRIPS = """
import json
from pathlib import Path

import numpy as np
import pytest

import slime.types.codec
from slime.buffer.buffer import Buffer
from slime.buffer.service import serve_buffer
from slime.buffer.settings import BufferSettings
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.codec import decode_sample, encode_sample, sample_from_proto
from slime.types.errors import InvalidField
from slime.types.rpc import RpcSettings
from slime.v1 import sample_pb2, tensor_pb2

assert Path(slime.types.codec.__file__).is_relative_to(Path.cwd()), "the copy is what is tested"


def filled(sample):
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-0.5, -1.0])
    sample.rollout_entropies = [0.25, 0.5]
    sample.append_response_tokens(tokens=[7], trainable=False)
    return sample


sample = filled(Sample(tokens=[1]))
assert sample.rollout_entropies == [0.25, 0.5, 0.0], "append keeps it aligned"
assert sample.array("rollout_entropies").dtype == np.float32
assert decode_sample(encode_sample(sample)) == sample
assert decode_sample(encode_sample(Sample())).rollout_entropies is None
assert Sample.from_dict(json.loads(json.dumps(sample.to_dict()))) == sample
sample.validate()

with pytest.raises(InvalidField, match="rollout_entropies: got length 1, expected 3"):
    Sample.from_dict(sample.to_dict() | {"rollout_entropies": [1.0]}).validate()
with pytest.raises(InvalidField, match="rollout_entropies"):
    Sample(rollout_entropies=["text"])
wrong = sample_pb2.Sample()
wrong.rollout_entropies.dtype = tensor_pb2.DATA_TYPE_INT32
with pytest.raises(InvalidField, match="rollout_entropies.dtype"):
    sample_from_proto(wrong, check_types=True)

with serve_buffer(Buffer(BufferSettings(n_samples_per_prompt=1)), RpcSettings(insecure=True)) as running:
    with BufferClient(running.address) as buffer:
        buffer.open_run("run")
        buffer.add_prompts(["1 + 1 ="])
        (lease,) = buffer.lease_groups(1)
        (answer,) = lease.group.samples
        answer.tokens = [1]
        filled(answer)
        answer.reward, answer.status = 1.0, Sample.Status.COMPLETED
        buffer.complete_group(lease.token, [answer])
        (stored,) = buffer.read_groups(states=["completed"])
        assert stored.group.samples[0].rollout_entropies == [0.25, 0.5, 0.0]
"""

IMPORT = "import slime.types.codec"


def insert(file: Path, before: str, line: str) -> None:
    text = file.read_text()
    assert text.count(before) == 1, f"{before!r} in {file}"
    file.write_text(text.replace(before, line + before))


def generate(tree: Path) -> None:
    path = f"{Path(uv.find_uv_bin()).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        [ROOT / "scripts" / "generate_proto", tree / "proto", tree / "packages" / "types"],
        check=True, timeout=240, env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PATH": path},
    )  # fmt: skip


def python(tree: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs `script` with the packages of `tree` before those of this environment."""
    paths = [*(str(package) for package in sorted((tree / "packages").iterdir())), *filter(None, sys.path)]
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def contents(tree: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(tree)): file.read_bytes()
        for file in sorted(tree.rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


def test_a_new_field_takes_one_line_in_the_proto_and_one_in_the_declaration(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT / "proto", tree / "proto")
    for package in ("types", "buffer"):
        shutil.copytree(ROOT / "packages" / package / "slime", tree / "packages" / package / "slime")
    before = contents(tree)

    insert(tree / DECLARATION, "    remove_sample: bool = False\n", PYTHON_LINE)
    half_done = python(tree, IMPORT)
    assert "rollout_entropies is a field of Sample and none of slime.v1.Sample" in half_done.stderr

    insert(tree / PROTO, "  // Integer [length - 1, layers, top_k].\n", WIRE_LINE)
    generate(tree)
    done = python(tree, ROUND_TRIPS)
    assert done.returncode == 0, done.stderr

    changed = {name for name, data in contents(tree).items() if before.get(name) != data}
    written = {str(DECLARATION), str(PROTO)}
    generated = ("sample_pb2.py", "sample_pb2.pyi", "sample.proto")
    assert changed == written | {f"packages/types/slime/v1/{name}" for name in generated}

    (tree / DECLARATION).write_bytes(before[str(DECLARATION)])
    other_half = python(tree, IMPORT)
    assert "rollout_entropies is a field of slime.v1.Sample and rollout_entropies none of Sample" in other_half.stderr
