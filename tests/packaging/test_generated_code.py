"""The committed protobuf code is what its .proto files say, and runs on the oldest and the newest runtime."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uv

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "packages" / "types" / "slime" / "v1"


def generate(proto: Path, output: Path, **variables: str) -> dict[str, str]:
    """File name to text, of everything generated from `proto`. variables: of the environment."""
    path = f"{Path(uv.find_uv_bin()).parent}{os.pathsep}{os.environ['PATH']}"
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [ROOT / "scripts" / "generate_proto", proto, output]
    subprocess.run(command, check=True, timeout=240, env=inherited | {"PATH": path} | variables)
    return {file.name: file.read_text() for file in (output / "slime" / "v1").iterdir()}


def committed() -> dict[str, str]:
    return {file.name: file.read_text() for file in COMMITTED.iterdir() if file.suffix in (".py", ".pyi", ".proto")}


def test_the_committed_code_is_current(tmp_path: Path) -> None:
    fresh = generate(ROOT / "proto", tmp_path)
    assert sorted(fresh) == sorted(committed())
    stale = [name for name, text in committed().items() if text != fresh[name]]
    assert not stale, f"run scripts/generate_proto: {stale}"


def test_stale_code_is_seen(tmp_path: Path) -> None:
    edited = tmp_path / "proto"
    shutil.copytree(ROOT / "proto", edited)
    file = edited / "slime" / "v1" / "sample.proto"
    file.write_text(file.read_text() + "\nmessage Addition {\n  string text = 1;\n}\n")
    fresh = generate(edited, tmp_path / "output")
    stale = {name for name, text in committed().items() if text != fresh[name]}
    assert stale == {"sample.proto", "sample_pb2.py", "sample_pb2.pyi"}


def test_two_may_be_the_first_to_generate(tmp_path: Path) -> None:
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(generate, ROOT / "proto", tmp_path / name, **cache) for name in ("first", "second")]
        assert found[0].result() == found[1].result() == committed()


ROUND_TRIP = """
import grpc
from google import protobuf
from slime.types import Sample
from slime.types.codec import decode_sample, encode_sample
from slime.types.rpc import RpcSettings, Server, connect
from slime.v1 import buffer_pb2, buffer_pb2_grpc, rollout_pb2_grpc, trainer_pb2_grpc

sample = Sample(index=3, prompt="2 + 2?", tokens=[1, 2, 3], response_length=2, loss_mask=[1, 0])
assert decode_sample(encode_sample(sample)).tokens == [1, 2, 3]

class Buffer(buffer_pb2_grpc.BufferServiceServicer):
    def GetRun(self, request, context):
        return buffer_pb2.GetRunResponse()

server = Server([(buffer_pb2_grpc.add_BufferServiceServicer_to_server, Buffer())], RpcSettings(),
                service_names=["slime.v1.BufferService"])
address = server.start()
with connect(address) as channel:
    buffer_pb2_grpc.BufferServiceStub(channel).GetRun(buffer_pb2.GetRunRequest(), timeout=60)
server.stop(1)
print(protobuf.__version__, grpc.__version__)
"""


@pytest.mark.parametrize("resolution, protobuf, grpcio", [("lowest", "6.30.", "1.72."), ("highest", "7.", "1.")])
def test_it_runs_on_the_oldest_and_the_newest_runtime(
    make_environment: Callable, resolution: str, protobuf: str, grpcio: str
) -> None:
    environment = make_environment()
    environment.install("slime-types", options=("--resolution", resolution))
    versions = environment.run(ROUND_TRIP).split()
    assert versions[0].startswith(protobuf) and versions[1].startswith(grpcio)
