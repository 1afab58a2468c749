"""A stand-in for SGLang with two ranks, each a process with its part of a model in fused matrices: takes broadcasts.

    python broadcast_engine.py DIR    # a model's directory; prints its port, and ends with its standard input

Requests, answers and groups are SGLang's (0.5.17), with gloo for NCCL. Deltas are applied by what our plug-in hooks
into SGLang. GET /held tells the checksums of the tensors of both ranks.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from datetime import timedelta
from http.server import ThreadingHTTPServer
from multiprocessing import Pipe, Process
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from json_answers import JsonHandler

RANKS = 2
TIMEOUT = timedelta(seconds=30)
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up", "up_proj": "gate_up"}


class Part:
    """A rank's part of the model in `directory`, which has Qwen3's names."""

    def __init__(self, rank: int, directory: str) -> None:
        self.rank = rank
        self.held: dict[str, Tensor] = {}
        self.first: dict[str, int] = {}
        rows: dict[str, int] = {}
        for name, tensor in load_file(Path(directory) / "model.safetensors").items():
            target, shape = self.target(name), tensor.shape
            self.first[name] = rows.get(target, 0)
            rows[target] = self.first[name] + shape[0] // (RANKS if self.divided(name) == 0 else 1)
            columns = [shape[1] // (RANKS if self.divided(name) == 1 else 1)] if len(shape) > 1 else []
            self.held[target] = torch.zeros(rows[target], *columns, dtype=torch.bfloat16)

    def target(self, name: str) -> str:
        for part, fused in FUSED.items():
            name = name.replace(f".{part}.", f".{fused}.")
        return name

    def divided(self, name: str) -> int | None:
        """Returns the dimension in which the ranks divide a tensor; None where each has all of it."""
        if "norm" in name:
            return None
        return 1 if "o_proj" in name or "down_proj" in name else 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, weight in weights:
            dim = self.divided(name)
            if dim is not None:
                size = weight.shape[dim] // RANKS
                weight = weight.narrow(dim, self.rank * size, size)
            self.held[self.target(name)].narrow(0, self.first[name], weight.shape[0]).copy_(weight)

    def checksums(self) -> dict[str, str]:
        return {
            name: hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            for name, tensor in self.held.items()
        }


class Rank:
    """One of the engine's processes."""

    def __init__(self, rank: int, directory: str, model: str) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=RANKS)
        distributed: Any = ModuleType("sglang.srt.distributed")
        distributed.get_tp_group = lambda: SimpleNamespace(world_size=RANKS, device_group=dist.group.WORLD)
        sys.modules["sglang.srt.distributed"] = distributed
        self.rank = rank
        self.model = Part(rank, model)
        self.device = "cpu"
        self._model_update_group: dict[str, Any] = {}

    def get_model(self) -> Part:
        return self.model

    def answer(self, path: str, body: dict[str, Any]) -> tuple[bool, Any]:
        if path == "/held":
            return True, self.model.checksums()
        if path == "/destroy_weights_update_group":
            dist.destroy_process_group(self._model_update_group.pop(body["group_name"]))
        elif path == "/init_weights_update_group":
            self._model_update_group[body["group_name"]] = self.join(body)
        elif path == "/reset":
            self.model.held["model.norm.weight"].fill_(3.0)
        else:
            from slime.rollout.engines.sglang.broadcast_deltas import update_weights

            names = ("names", "dtypes", "shapes", "group_name", "load_format")
            return update_weights(type(self).receive, self, *(body[name] for name in names))
        return True, "Success"

    def join(self, body: dict[str, Any]) -> dist.ProcessGroup:
        from torch.distributed.distributed_c10d import Backend, _new_process_group_helper, _world, rendezvous

        rank, size, name = body["rank_offset"] + self.rank, body["world_size"], body["group_name"]
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(rendezvous(url, rank, size, timeout=TIMEOUT))
        store = dist.PrefixStore(name, store)
        group, _ = _new_process_group_helper(size, rank, [], Backend("gloo"), store, group_name=name, timeout=TIMEOUT)
        _world.pg_group_ranks[group] = {i: i for i in range(size)}
        return group

    def receive(self, names: Any, dtypes: Any, shapes: Any, group_name: str, load_format: str) -> tuple[bool, str]:
        try:
            types = [getattr(torch, dtype) for dtype in dtypes]
        except AttributeError as error:
            return False, f"Failed to update parameter online: {error}."
        assert load_format == "flattened_bucket"
        empty = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, types, strict=True)]
        flat = torch.cat([tensor.flatten().view(torch.uint8) for tensor in empty])
        dist.broadcast(flat, src=0, group=self._model_update_group[group_name])
        parts = flat.split([tensor.nbytes for tensor in empty])
        tensors = [part.view(tensor.dtype).reshape(tensor.shape) for part, tensor in zip(parts, empty, strict=True)]
        self.model.load_weights(zip(names, tensors, strict=True))
        return True, "Success"


def follow(rank: int, directory: str, model: str, pipe: Any) -> None:
    member = Rank(rank, directory, model)
    while True:
        pipe.send(member.answer(*pipe.recv()))


def main(model: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = Pipe()
        Process(target=follow, args=(1, directory, model, theirs), daemon=True).start()
        first, lock, version = Rank(0, directory, model), threading.Lock(), ["0"]

        def both(path: str, body: dict[str, Any]) -> list[tuple[bool, Any]]:
            with lock:
                ours.send((path, body))
                own = first.answer(path, body)
                return [own, ours.recv()]

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                held = [content for _, content in both("/held", {})] if self.path == "/held" else None
                self.answer(200, {"weight_version": version[0], "held": held})

            def do_POST(self) -> None:
                body = self.body()
                (success, message), (success_too, _) = both(self.path, body)
                success = success and success_too
                if success and body.get("weight_version") is not None:
                    version[0] = body["weight_version"]
                self.answer(200 if success else 400, {"success": success, "message": message})

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        sys.stdin.read()


class BroadcastEngine:
    """The engine, as a process that `stop` ends."""

    def __init__(self, model: str, python_path: str) -> None:
        self.name, self.kind = "sglang-0", "sglang"
        self.process = subprocess.Popen(
            [sys.executable, __file__, model], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={"PYTHONPATH": python_path, "PATH": "/usr/bin:/bin"},
        )  # fmt: skip
        assert self.process.stdout is not None
        self.url = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"

    def stop(self) -> None:
        self.process.communicate(timeout=60)


if __name__ == "__main__":
    main(sys.argv[1])
