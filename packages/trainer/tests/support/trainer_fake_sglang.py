"""The weight-update calls of SGLang 0.5.17's server, on the CPU.

Paths, bodies, status codes and answers are those of `entrypoints/http_server.py`, the group is made as
`srt/utils/common.py` makes it, payloads are read through the allow-list of its unpickler. gloo stands for NCCL, shared
memory for CUDA IPC. GET /held tells what was loaded and asked.

`trainer_fake_sglang.py` forks a server for each line FAULT:BUCKET, or empty line, on its standard input, and prints its
process id and port. They end with it. FAULT at the BUCKET-th request for an update, from 0: `die`, `refuse` (status
400), `silent` (no answer, no receive), or `slow` (what was received is loaded when the next request is there).
"""

import atexit
import base64
import functools
import hashlib
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

if TYPE_CHECKING:
    from slime.types.clients import Engine

ALLOWED = (
    "builtins.",
    "collections.",
    "copyreg.",
    "functools.",
    "itertools.",
    "operator.",
    "types.",
    "weakref.",
    "torch.",
)
TIMEOUT = timedelta(seconds=20)
TRANSPORTS = {"embedded": ("tensor", "disk"), "sglang": ("ipc", "nccl", "disk")}


class SafeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if any((module + ".").startswith(prefix) for prefix in ALLOWED):
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")


def new_group(body: dict[str, Any]) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

    rank, size, name = body["rank_offset"], body["world_size"], body["group_name"]
    url = f"tcp://{body['master_address']}:{body['master_port']}"
    store, rank, size = next(rendezvous(url, rank, size, timeout=TIMEOUT))
    store.set_timeout(TIMEOUT)
    store = dist.PrefixStore(name, store)
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(body["backend"]), store, group_name=name, backend_options=None, timeout=TIMEOUT
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


class Fake:
    def __init__(self, fault: str) -> None:
        self.fault, _, bucket = fault.partition(":")
        self.faulty = int(bucket or -1)
        self.updates = 0
        self.next_is_there = threading.Event()
        self.version = "0"
        self.held: dict[str, str] = {}
        self.calls: list[list[Any]] = []
        self.groups: dict[str, dist.ProcessGroup] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append([path, {k: v for k, v in body.items() if k != "serialized_named_tensors"}])
        if path.startswith("/update_weights_from"):
            number, self.updates = self.updates, self.updates + 1
            if number == self.faulty + 1:
                self.next_is_there.set()
            if number == self.faulty and self.fault != "slow":
                if self.fault == "die":
                    os._exit(9)
                if self.fault == "silent":
                    threading.Event().wait(60)
                return 400, {"success": False, "message": "no memory"}
        return {
            "/init_weights_update_group": self.init,
            "/destroy_weights_update_group": self.destroy,
            "/update_weights_from_distributed": self.receive,
            "/update_weights_from_tensor": self.open,
            "/update_weights_from_disk": self.read,
            "/weights_checker": self.check,
        }[path](body)

    def init(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        try:
            self.groups[body["group_name"]] = new_group(body)
        except Exception as error:
            return 400, {"success": False, "message": f"Failed to initialize custom process group: {error}."}
        return 200, {"success": True, "message": "Succeeded to initialize custom process group."}

    def destroy(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        dist.destroy_process_group(self.groups.pop(body["group_name"]))
        return 200, {"success": True, "message": "Succeeded to destroy custom process group."}

    def receive(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["load_format"] == "flattened_bucket"
        empty = [
            torch.empty(shape, dtype=getattr(torch, dtype))
            for shape, dtype in zip(body["shapes"], body["dtypes"], strict=True)
        ]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in empty])
        dist.broadcast(flat, src=0, group=self.groups[body["group_name"]])
        if self.fault == "slow" and self.updates == self.faulty + 1 and not self.next_is_there.wait(TIMEOUT.seconds):
            return 400, {"success": False, "message": "the next request does not come"}
        start = 0
        for name, tensor in zip(body["names"], empty, strict=True):
            self.load(name, flat[start : start + tensor.nbytes].view(tensor.dtype).reshape(tensor.shape))
            start += tensor.nbytes
        return self.done(body)

    def open(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        assert body["load_format"] == "flattened_bucket"
        loaded: list[dict[str, str]] = []
        for payload in body["serialized_named_tensors"]:
            got = SafeUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
            flat, rank = got["flattened_tensor"], {}
            for meta in got["metadata"]:
                tensor = flat[meta.start_idx : meta.end_idx].view(meta.dtype).reshape(meta.shape)
                assert meta.numel == meta.end_idx - meta.start_idx
                rank[meta.name] = digest(tensor)
            loaded.append(rank)
        assert all(rank == loaded[0] for rank in loaded)
        self.held |= loaded[0]
        return self.done(body)

    def read(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        for file in Path(body["model_path"]).glob("*.safetensors"):
            for name, tensor in load_file(file).items():
                self.load(name, tensor)
        return self.done(body)

    def check(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body["action"] == "reset_tensors":
            self.held = dict.fromkeys(self.held, "random")
            return 200, {"success": True}
        places = {"tp_rank": 0, "pp_rank": 0, "dp_rank": 0}
        return 200, {"success": True, "ranks": [{"checksums": self.held, "parallelism_info": places}]}

    def load(self, name: str, tensor: torch.Tensor) -> None:
        self.held[name] = digest(tensor)

    def done(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        return 200, {"success": True, "message": "Success"}


def digest(tensor: torch.Tensor) -> str:
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(content).hexdigest()}"


def serve(fake: Fake) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.tell(200, {"version": fake.version, "held": fake.held, "calls": fake.calls})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.tell(*fake.answer(self.path, body))

        def tell(self, status: int, content: dict[str, Any]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


class FakeEngine:
    """A process that this script has forked."""

    def __init__(self, fault: str = "") -> None:
        script = _script()
        print(fault, file=script.stdin, flush=True)
        self.pid, port = map(int, script.stdout.readline().split())
        self.url = f"http://127.0.0.1:{port}"

    def describe(self, name: str, tp_size: int = 1) -> "Engine":
        # The process itself has no path to slime.
        from slime.types.clients import Engine

        return Engine(name, self.url, "sglang", True, 0, tp_size, weight_transports=TRANSPORTS["sglang"])

    def told(self) -> dict[str, Any]:
        with urllib.request.urlopen(self.url, timeout=60) as answer:
            return json.load(answer)

    def stop(self) -> None:
        # Its id is its own until the script ends, which does not wait for what it has forked.
        os.kill(self.pid, signal.SIGKILL)


@functools.cache
def _script() -> Any:
    script = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(script.kill)
    return script


class StandInRollout:
    def __init__(self, engines: "list[Engine]") -> None:
        self.engines = engines
        self.calls: list[str] = []

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> "list[Engine]":
        self.calls.append(f"begin {weight_version}")
        return self.engines

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None:
        self.calls.append("onload")

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None:
        self.calls.append(f"commit {weight_version}")

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None:
        self.calls.append(f"abort {weight_version}: {reason}")


def run(fault: str) -> None:
    parent = os.getppid()
    with tempfile.TemporaryDirectory() as directory:
        # SGLang's processes have a group of their own before they join another.
        dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=0, world_size=1)
        server = serve(Fake(fault))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(os.getpid(), server.server_address[1], flush=True)
        while os.getppid() == parent:
            time.sleep(0.2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        if not os.fork():
            run(line.strip())
            os._exit(0)
