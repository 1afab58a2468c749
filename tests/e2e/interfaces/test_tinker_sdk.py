"""The released `tinker` SDK, unchanged, trains and samples through `slime tinker`; skipped where it is missing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.launcher.tiny_model import write_model

NUM_GPUS = 0
KEY = "tml-of-the-test"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tinker") / "model", "0123456789+=>\n", seed=3)


@pytest.fixture(scope="module")
def tinker() -> Any:
    return pytest.importorskip("tinker", reason="the SDK is not installed: pip install tinker==0.38.0")


@pytest.fixture(scope="module")
def service(tinker: Any, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    words = ["--hf-checkpoint", str(directory), "--port", "0", "--output-dir", str(tmp_path_factory.mktemp("runs"))]
    process = subprocess.Popen(
        [sys.executable, "-m", "slime.launcher.cli", "tinker", *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"TINKER_API_KEY": KEY},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        found = next((re.search(r"127\.0\.0\.1:(\d+)", line) for line in process.stdout), None)
        assert found is not None
        with tinker.ServiceClient(base_url=f"http://127.0.0.1:{found[1]}", api_key=KEY) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()


def test_a_client_of_the_sdk_learns_samples_saves_and_resumes(tinker: Any, service: Any, directory: Path) -> None:
    types = tinker.types
    training = service.create_lora_training_client(base_model=str(directory), rank=8).result()
    info = training.get_info()
    assert (info.is_lora, info.lora_rank) == (True, 8)
    tokenizer = training.get_tokenizer()
    tokens = tokenizer.encode("2+3=5\n")
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [0.0, 0.0, 0.0, 1.0, 1.0]},
    )
    losses = []
    for _ in range(30):
        passed = training.forward_backward([datum] * 4, "cross_entropy")
        stepped = training.optim_step(types.AdamParams(learning_rate=3e-3))
        losses.append(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    assert losses[-1] < 0.2 * losses[0]

    forward = training.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    sampler = training.save_weights_and_get_sampling_client().result()
    params = types.SamplingParams(max_tokens=4, temperature=0.0, stop=["\n"])
    answer = sampler.sample(types.ModelInput.from_ints(tokens[:4]), 2, params).result()
    assert [tokenizer.decode(each.tokens) for each in answer.sequences] == ["5\n", "5\n"]
    assert {each.stop_reason for each in answer.sequences} == {"stop"}
    scored = sampler.compute_logprobs(types.ModelInput.from_ints(tokens)).result()
    assert scored[0] is None and scored[1:] == pytest.approx(forward, abs=1e-4)

    # Each policy-gradient loss on what was sampled, and a loss of the client's own.
    sampled = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "logprobs": forward, "advantages": [0.0, 0.0, 0.0, 1.0, 1.0]},
    )
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        assert training.forward_backward([sampled], loss).result().metrics["loss:sum"] != 0
    own = training.forward_backward_custom([datum], lambda data, found: (-sum(each.sum() for each in found), {}))
    assert own.result().metrics["loss:sum"] == pytest.approx(-sum(forward), abs=1e-3)

    state = training.save_state("half").result().path
    resumed = service.create_training_client_from_state_with_optimizer(state).result()
    again = resumed.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
    assert again == pytest.approx(forward, abs=1e-6)
    named = training.save_weights_for_sampler("half").result().path
    from_path = service.create_sampling_client(model_path=named).result()
    assert from_path.compute_logprobs(types.ModelInput.from_ints(tokens)).result()[1:] == pytest.approx(scored[1:])
    with pytest.raises(tinker.RequestFailedError, match="stable_reinforce is not supported yet"):
        training.forward_backward([sampled], "stable_reinforce").result()
