"""Samples to show are read beside the training, and what is wrong with them is no concern of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.launcher.loops.examples import Examples
from slime.launcher.services.supervisor import Supervisor
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings

GROUPS, SIZE = 3, 5


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    supervisor = Supervisor(tmp_path / "logs", start_seconds=300, stop_seconds=10)
    yield supervisor
    supervisor.stop()


@pytest.fixture
def buffer(tmp_path: Path) -> Iterator[BufferClient]:
    settings = BufferSettings(buffer_dir=str(tmp_path / "state"), n_samples_per_prompt=SIZE)
    with serve(settings, RpcSettings()) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(2 * GROUPS)])
        yield client


def complete(buffer: BufferClient, count: int) -> None:
    for leased in buffer.lease_groups(count, wait_seconds=10):
        for sample in leased.group.samples:
            sample.tokens, sample.response_length, sample.reward = [1, 2, 3], 2, 1.0
            sample.status = Sample.Status.COMPLETED
        buffer.complete_group(leased.token, leased.group.samples)


def damage(directory: Path, group: int) -> None:
    path = next((directory / "state" / "payloads").glob(f"*/{group:010d}-*"))
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))


def indexes(samples: list[Sample]) -> list[int | None]:
    return [sample.index for sample in samples]


def test_the_first_samples_of_the_first_groups_come_with_the_log_probs_of_the_trainer(
    supervisor: Supervisor, buffer: BufferClient
) -> None:
    complete(buffer, GROUPS)
    examples = Examples(supervisor, 2)
    examples.choose(0, buffer.seal_step(0, GROUPS))
    assert examples.begin(0, buffer) == [0, 1, 2, 3, 5, 6, 7, 8]
    samples = examples.take(0, {5: np.float32([-1.0, -2.0])})
    assert indexes(samples) == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [hasattr(sample, "trainer_log_probs") for sample in samples] == [False] * 4 + [True] + [False] * 3
    assert examples.take(0, {}) == []


def test_damage_that_only_the_examples_meet_changes_nothing_that_is_trained_on(
    supervisor: Supervisor, buffer: BufferClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    complete(buffer, GROUPS)
    examples = Examples(supervisor, 1)
    examples.choose(0, buffer.seal_step(0, GROUPS))
    damage(tmp_path, 0)
    assert examples.begin(0, buffer) == [0, 1, 2, 3]
    assert examples.take(0, {}) == []
    assert "no samples of step 0 can be shown: " in caplog.text
    buffer.acknowledge_step(0)


def test_a_step_that_is_sealed_again_shows_its_new_samples(
    supervisor: Supervisor, buffer: BufferClient, tmp_path: Path
) -> None:
    complete(buffer, GROUPS + 1)
    examples = Examples(supervisor, 1)
    examples.choose(0, buffer.seal_step(0, GROUPS))
    # The trainer meets the damage, and the examples a step that is no longer sealed.
    buffer.drop_groups([0])
    examples.begin(0, buffer)
    examples.choose(0, buffer.seal_step(0, GROUPS))
    examples.begin(0, buffer)
    assert indexes(examples.take(0, {0: np.float32([-1.0, -2.0])})) == [5, 6, 7, 8]
