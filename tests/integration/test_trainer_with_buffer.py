"""A trainer over real gRPC on a real buffer: steps of completed groups become updates, checkpoints commit them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slime.buffer.service import serve as serve_buffer
from slime.buffer.settings import BufferSettings
from slime.trainer.service import serve as serve_trainer
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample
from slime.types.clients import BufferClient, TrainerClient
from slime.types.clients.trainer import TrainedStep
from slime.types.errors import DataLoss, InvalidField
from slime.types.rpc import RpcSettings

VOCAB = 32
GROUPS = 2
SIZE = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferClient]:
    settings = BufferSettings(buffer_dir=str(tmp_path / "buffer"), n_samples_per_prompt=SIZE)
    with serve_buffer(settings, RpcSettings()) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"prompt {i}" for i in range(8)])
        yield client


def complete(buffer: BufferClient, groups: int) -> None:
    """Leases groups and completes them with made-up responses."""
    for leased in buffer.lease_groups(groups, wait_seconds=10):
        random = np.random.default_rng(leased.group.group_index)
        prompt = random.integers(2, VOCAB, 5).tolist()
        for member, sample in enumerate(leased.group.samples):
            response = random.integers(2, VOCAB, 4).tolist()
            sample.tokens, sample.response_length = prompt + response, len(response)
            sample.loss_mask, sample.rollout_log_probs = [1] * 4, [-3.0] * 4
            sample.reward, sample.status = float(member % 2), Sample.Status.COMPLETED
        buffer.complete_group(leased.token, leased.group.samples)


def start(
    model: str, buffer: BufferClient, rank: int = 0, world_size: int = 1, master: str = "", **settings: Any
) -> Any:
    trainer = TrainerSettings(
        hf_checkpoint=model, lr=1e-2, use_dynamic_batch_size=True, max_tokens_per_gpu=40, **settings
    )
    # No weights are pushed here, so nothing answers at the rollout address.
    places = dict(rank=rank, world_size=world_size, master_address=master, buffer_address=buffer.address)
    return serve_trainer(trainer, RpcSettings(), rollout_address="127.0.0.1:1", write_below=["/"], **places)


def test_steps_checkpoint_and_resume(model: str, buffer: BufferClient, tmp_path: Path):
    complete(buffer, 2 * GROUPS)
    with start(model, buffer) as service, TrainerClient(service.address, buffer.writer) as trainer:
        metrics = trainer.train_step(0, GROUPS, timeout=120)
        assert metrics["train/grad_norm"] > 0
        assert metrics["train/train_rollout_logprob_abs_diff"] > 0
        assert buffer.stats().groups["acknowledged"] == GROUPS
        path = trainer.save_checkpoint(0, str(tmp_path / "save" / "step_0"), timeout=120)
        assert buffer.stats().groups["committed"] == GROUPS
        expected = trainer.train_step(1, GROUPS, timeout=120)
    # The crash: step 1 was acknowledged but is in no checkpoint, so a new incarnation trains it again, by its plan.
    writer = buffer.open_run("run", last_committed_step=0)
    assert writer.next_step == 1
    with start(model, buffer, load=path) as service, TrainerClient(service.address, writer) as trainer:
        assert trainer.info().next_step == 1
        again = trainer.train_step(1, GROUPS, timeout=120)
    assert {k: v for k, v in again.items() if k.startswith("train/")} == {
        k: v for k, v in expected.items() if k.startswith("train/")
    }


def test_a_group_that_cannot_be_trained_or_read_leaves_its_step(model: str, buffer: BufferClient, tmp_path: Path):
    (poison,) = buffer.lease_groups(1)
    for sample in poison.group.samples:
        sample.tokens, sample.response_length = [2, 3, VOCAB], 1
        sample.reward, sample.status = float(sample.index or 0), Sample.Status.COMPLETED
    buffer.complete_group(poison.token, poison.group.samples)
    complete(buffer, GROUPS + 1)
    with start(model, buffer) as service, TrainerClient(service.address, buffer.writer) as trainer:
        with pytest.raises(InvalidField, match=rf"expected ids in \[0, {VOCAB}\)"):
            trainer.train_step(0, GROUPS, timeout=120)
        assert buffer.drop_groups([poison.group.group_index], "not of this vocabulary") == [0]
        buffer.seal_step(0, GROUPS)
        path = next((tmp_path / "buffer" / "payloads").glob("*/0000000001-*"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(DataLoss, match="is not what was stored"):
            trainer.train_step(0, GROUPS, timeout=120)
        assert trainer.train_step(0, GROUPS, timeout=120)["train/grad_norm"] > 0
    assert {g.group_index: g.state for g in buffer.list_groups(limit=4)} == {
        0: "rejected", 1: "quarantined", 2: "acknowledged", 3: "acknowledged",
    }  # fmt: skip


def test_the_command_line_trains_in_two_processes(model: str, buffer: BufferClient, tmp_path: Path):
    import os
    import subprocess
    import sys

    complete(buffer, GROUPS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable, "-m", "slime.trainer", "serve", "--hf-checkpoint", model, "--buffer-address", buffer.address,
        "--rollout-address", "127.0.0.1:1", "--world-size", "2", "--master-address", f"file://{tmp_path}/rendezvous",
    ]  # fmt: skip
    processes = [
        subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in range(2)
    ]
    watchdog = threading.Timer(120, lambda: [process.kill() for process in processes])
    watchdog.start()
    try:
        addresses = [process.stdout.readline().removeprefix("listening on ").strip() for process in processes]
        results: dict[int, TrainedStep] = {}

        def train(rank: int) -> None:
            with TrainerClient(addresses[rank], buffer.writer) as trainer:
                results[rank] = trainer.train_and_score(0, GROUPS, range(64), timeout=60)

        threads = [threading.Thread(target=train, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(90)
        assert results[0].metrics["train/grad_norm"] == results[1].metrics["train/grad_norm"] > 0
        # Each rank returns the log-probs of its own samples.
        first, second = (set(results[rank].log_probs) for rank in range(2))
        assert first and second and not first & second
        assert buffer.stats().groups["acknowledged"] == GROUPS
        for process in processes:
            process.terminate()
        assert [process.wait(120) for process in processes] == [0, 0]
    finally:
        watchdog.cancel()
        for process in processes:
            process.kill()
            process.wait(120)
            process.stdout.close()
