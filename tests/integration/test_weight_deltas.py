"""--update-weight-mode delta: an embedded engine, and a stand-in that speaks SGLang's routes, hold what was sent."""

from __future__ import annotations

import base64
import errno
import importlib
import io
import json
import pickle
import shutil
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.registry import KINDS
from slime.trainer.backends.build import build_backend
from slime.trainer.process.collective import Ranks
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.weight_sync.sender import WeightSender
from slime.types.clients import Engine
from slime.types.errors import EngineError, NotAvailable, OutOfSpace
from slime.types.weight_deltas import PULL

CONFIG = dict(
    vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=32, pad_token_id=0, eos_token_id=1,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**CONFIG)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({str(n): n for n in range(32)}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="1").save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def embedded(model: str) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=model), env={"OMP_NUM_THREADS": "1"}) as process:
        yield process.wait_ready(120)


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
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(200, {"weight_version": outer.version})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.path == "/update_weights_from_tensor":
                    self.answer(200, outer.run_loader(body))
                elif Path(body["model_path"]).is_dir():
                    outer.held = load_file(Path(body["model_path"]) / "model.safetensors")
                    outer.version = body["weight_version"]
                    self.answer(200, {"success": True, "message": "Success"})
                else:
                    self.answer(400, {"success": False, "message": "Failed to get weights iterator"})

            def answer(self, status: int, content: dict[str, Any]) -> None:
                data = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

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


@pytest.fixture
def sglang() -> Iterator[SGLangStandIn]:
    stand_in = SGLangStandIn()
    yield stand_in
    stand_in.server.shutdown()
    stand_in.server.server_close()


class OneEngine:
    """The rollout service of one engine: reads the version that it holds, as the service does."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def begin_weight_update(self, weight_version: int, timeout: float | None = None) -> list[Engine]:
        e = self.engine
        held = int(version_of(e))
        transports = KINDS[e.kind].weight_transports
        return [Engine(e.name, e.url, e.kind, True, held, tp_size=2, weight_transports=transports)]

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


@pytest.mark.parametrize("transport", ["auto", "disk"])
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_an_embedded_engine_holds_every_version(
    embedded: EngineProcess, model: str, tmp_path: Path, transport: str, encoding: str
) -> None:
    (tmp_path / "shared").mkdir()
    values = on_disk(tmp_path, update_weight_delta_encoding=encoding) | {"update_weight_transport": transport}
    # The comparison of the checksums with those of the whole weights from a disk is part of every push.
    updates, backend = sender(embedded, model, check_weight_update_equal=True, **values)
    first = int(version_of(embedded)) + 1
    sent = []
    for version in range(first, first + 3):
        change(backend, version)
        sent.append(updates.push(version))
        assert version_of(embedded) == str(version)
        assert updates.metrics["perf/update_weights_whole_engines"] == (version == first)
    updates.close()
    whole = updates.metrics["perf/update_weights_whole_bytes"]
    assert sent[0] >= whole > 10 * max(sent[1:])
    assert 0 < updates.metrics["perf/update_weights_changed"] < 0.01
    assert list((tmp_path / "shared").iterdir()) == []


def train(embedded: EngineProcess, model: str, mode: str) -> list[Any]:
    """Three rounds of sampling, a step on what was sampled, and a push; returns what was sampled, and the weights."""
    from transformers import AutoModelForCausalLM

    post(embedded, "/update_weights_from_disk", {"model_path": model, "weight_version": "0"})
    updates, backend = sender(embedded, model, update_weight_mode=mode, update_weight_dtype="bfloat16")
    # The backend's own forward pass takes packed rows.
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    found: list[Any] = []
    for version in range(1, 5):
        updates.push(version)
        sampling = {"max_new_tokens": 8, "temperature": 1.0, "sampling_seed": version, "ignore_eos": True}
        body = {"input_ids": [2, 3, 4], "sampling_params": sampling, "return_logprob": True}
        answer = post(embedded, "/generate", body)
        found.append([answer["output_ids"], answer["meta_info"]["output_token_logprobs"]])
        ids = torch.tensor([[2, 3, 4, *answer["output_ids"]]])
        policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        backend.policy.load_state_dict(policy.state_dict())
    if mode == "delta":
        assert updates.metrics["perf/update_weights_whole_engines"] == 0
    updates.close()
    return [*found, {name: tensor.detach().clone() for name, tensor in policy.named_parameters()}]


def test_training_with_deltas_is_training_with_all_weights(embedded: EngineProcess, model: str) -> None:
    *sampled, weights = train(embedded, model, "full")
    *sampled_too, weights_too = train(embedded, model, "delta")
    assert sampled == sampled_too
    assert len({tuple(tokens) for tokens, _ in sampled}) > 1
    assert all(torch.equal(weights[name], weights_too[name]) for name in weights)


def test_an_engine_that_lost_its_weights_gets_all_of_them(
    embedded: EngineProcess, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    updates, backend = sender(embedded, model, check_weight_update_equal=True)
    first = int(version_of(embedded)) + 1
    updates.push(first)
    # It still names its version.
    post(embedded, "/weights_checker", {"action": "reset_tensors"})
    change(backend, 1)
    updates.push(first + 1)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    assert "all weights are sent in place of a delta" in caplog.text and "has checksum" in caplog.text
    change(backend, 2)
    updates.push(first + 2)
    assert updates.metrics["perf/update_weights_whole_engines"] == 0
    # As one that was started again: it names another version.
    body = {"model_path": model, "weight_version": "0"}
    post(embedded, "/update_weights_from_disk", body)
    updates.push(first + 3)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    updates.close()


def test_after_a_failed_update_all_weights_are_sent(
    embedded: EngineProcess, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, backend = sender(embedded, model, check_weight_update_equal=True)
    first = int(version_of(embedded)) + 1
    updates.push(first)
    change(backend, 1)
    weights = backend.named_weights

    def stops_half_way(**options: Any) -> Iterator[tuple[str, Tensor]]:
        for number, item in enumerate(weights(**options)):
            if number == 5:
                raise EngineError("gone")
            yield item

    with monkeypatch.context() as patched, pytest.raises(EngineError, match="gone"):
        patched.setattr(backend, "named_weights", stops_half_way)
        updates.push(first + 1)
    updates.push(first + 1)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    updates.close()


def test_sglang_loads_a_checkpoint_on_its_host_that_deltas_bring_up_to_date(
    sglang: SGLangStandIn, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local = tmp_path / "local"
    values = on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local), update_weight_dtype="bfloat16")
    updates, backend = sender(sglang, model, **values)
    for version in range(1, 6):
        change(backend, version)
        if version == 4:
            shutil.rmtree(local)
        sent = updates.push(version)
        wanted = dict(backend.named_weights())
        assert sglang.version == str(version) and sglang.held.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert torch.equal(sglang.held[name].view(torch.int16), tensor.detach().bfloat16().view(torch.int16)), name
        whole = version in (1, 4)
        assert updates.metrics["perf/update_weights_whole_engines"] == whole
        assert (sent >= updates.metrics["perf/update_weights_whole_bytes"]) is whole
        assert [path.name[:14] for path in local.glob("*weight_v*")] == [f"weight_v{version:06d}"]
    assert "weight version 4 is a delta of it" in caplog.text
    # Sent again, as one of an engine that was lost, but trained since.
    change(backend, 6)
    updates.push(5)
    trained = backend.policy.model.norm.weight.detach().bfloat16()
    assert torch.equal(sglang.held["model.norm.weight"].view(torch.int16), trained.view(torch.int16))
    assert "perf/update_weights_changed" not in updates.metrics
    updates.close()
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_checkpoint_of_another_run_or_with_other_weights_is_not_built_on(
    sglang: SGLangStandIn, model: str, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    values = on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local))
    for run in range(2):
        updates, backend = sender(sglang, model, **values)
        sglang.version = "0"
        change(backend, run)
        for version in (1, 2):
            updates.push(version)
            assert torch.equal(
                sglang.held["model.norm.weight"].view(torch.int32),
                backend.policy.model.norm.weight.detach().view(torch.int32),
            )
            (file,) = local.glob(f"weight_v{version:06d}-*/model.safetensors")
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
        updates.push(3)
        assert updates.metrics["perf/update_weights_whole_engines"] == 1
        updates.close()


def test_no_engine_loads_the_checkpoint_of_another_run_with_the_same_directory(
    sglang: SGLangStandIn, model: str, tmp_path: Path
) -> None:
    local = tmp_path / "local"
    updates, backend = sender(sglang, model, **on_disk(tmp_path, update_weight_local_checkpoint_dir=str(local)))
    updates.push(1)
    held = sglang.held
    theirs = local / "weight_v000002"
    for path in local.glob("weight_v*"):
        path.rename(theirs)
    # The files of another run stay where they cannot be removed, and are no version of this one.
    (theirs / "notes.txt").write_text("mine")
    mark = theirs / "slime-files.json"
    mark.write_text(json.dumps({**json.loads(mark.read_text()), "lineage": "another"}))
    change(backend, 1)
    with pytest.raises(EngineError, match="status 400"):
        updates.push(2)
    assert sglang.version == "1" and sglang.held is held
    updates.close()


def test_sglang_needs_a_directory_on_its_host_and_a_shared_one(
    sglang: SGLangStandIn, model: str, tmp_path: Path
) -> None:
    updates, _ = sender(sglang, model, **on_disk(tmp_path))
    with pytest.raises(NotAvailable, match="delta requires --update-weight-local-checkpoint-dir DIR: engine sglang-0"):
        updates.push(1)
    updates, _ = sender(sglang, model)
    with pytest.raises(NotAvailable, match="delta requires --update-weight-transport disk: the engines .sglang."):
        updates.push(1)


def test_a_full_disk_is_named_and_nothing_is_left(
    embedded: EngineProcess, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updates, backend = sender(embedded, model, **on_disk(tmp_path))
    first = int(version_of(embedded)) + 1
    updates.push(first)
    change(backend, 1)

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patched, pytest.raises(OutOfSpace, match="--update-weight-disk-dir: no space left"):
        patched.setattr(Path, "write_bytes", full)
        updates.push(first + 1)
    assert list((tmp_path / "shared").iterdir()) == []
    updates.push(first + 1)
    assert updates.metrics["perf/update_weights_whole_engines"] == 1
    updates.close()
