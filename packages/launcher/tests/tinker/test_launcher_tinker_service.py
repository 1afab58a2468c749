"""`slime tinker` over its own wire: a client without the SDK trains, samples, saves, loads and gets errors."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.launcher.tinker import messages
from slime.launcher.tinker.command import main
from slime.launcher.tiny_model import write_model

KEY = "tml-of-the-test"
FORWARD_BACKWARD = "/api/v1/forward_backward"
# A body that the released SDK (0.38) sends for a forward pass of one datum, in two chunks of tokens.
OF_THE_SDK = bytes.fromhex(
    "0a09733a747261696e3a3010011a6a0a0c0a0a0a0804000000050000000a080a060a040c00000012300a0d7461726765745f746f6b656e73121f"
    "0a1805000000000000000c0000000000000006000000000000001802220103121e0a077765696768747312130a0c000000000000003f0000803f"
    "1801220103220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e83f30013a1f0a12636c69705f6c6f775f7468"
    "726573686f6c64120909000000000000e83f"
)


@dataclass
class Client:
    """port: of the service. lora: whether it trains adapters."""

    port: int
    lora: bool = True
    session: str = ""

    def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
        connection.request(method, path, content, {"X-API-Key": KEY, "Content-Type": kind} | headers)
        answer = connection.getresponse()
        found = answer.read()
        connection.close()
        is_json = "json" in answer.headers["Content-Type"]
        return answer.status, json.loads(found) if is_json else found

    def post(self, path: str, body: Any) -> Any:
        status, answer = self.call("POST", f"/api/v1/{path}", body)
        assert status == 200, answer
        return answer

    def result(self, accepted: dict[str, Any]) -> Any:
        while True:
            status, answer = self.call("POST", "/api/v1/retrieve_future", {"request_id": accepted["request_id"]})
            if status != 408:
                assert status == 200, answer
                return answer

    def ask(self, path: str, body: Any) -> Any:
        return self.result(self.post(path, body))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "model", "0123456789+=>", seed=3)


@pytest.fixture(scope="module", params=["lora", "full"])
def service(request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yields the port, and whether the service trains adapters."""
    output, lora = tmp_path_factory.mktemp("output"), request.param == "lora"
    words = ["--hf-checkpoint", str(directory), "--model-name", "tiny/sums", "--port", "0"]
    words += [] if lora else ["--full-weights"]
    process = subprocess.Popen(
        [sys.executable, "-m", "slime.launcher.cli", "tinker", *words, "--output-dir", str(output / "runs")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"TINKER_API_KEY": KEY},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found = next((re.search(r"127\.0\.0\.1:(\d+)", line) for line in process.stdout), None)
        assert found is not None
        yield int(found[1]), lora
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()
    # Snapshots go with the service.
    assert not list((output / "runs").glob(".snapshots-*"))


@pytest.fixture
def client(service: tuple[int, bool]) -> Iterator[Client]:
    found = Client(*service)
    body: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0", "type": "create_session"}
    answer = found.post("create_session", body)
    assert ("there is no LoRA" in answer.get("warning_message", "")) is not found.lora
    found.session = answer["session_id"]
    yield found
    found.post(f"sessions/{found.session}/finish", {"reason": {"type": "success"}})


LORA = {"rank": 8, "seed": None, "train_unembed": True, "train_mlp": True, "train_attn": True}


def create(client: Client, number: int = 0, *, lora: dict[str, Any] = LORA, **more: Any) -> str:
    body = {"session_id": client.session, "model_seq_id": number, "base_model": "tiny/sums", "lora_config": lora}
    answer = client.ask("create_model", body | more)
    assert answer["model_id"] == f"{client.session}:train:{number}"
    return str(answer["model_id"])


def passed(model: str, number: int, *, forward_only: bool = False, loss_fn: str = "cross_entropy") -> bytes:
    request = messages.ForwardBackwardRequest(model_id=model, seq_id=number, loss_fn=loss_fn, forward_only=forward_only)
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([4, 12, 5, 13], dtype="<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.array([12, 5, 13, 9], dtype="<i8").tobytes(), messages.INT64
    weights = datum.loss_fn_inputs["weights"]
    weights.dense, weights.dtype = np.array([0, 0, 0, 1], dtype="<f4").tobytes(), messages.FLOAT32
    return bytes(request.SerializeToString())


def log_probs(content: bytes) -> np.ndarray:
    (record,) = messages.ForwardBackwardOutput.FromString(content).loss_fn_outputs
    return np.frombuffer(record.fields["logprobs"].data, dtype="<f4")


def adam(model: str, number: int, **params: float) -> dict[str, Any]:
    return {"adam_params": {"learning_rate": 5e-3} | params, "model_id": model, "seq_id": number, "type": "optim_step"}


def asked(session: str, number: int, **more: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 12, 5, 13]}]}
    body = {"num_samples": 2, "prompt": prompt, "sampling_params": {"max_tokens": 3, "temperature": 1.0, "seed": 7}}
    return body | {"sampling_session_id": session, "seq_id": number} | more


def test_a_client_trains_samples_saves_and_loads(client: Client) -> None:
    model = create(client)
    info = client.post("get_info", {"model_id": model})
    assert (info["is_lora"], info["lora_rank"]) == ((True, 8) if client.lora else (False, None))
    assert info["model_data"]["model_name"].endswith("model")
    # Sent out of order: they run by their numbers.
    first = [client.post("optim_step", adam(model, 2)), client.post("forward_backward", passed(model, 1))]
    for number in range(3, 21, 2):
        first.append(client.post("forward_backward", passed(model, number)))
        first.append(client.post("optim_step", adam(model, number + 1)))
    results = [client.result(each) for each in first]
    assert results[0]["metrics"]["grad_norm"] > 0
    learned = log_probs(client.ask("forward_backward", passed(model, 21, forward_only=True)))
    assert learned[-1] > log_probs(results[1])[-1] + 1.0
    # A request that is sent again is not run again.
    again = client.post("forward_backward", passed(model, 21, forward_only=True))
    np.testing.assert_array_equal(log_probs(client.result(again)), learned)

    body = {"model_id": model, "seq_id": 22, "sampling_session_seq_id": 0, "kind": "snapshot"}
    session = client.ask("save_weights_for_sampler", body)["sampling_session_id"]
    accepted = client.post("asample", asked(session, 0, prompt_logprobs=True))
    assert len(accepted["sample_sequence_ids"]) == 2
    answer = messages.SampleResponse.FromString(client.result(accepted))
    of_prompt = np.frombuffer(answer.prompt_logprobs, dtype="<f4")
    assert np.isnan(of_prompt[0])
    np.testing.assert_allclose(of_prompt[1:], learned[:-1], atol=1e-4)
    for sequence in answer.sequences:
        tokens, chosen = np.frombuffer(sequence.tokens, dtype="<i4"), np.frombuffer(sequence.logprobs, dtype="<f4")
        assert 1 <= len(tokens) == len(chosen) <= 3
        if tokens[0] == 9:
            np.testing.assert_allclose(chosen[0], learned[-1], atol=1e-4)
    # Other weights and back: each session samples from its own.
    base = {"session_id": client.session, "sampling_session_seq_id": 1, "base_model": "tiny/sums"}
    of_base = client.post("create_sampling_session", base)["sampling_session_id"]
    before = messages.SampleResponse.FromString(client.ask("asample", asked(of_base, 0, prompt_logprobs=True)))
    np.testing.assert_allclose(
        np.frombuffer(before.prompt_logprobs, dtype="<f4")[1:], log_probs(results[1])[:-1], atol=1e-4
    )
    same = messages.SampleResponse.FromString(client.ask("asample", asked(session, 1)))
    assert [each.tokens for each in same.sequences] == [each.tokens for each in answer.sequences]

    saved = client.ask("save_weights", {"model_id": model, "seq_id": 23, "path": "first"})["path"]
    assert saved == f"tinker://{model}/weights/first"
    refused = client.ask("save_weights", {"model_id": model, "seq_id": 24, "path": "first"})
    assert "overwrite=True" in refused["error"] and refused["category"] == "user"
    named = client.ask("save_weights_for_sampler", {"model_id": model, "seq_id": 25, "path": "first"})["path"]
    loading = {"session_id": client.session, "model_seq_id": 1, "path": saved, "optimizer": True}
    other = client.ask("load_weights", loading)["model_id"]
    restored = log_probs(client.ask("forward_backward", passed(other, 1, forward_only=True)))
    np.testing.assert_array_equal(restored, learned)
    # A model goes back to the checkpoint, weights for samplers included.
    client.ask("forward_backward", passed(other, 2))
    client.ask("optim_step", adam(other, 3))
    assert log_probs(client.ask("forward_backward", passed(other, 4, forward_only=True)))[-1] != learned[-1]
    back = {"model_id": other, "optimizer": False}
    for number, path in ((5, named), (7, saved)):
        assert client.ask("load_weights", back | {"seq_id": number, "path": path})["path"] == path
        restored = log_probs(client.ask("forward_backward", passed(other, number + 1, forward_only=True)))
        np.testing.assert_array_equal(restored, learned)

    about = client.post("weights_info", {"tinker_path": saved})
    assert about.pop("base_model").endswith("model")
    parts = {"lora_rank": 8, "train_unembed": True, "train_mlp": True, "train_attn": True} if client.lora else {}
    assert about == {"is_lora": client.lora, **parts}
    _, run = client.call("GET", f"/api/v1/training_runs/{model}")
    assert run["last_checkpoint"]["tinker_path"] == saved
    assert run["last_sampler_checkpoint"]["tinker_path"] == named and run["is_lora"] is client.lora
    assert client.call("DELETE", f"/api/v1/training_runs/{model}/checkpoints/sampler_weights/first")[0] == 200
    assert client.call("POST", "/api/v1/weights_info", {"tinker_path": named})[0] == 404

    # Two models are the most that this service trains.
    status, answer = client.call("POST", "/api/v1/load_weights", loading | {"model_seq_id": 2})
    assert status == 400 and "--max-models 2" in answer["error"]


def test_adapters_are_those_that_were_asked_for(client: Client) -> None:
    parts = LORA | {"train_mlp": False}
    body = {"session_id": client.session, "model_seq_id": 0, "base_model": "tiny/sums"}
    if not client.lora:
        status, answer = client.call("POST", "/api/v1/create_model", body | {"lora_config": parts})
        assert status == 400 and "lora_config.train_mlp false is not supported yet" in answer["error"]
        return
    for wrong, words in ((None, "lora_config: got None"), (LORA | {"rank": 0}, "rank"), ({}, "rank")):
        status, answer = client.call("POST", "/api/v1/create_model", body | {"lora_config": wrong})
        assert status == 400 and words in answer["error"], answer
    none = LORA | {"train_mlp": False, "train_attn": False, "train_unembed": False}
    assert "it would have no layer to train" in client.ask("create_model", body | {"lora_config": none})["error"]
    small = create(client, 1, lora=parts | {"rank": 2, "seed": 5, "train_unembed": False})
    saved = client.ask("save_weights", {"model_id": small, "seq_id": 1, "path": "small"})["path"]
    about = client.post("weights_info", {"tinker_path": saved})
    assert (about["lora_rank"], about["train_attn"], about["train_mlp"], about["train_unembed"]) == (
        2,
        True,
        False,
        False,
    )
    other = create(client, 2)
    refused = client.ask("load_weights", {"model_id": other, "seq_id": 1, "path": saved, "optimizer": False})
    assert "a LoRA adapter of rank 8, as the model has; this one is of a LoRA adapter of rank 2" in refused["error"]


def test_errors_come_in_the_form_of_the_sdk(client: Client) -> None:
    model = create(client)
    failed = client.ask("forward_backward", passed(model, 1, loss_fn="stable_reinforce"))
    assert failed["category"] == "user" and "stable_reinforce is not supported yet" in failed["error"]
    assert "request 1: loss_fn stable_reinforce" in client.ask("optim_step", adam(model, 2))["error"]
    assert "adam_params.beta1" in client.ask("optim_step", adam(model, 3, beta1=1.5))["error"]
    assert "metrics" in client.ask("optim_step", adam(model, 4))
    for path, body, status, said in (
        ("optim_step", adam("nobody:train:0", 1), 404, "no model nobody:train:0"),
        ("forward_backward", b"\xff\xff", 400, "ForwardBackwardRequest in protobuf"),
        ("forward_backward", OF_THE_SDK, 404, "no model s:train:0"),
        ("create_model", {"session_id": client.session, "model_seq_id": 5, "base_model": "other"}, 400, "tiny/sums"),
        ("create_model", {"session_id": "gone", "model_seq_id": 5, "base_model": "tiny/sums"}, 404, "no session gone"),
        ("asample", asked("gone", 0), 404, "no sampling session gone"),
        ("weights_info", {"tinker_path": "tinker://../weights/x"}, 400, "path"),
        ("retrieve_future", {"request_id": "gone"}, 410, "no request gone"),
        ("create_custom_loss", {}, 404, "Not Found"),
    ):
        found, answer = client.call("POST", f"/api/v1/{path}", body)
        assert (found, said in answer["error"]) == (status, True), (path, answer)


def test_a_request_of_the_sdk_is_read(client: Client) -> None:
    model = create(client)
    request = messages.ForwardBackwardRequest.FromString(OF_THE_SDK)
    assert dict(request.loss_fn_config) == {"clip_low_threshold": 0.75} and request.forward_only
    request.model_id, request.loss_fn = model, "cross_entropy"
    refused = client.ask("forward_backward", request.SerializeToString())
    assert "cross_entropy takes no configuration" in refused["error"]
    request.seq_id = 2
    request.ClearField("loss_fn_config")
    request.ClearField("loss_fn_config_v2")
    assert len(log_probs(client.ask("forward_backward", request.SerializeToString()))) == 3


def test_only_holders_of_the_key_get_in(service: tuple[int, bool]) -> None:
    client = Client(*service)
    config = "/api/v1/client/config"
    assert client.call("GET", "/api/v1/healthz", **{"X-API-Key": ""}) == (200, {"status": "ok"})
    assert client.call("POST", config, {}, **{"X-API-Key": "tml-other"})[0] == 401
    assert client.call("POST", config, {}, Origin="http://example.com")[0] == 403
    assert client.call("POST", config, {}, Host="example.com")[0] == 403
    assert client.call("POST", config, b"{}")[0] == 415
    assert client.call("POST", FORWARD_BACKWARD, {})[0] == 415
    assert client.call("POST", config, {"x": "y" * (1 << 20)})[0] == 413


def test_a_key_that_the_sdk_does_not_take_is_refused(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    file.chmod(0o600)
    assert main("tinker", ["--hf-checkpoint", str(directory), "--api-key-file", str(file)]) == 2
    assert "--api-key-file: the key must begin with tml-" in capsys.readouterr().err
    assert main("tinker", ["--hf-checkpoint", str(directory), "--max-models", "0"]) == 2
    assert "--max-models must be at least 1, got 0" in capsys.readouterr().err


def test_a_signal_while_the_engine_starts_leaves_nothing_behind(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(settings: Any) -> Any:
        assert list(tmp_path.glob(".snapshots-*"))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("slime.rollout.launch.start_engines", interrupted)
    words = ["--hf-checkpoint", str(directory), "--port", "0", "--output-dir", str(tmp_path)]
    assert main("tinker", words) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_the_snapshots_of_a_service_that_was_killed_go_with_the_next_one(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--hf-checkpoint", str(directory), "--port", "0", "--output-dir", str(tmp_path)]
    killed = """
import os, signal, sys
import slime.rollout.launch
from slime.launcher.tinker.command import main

slime.rollout.launch.start_engines = lambda settings: os.kill(os.getpid(), signal.SIGKILL)
main("tinker", sys.argv[1:])
"""
    assert subprocess.run([sys.executable, "-c", killed, *words], check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".snapshots-*"))

    def stop(settings: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("slime.rollout.launch.start_engines", stop)
    assert main("tinker", words) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
