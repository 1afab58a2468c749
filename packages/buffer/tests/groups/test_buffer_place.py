"""The place in the data: a new buffer that begins there leases the groups that the old one would have leased."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from buffer_samples import finish
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, OutOfSpace


@contextmanager
def buffer(**options: object) -> Iterator[BufferClient]:
    with serve(BufferSettings(n_samples_per_prompt=2, **options)) as service:  # type: ignore[arg-type]
        with BufferClient(service.address) as client:
            yield client


def write_prompts(directory: Path, count: int = 5) -> str:
    path = directory / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"prompt {n}"}) + "\n" for n in range(count)))
    return str(path)


def shown(leased: list) -> list[tuple]:
    return [(g.group.group_index, [(s.index, s.prompt, s.response) for s in g.group.samples]) for g in leased]


def train(client: BufferClient, step: int, count: int) -> None:
    for leased in client.lease_groups(count):
        client.complete_group(leased.token, finish(leased.group.samples))
    client.seal_step(step, count)
    client.acknowledge_step(step)


@settings(max_examples=10, deadline=None)
@given(counts=st.lists(st.integers(1, 7), min_size=1, max_size=4), ahead=st.integers(0, 3), partial=st.integers(0, 2))
def test_a_run_that_begins_at_a_place_gets_the_prompts_that_come_next(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], ahead: int, partial: int
) -> None:
    directory = tmp_path_factory.mktemp("place")
    options = {"prompt_data": write_prompts(directory), "rollout_shuffle": True}
    with buffer(**options) as client:
        client.open_run("one")
        for step, count in enumerate(counts):
            train(client, step, count)
        for leased in client.lease_groups(partial) if partial else []:
            samples = leased.group.samples
            samples[0].response = "begun"
            client.return_group(leased.token, samples)
        if ahead:  # a rollout that is being generated while the checkpoint is written
            client.lease_groups(ahead)
        place = directory / "data_place.jsonl"
        place.write_bytes(client.read_place(len(counts) - 1))
        # The leases of an incarnation end when the next one begins.
        client.open_run("one", last_committed_step=len(counts) - 1)
        expected = shown(client.lease_groups(9))
    with buffer(**options, data_place=str(place)) as client:
        client.open_run("two", last_committed_step=len(counts) - 1)
        assert shown(client.lease_groups(9)) == expected


def test_what_clients_added_is_given_again_and_not_added_twice(tmp_path: Path) -> None:
    with buffer() as client:
        client.open_run("one")
        client.add_prompts(["a", "b", "c"], key="mine")
        train(client, 0, 1)
        place = tmp_path / "data_place.jsonl"
        place.write_bytes(client.read_place(0))
    with buffer(data_place=str(place)) as client:
        client.open_run("two", last_committed_step=0)
        assert client.add_prompts(["a", "b", "c"], key="mine").duplicate
        leased = client.lease_groups(5)
        assert [(g.group.group_index, g.group.samples[0].prompt) for g in leased] == [(1, "b"), (2, "c")]


def test_other_prompts_begin_with_their_first_and_numbers_go_on(tmp_path: Path) -> None:
    with buffer(prompt_data=write_prompts(tmp_path)) as client:
        client.open_run("one")
        train(client, 0, 3)
        (tmp_path / "place").write_bytes(client.read_place(0))
    (tmp_path / "other").mkdir()
    with buffer(prompt_data=write_prompts(tmp_path / "other", 2), data_place=str(tmp_path / "place")) as client:
        client.open_run("two", last_committed_step=0)
        (leased,) = client.lease_groups(1)
        assert (leased.group.group_index, leased.group.samples[0].index) == (3, 6)
        assert leased.group.samples[0].prompt == "prompt 0"


def test_groups_of_another_size_keep_their_prompts(tmp_path: Path) -> None:
    with buffer() as client:
        client.open_run("one")
        client.add_prompts(["a", "b"])
        (tmp_path / "place").write_bytes(client.read_place(-1))
    with serve(BufferSettings(n_samples_per_prompt=3, data_place=str(tmp_path / "place"))) as service:
        with BufferClient(service.address) as client:
            client.open_run("two")
            groups = [leased.group for leased in client.lease_groups(5)]
    assert [(g.samples[0].prompt, [s.index for s in g.samples]) for g in groups] == [("a", [4, 5, 6]), ("b", [7, 8, 9])]


def test_a_directory_that_was_used_goes_on_and_one_that_is_behind_is_refused(tmp_path: Path) -> None:
    options = {"prompt_data": write_prompts(tmp_path), "buffer_dir": str(tmp_path / "state")}
    with buffer(**options) as client:
        client.open_run("one")
        train(client, 0, 2)
        (tmp_path / "early").write_bytes(client.read_place(0))
        train(client, 1, 2)
        (tmp_path / "late").write_bytes(client.read_place(1))
    with buffer(**options, data_place=str(tmp_path / "early")) as client:
        client.open_run("one", last_committed_step=1)
        assert client.lease_groups(1)[0].group.group_index == 4
    (tmp_path / "late").write_text(
        (tmp_path / "late").read_text().replace('"next_group_index": 4', '"next_group_index": 9')
    )
    with pytest.raises(InvalidSetting, match="--buffer-dir has handed out 5 groups, .* after 9"):
        serve(BufferSettings(n_samples_per_prompt=2, data_place=str(tmp_path / "late"), **options))  # type: ignore[arg-type]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Limits the files that this process writes, which ends writes as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_start_that_ended_while_it_restored_samples_is_repeated(tmp_path: Path) -> None:
    responses = ["begun", "long" * 1_000_000]
    with buffer() as client:
        client.open_run("one")
        client.add_prompts(["a", "b"])
        for leased, response in zip(client.lease_groups(2), responses, strict=True):
            samples = leased.group.samples
            samples[0].response = response
            client.return_group(leased.token, samples)
        (tmp_path / "place").write_bytes(client.read_place(-1))
    options = {"buffer_dir": str(tmp_path / "state"), "data_place": str(tmp_path / "place")}
    with largest_file(2_000_000), pytest.raises(OutOfSpace, match="group 1: no space"), buffer(**options):
        pass
    with buffer(**options) as client:
        client.open_run("two")
        assert [leased.group.samples[0].response for leased in client.lease_groups(2)] == responses
    left = [path.read_bytes() for path in (tmp_path / "state" / "lost+found").glob("*/*")]
    assert len(left) == 1 and b"begun" in left[0]


@pytest.mark.parametrize("content", ["", "[]\n", '{"format": 2}\n', '{"format": 1}\n', "no json\n"])
def test_a_file_that_is_no_place_is_an_error_by_name(tmp_path: Path, content: str) -> None:
    path = tmp_path / "place"
    with pytest.raises(MissingFile, match="--data-place: no such file"):
        serve(BufferSettings(data_place=str(path)))
    path.write_text(content)
    with pytest.raises(InvalidFile, match="--data-place: .* is not a place in the data"):
        serve(BufferSettings(data_place=str(path)))


def test_a_step_keeps_the_metrics_that_it_was_sealed_with(tmp_path: Path) -> None:
    options = {"prompt_data": write_prompts(tmp_path), "buffer_dir": str(tmp_path / "state")}
    with buffer(**options) as client:
        client.open_run("one")
        first, second, third = client.lease_groups(3)
        client.reject_group(second.token, "dull")
        for leased in (first, third):
            client.complete_group(leased.token, finish(leased.group.samples))
        sealed = client.seal_step(0, 1, metrics={"rollout/aborted_groups": 2.0})
        assert (sealed.metrics, sealed.rejected) == ({"rollout/aborted_groups": 2.0}, {"dull": 1})
        assert client.seal_step(1, 1).rejected == {}
    with buffer(**options) as client:
        client.open_run("one")
        again = client.seal_step(0, 1, metrics={"rollout/aborted_groups": 0.0})
        assert (list(again), again.metrics, again.rejected) == (list(sealed), sealed.metrics, sealed.rejected)
