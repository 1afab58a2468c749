"""An embedded engine's and a stand-in for SGLang's side of weight updates, and a sender of updates to one of them."""

from __future__ import annotations

import base64
import importlib
import io
import json
import pickle
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from json_answers import JsonHandler
from slime.converters.convert import fp8
from slime.rollout.engines.registry import KINDS
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine
from slime.types.weight_deltas import PULL

CONFIG = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    tie_word_embeddings=True,
)  # fmt: skip


def write_model(directory: Path) -> str:
    """Writes a small model with its tokenizer; returns the directory."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1").save_pretrained(directory)
    return str(directory)


def write_fp8_model(directory: Path) -> str:
    """Writes the model with its projections in FP8 in blocks; returns the directory."""
    write_model(directory)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "_proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = fp8.quantize(tensor, (24, 20))
        else:
            stored[name] = tensor
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [24, 20]}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


class SafeUnpickler(pickle.Unpickler):
    """Lets through what SGLang's does of the names that torch needs."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.split(".")[0] in ("torch", "builtins", "collections"), module
        return super().find_class(module, name)


class SGLangStandIn:
    """Runs the loader that a call names, in its own process, and loads whole directories; `held` are its weights."""

    def __init__(self) -> None:
        self.version = "0"
        self.held: dict[str, Tensor] = {}
        self.before_loading: Callable[[], Any] = lambda: None
        outer = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                self.answer(200, {"weight_version": outer.version})

            def do_POST(self) -> None:
                body = self.body()
                outer.before_loading()
                if self.path == "/update_weights_from_tensor":
                    self.answer(200, outer.run_loader(body))
                elif Path(body["model_path"]).is_dir():
                    outer.held = load_file(Path(body["model_path"]) / "model.safetensors")
                    outer.version = body["weight_version"]
                    self.answer(200, {"success": True, "message": "Success"})
                else:
                    self.answer(400, {"success": False, "message": "Failed to get weights iterator"})

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.name, self.kind = "sglang-0", "sglang"
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def run_loader(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["load_format"] == PULL
        module, _, name = PULL.rpartition(".")
        load = getattr(importlib.import_module(module), name)
        # Each of its ranks calls the loader.
        for payload in body["serialized_named_tensors"]:
            load(None, SafeUnpickler(io.BytesIO(base64.b64decode(payload))).load())
        return {"success": True, "message": "Success"}


@contextmanager
def stand_in() -> Iterator[SGLangStandIn]:
    engine = SGLangStandIn()
    yield engine
    engine.server.shutdown()
    engine.server.server_close()


class OneEngine:
    """The rollout service of one engine: reads the version that it holds, as the service does."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        e = self.engine
        held = int(version_of(e))
        kind, tp_size = KINDS[e.kind], 2
        takes = {"weight_transports": kind.weight_transports, "delta_carriers": kind.delta_carriers}
        return [Engine(e.name, e.url, e.kind, True, held, tp_size, **takes)]

    def onload(self, parts: Sequence[str] = (), timeout: float | None = None) -> None: ...

    def commit_weight_update(self, weight_version: int, timeout: float | None = None) -> None: ...

    def abort_weight_update(self, weight_version: int, reason: str, timeout: float | None = None) -> None: ...


def post(engine: Any, path: str, body: dict[str, Any]) -> Any:
    data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(engine.url + path, data, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def version_of(engine: Any) -> str:
    with urllib.request.urlopen(f"{engine.url}/model_info", timeout=60) as answer:
        return str(json.load(answer)["weight_version"])


def sender(engine: Any, model: str, **values: Any) -> tuple[WeightSender, Any]:
    values = {"update_weight_buffer_size": 20_000, "update_weight_mode": "delta", **values}
    settings = TrainerSettings(hf_checkpoint=model, **values)
    ranks = Ranks(0, 1, "", 1)
    backend = build_backend(settings, ranks, torch.device("cpu"))
    return WeightSender(settings, ranks, backend, OneEngine(engine), Path(model)), backend


def change(backend: Any, seed: int) -> None:
    """Changes a few elements of some tensors, to NaN and -0.0 among others."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in list(backend.policy.parameters())[:: 1 + seed % 3]:
            flat = parameter.view(-1)
            flat[torch.randint(len(flat), (5,))] += 0.5
        flat[:2] = torch.tensor([float("nan"), -0.0])


def on_disk(tmp_path: Path, **values: Any) -> dict[str, Any]:
    return {"update_weight_transport": "disk", "update_weight_disk_dir": str(tmp_path / "shared"), **values}
