"""Recorded rollouts in a real buffer: what the trainer is given is what was recorded, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.launcher.services.replay import Replay
from slime.rollout.recordings.rollouts import write_rollout
from slime.types import Sample, SampleGroup
from slime.types.clients import BufferClient
from slime.types.errors import InvalidFile, MissingFile


@pytest.fixture
def buffer() -> Iterator[BufferClient]:
    with serve(BufferSettings(n_samples_per_prompt=2)) as service, BufferClient(service.address) as client:
        client.open_run("replay")
        yield client


def replay(buffer: BufferClient, directory: Path, **more: Any) -> Replay:
    args = {
        "n_samples_per_prompt": 2,
        "log_passrate": False,
        "log_multi_turn": False,
        "log_correct_samples": False,
        "log_reward_category": None,
        "rollout_max_response_len": 8,
        "reward_key": None,
        "load_debug_rollout_data_subsample": None,
    }
    return Replay(buffer, args | {"load_debug_rollout_data": str(directory / "{rollout_id}")} | more)


def group(number: int, *indexes: int, rollout_id: int | None = None) -> SampleGroup:
    samples = [
        Sample(
            group_index=number, index=index, rollout_id=rollout_id, prompt=[{"role": "user", "content": f"{number}"}],
            tokens=[1, number, position], response_length=1, reward=float(position), status=Sample.Status.COMPLETED,
        )
        for position, index in enumerate(indexes)
    ]  # fmt: skip
    return SampleGroup(number, samples=samples)


def test_groups_keep_their_order_and_samples_get_a_place_in_the_buffer(buffer: BufferClient, tmp_path: Path) -> None:
    write_rollout(tmp_path / "0", 0, [group(9, 18, 19), group(4, 9, 8)])
    write_rollout(tmp_path / "1", 1, [group(2, 5, 4)])
    source = replay(buffer, tmp_path)
    count, metrics = source.generate(0)
    assert count == 2 and metrics["rollout/raw_reward"] == 0.5
    assert len(buffer.seal_step(0, count)) == 4
    assert [sample.tokens for sample in buffer.read_step(0, range(4))] == [
        [1, 9, 0], [1, 9, 1], [1, 4, 0], [1, 4, 1],
    ]  # fmt: skip
    assert source.generate(1)[0] == 1
    assert [summary.group_index for summary in buffer.seal_step(1, 1)] == [2, 2]


def test_what_one_response_fanned_out_into_stays_together(buffer: BufferClient, tmp_path: Path) -> None:
    parts = group(0, 6, 7)
    parts.samples += group(0, 7).samples
    for sample in parts.samples[1:]:
        sample.rollout_id = 7
    write_rollout(tmp_path / "0", 0, [parts])
    replay(buffer, tmp_path).generate(0)
    assert [(summary.index, summary.rollout_id) for summary in buffer.seal_step(0, 1)] == [(0, None), (1, 7), (1, 7)]


def test_a_path_without_the_iteration_gives_every_iteration_the_same_samples(
    buffer: BufferClient, tmp_path: Path
) -> None:
    write_rollout(tmp_path / "data.pt", 7, [group(9, 18, 19)])
    source = replay(buffer, tmp_path, load_debug_rollout_data=str(tmp_path / "data.pt"))
    for rollout_id in range(2):
        assert source.generate(rollout_id)[0] == 1
        buffer.seal_step(rollout_id, 1)
        assert [sample.tokens for sample in buffer.read_step(rollout_id, range(2))] == [[1, 9, 0], [1, 9, 1]]


def test_a_share_is_of_whole_groups(buffer: BufferClient, tmp_path: Path) -> None:
    write_rollout(tmp_path / "0", 0, [group(number, 2 * number, 2 * number + 1) for number in range(5)])
    count, _ = replay(buffer, tmp_path, load_debug_rollout_data_subsample=0.4).generate(0)
    buffer.seal_step(0, count)
    assert count == 2 and [sample.tokens[1] for sample in buffer.read_step(0, (0, 2))] == [0, 4]


@pytest.mark.parametrize("indexes", [(0,), (0, 1, 2)])
def test_a_group_of_another_size_is_refused_with_the_flag(
    buffer: BufferClient, tmp_path: Path, indexes: tuple[int, ...]
) -> None:
    write_rollout(tmp_path / "0", 0, [group(0, *indexes)])
    with pytest.raises(InvalidFile, match="--n-samples-per-prompt"):
        replay(buffer, tmp_path).generate(0)


def test_a_recording_that_is_missing_or_empty_is_named(buffer: BufferClient, tmp_path: Path) -> None:
    write_rollout(tmp_path / "0", 0, [])
    with pytest.raises(InvalidFile, match="/0 has no samples"):
        replay(buffer, tmp_path).generate(0)
    with pytest.raises(MissingFile, match="--load-debug-rollout-data: no such file .*/1"):
        replay(buffer, tmp_path).generate(1)
