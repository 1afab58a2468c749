"""A new kind of engine is one class and one row: it generates and takes weights over real HTTP."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import safetensors.torch
import torch

from slime.buffer.service import serve as serve_buffer
from slime.buffer.settings import BufferSettings
from slime.rollout.engines import registry
from slime.rollout.engines.kind import REGULAR, Abilities, EngineKind, EngineNode, MemoryUse, Starts
from slime.rollout.engines.process import EngineProcess
from slime.rollout.service import serve as serve_rollout
from slime.rollout.settings.rollout import RolloutSettings
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import transport_for
from slime.trainer.weight_sync.tensor import TensorTransport
from slime.types.clients import BufferClient, RolloutClient
from slime.types.errors import ConfigError, NotAvailable
from slime.types.rpc import RpcSettings

T = TypeVar("T")
VOCABULARY = ["<pad>", "<eos>", *"0123456789>"]

# Answers every prompt with its own tokens and an end of text; counts the bytes of its weights.
SERVER = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

version, received, letters = "0", 0, sys.argv[2]

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer({"engine": "echo", "weight_version": version, "received": received})

    def do_POST(self):
        global version, received
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if url.path == "/update_weights_from_tensor":
            query = parse_qs(url.query)
            received += len(body)
            version = query["weight_version"][0] if query["last"] == ["true"] else version
            self.answer({"success": True})
        elif url.path == "/generate":
            request = json.loads(body)
            self.answer([self.echo(ids, rid) for ids, rid in zip(request["input_ids"], request["rid"])])
        else:
            self.answer({})

    def echo(self, ids, rid):
        output = [*ids, 1]
        meta = {"id": rid, "finish_reason": {"type": "stop", "matched": 1}, "weight_version": version,
                "output_token_logprobs": [[-0.5, token, None] for token in output]}
        return {"text": "".join(letters[token - 2] for token in ids), "output_ids": output, "meta_info": meta}

    def answer(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
os.write(int(sys.argv[1]), json.dumps({"port": server.server_address[1]}).encode() + b"\\n")
server.serve_forever()
"""


class Echo(EngineKind):
    name = "echo"
    title = "the echo engine"
    weight_transports = ("tensor",)

    def is_installed(self) -> bool:
        return True

    def not_installed(self) -> ConfigError:
        return NotAvailable.requires("--rollout-engine echo", "Python")

    def divide(self, gpus: Sequence[T], engines: int, gpus_per_engine: int) -> list[list[T]]:
        return [[] for _ in range(engines)]

    def starts(
        self, settings: RolloutSettings, gpus: Sequence[str], first: int = 0, node: EngineNode | None = None,
        others: int = 0, worker_type: str = REGULAR,
    ) -> Starts:  # fmt: skip
        def command(announce: int, parent: int) -> list[str]:
            return [sys.executable, "-c", SERVER, str(announce), "".join(VOCABULARY[2:])]

        return [
            partial(EngineProcess, f"echo-{first + i}", "echo", command) for i in range(settings.rollout_num_engines)
        ]

    def abilities(self, server_info: Mapping[str, Any]) -> Abilities:
        return Abilities(seeded=True)

    def memory(self, settings: RolloutSettings) -> MemoryUse:
        return MemoryUse(dtype=None, usual_dtype="float32")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.save_pretrained(tmp_path / "model")
    config = {"model_type": "qwen3", "max_position_embeddings": 32}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return tmp_path / "model"


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferClient]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}>", "label": f"{i}>"}) + "\n" for i in range(4)))
    settings = BufferSettings(prompt_data=str(file), input_key="prompt", label_key="label", n_samples_per_prompt=2)
    service = serve_buffer(settings, RpcSettings())
    with BufferClient(service.address) as client:
        yield client
    service.stop(0)


def test_a_new_kind_of_engine_is_a_class_and_a_row(
    checkpoint: Path, buffer: BufferClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The row; the only one, so that `auto` takes it on a machine with GPUs, too.
    monkeypatch.setattr(registry, "KINDS", {"echo": Echo()})
    settings = RolloutSettings(
        hf_checkpoint=str(checkpoint),
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        rm_type="exact_partial",
        rollout_num_engines=2,
    )
    service = serve_rollout(settings, RpcSettings(), buffer_address=buffer.address)
    with RolloutClient(service.address, writer=buffer.open_run("echo")) as rollout:
        engines = rollout.begin_weight_update(1)
        assert [(engine.name, engine.kind) for engine in engines] == [("echo-0", "echo"), ("echo-1", "echo")]
        assert transport_for(engines, TrainerSettings(hf_checkpoint="m")) == "tensor"
        with pytest.raises(NotAvailable, match=r"the engines \(echo\)"):
            transport_for(engines, TrainerSettings(hf_checkpoint="m", update_weight_mode="delta"))
        weights = {"model.norm.weight": torch.arange(8.0)}
        transport = TensorTransport(1 << 20, 10)
        sent = transport.send(engines, 1, iter(weights.items()))
        transport.close()
        assert sent == len(safetensors.torch.save(weights))
        rollout.commit_weight_update(1)
        metrics = rollout.generate(0, 2, timeout=60).metrics
    service.stop(0)
    groups = [stored.group.samples for stored in buffer.read_groups(group_indexes=[0, 1])]
    assert [sample.response for group in groups for sample in group] == ["0>", "0>", "1>", "1>"]
    assert {tuple(sample.weight_versions) for group in groups for sample in group} == {("1",)}
    assert metrics["rollout/raw_reward"] == 1


def test_the_kinds_are_the_choices_of_the_flag() -> None:
    (field,) = [f for f in RolloutSettings.__dataclass_fields__.values() if f.name == "rollout_engine"]
    assert field.metadata["choices"] == ("auto", *registry.KINDS)
