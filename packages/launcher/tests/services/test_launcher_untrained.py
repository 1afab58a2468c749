"""Damage between the seal and the training of a step costs its groups, and the run generates others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.launcher.services import untrained
from slime.launcher.services.untrained import UntrainedSteps
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.errors import DataLoss
from slime.types.rpc import RpcSettings

GROUPS = 2


class Making:
    """The calls of `Services`, on a buffer that is there."""

    def __init__(self, buffer: BufferClient, directory: Path) -> None:
        self.buffer = buffer
        self.directory = directory
        self.more: list[tuple[int, int]] = []

    def generate_more(self, step: int, num_groups: int) -> None:
        self.more.append((step, num_groups))
        self.complete(num_groups)

    def seal_again(self, step: int) -> None:
        self.seal(step)

    def groups_of(self, step: int) -> int:
        return GROUPS

    def groups_at_hand(self) -> int:
        groups = self.buffer.stats().groups
        return groups.get("completed", 0) + groups.get("sealed", 0)

    def complete(self, count: int) -> None:
        for leased in self.buffer.lease_groups(count, wait_seconds=10):
            (sample,) = leased.group.samples
            sample.tokens, sample.response_length, sample.reward = [1, 2, 3], 2, 1.0
            sample.status = Sample.Status.COMPLETED
            self.buffer.complete_group(leased.token, [sample])

    def seal(self, step: int) -> list[int]:
        return [summary.group_index for summary in self.buffer.seal_step(step, GROUPS)]

    def read(self, step: int) -> list[int | None]:
        self.seal(step)
        return [sample.group_index for sample in self.buffer.read_step(step, range(GROUPS))]

    def damage(self, group: int) -> None:
        path = next((self.directory / "payloads").glob(f"*/{group:010d}-*"))
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


@pytest.fixture
def making(tmp_path: Path) -> Iterator[Making]:
    settings = BufferSettings(buffer_dir=str(tmp_path / "state"), n_samples_per_prompt=1)
    with serve(settings, RpcSettings()) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"prompt {number}" for number in range(20)])
        yield Making(client, tmp_path / "state")


def generate(steps: UntrainedSteps, making: Making, step: int) -> None:
    with steps.changing():
        making.complete(GROUPS)
        steps.generated(step)


def test_a_damaged_group_is_generated_again_and_the_steps_after_it_are_sealed_again(making: Making) -> None:
    steps = UntrainedSteps(making)
    for step in range(2):
        generate(steps, making, step)
        steps.seal(step, lambda step=step: making.seal(step))
    making.damage(1)
    assert steps.train(0, lambda: making.read(0)) == [0, 2]
    assert making.more == [(0, 1)]
    making.buffer.acknowledge_step(0)
    assert steps.train(1, lambda: making.read(1)) == [3, 4]
    assert making.more == [(0, 1)] and not steps.retries


def test_a_rollout_that_is_sealed_while_an_earlier_step_is_unsealed_has_that_one_sealed_first(making: Making) -> None:
    steps = UntrainedSteps(making)
    for step in range(2):
        generate(steps, making, step)
    steps.seal(0, lambda: making.seal(0))
    making.damage(0)
    # The trainer has seen the damage, and nobody has mended it yet.
    with pytest.raises(DataLoss):
        making.read(0)
    assert steps.seal(1, lambda: making.seal(1)) == [3, 4]
    assert steps.train(0, lambda: making.read(0)) == [1, 2]


def test_the_samples_that_a_seal_shows_may_be_damaged_too(making: Making) -> None:
    steps = UntrainedSteps(making)
    generate(steps, making, 0)
    making.damage(0)
    assert steps.seal(0, lambda: making.read(0)) == [1, 2]
    assert steps.retries == {0: 1}


def test_damage_without_end_ends_the_run(making: Making, caplog: pytest.LogCaptureFixture) -> None:
    steps = UntrainedSteps(making)
    generate(steps, making, 0)
    steps.seal(0, lambda: making.seal(0))

    def read() -> list[int | None]:
        making.damage(making.seal(0)[0])
        return making.read(0)

    with pytest.raises(DataLoss, match="is not what was stored"):
        steps.train(0, read)
    assert making.more == [(0, 1)] * untrained.ATTEMPTS
    assert "step 0 is refilled, attempt 3 of 3: " in caplog.text
