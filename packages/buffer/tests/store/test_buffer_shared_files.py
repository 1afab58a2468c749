"""Payloads that are written together share a file, which lasts until the last of them is deleted."""

from __future__ import annotations

import errno
import os
import random
import re
import tempfile
import threading
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.buffer.store.blobs import FilePayloads, file_of, group_of
from slime.types.errors import DataLoss, OutOfSpace

NUM_GPUS = 0


def stored(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def payloads(tmp_path: Path) -> FilePayloads:
    return FilePayloads(tmp_path / "payloads")


def test_a_call_writes_one_file_that_is_named_after_its_highest_group(payloads: FilePayloads) -> None:
    names = payloads.write([(5000, [b"ab", b"c"]), (70000, [memoryview(b"")]), (9, [b"defg"])])
    (file,) = payloads.names()
    assert file.startswith("000017/0000070000-") and group_of(file) == 70000
    assert names == [f"{file}@0.0.3", f"{file}@1.3.0", f"{file}@2.3.4"]
    assert {*map(file_of, names)} == {file} and (payloads.directory / file).read_bytes() == b"abcdefg"
    assert [payloads.size(name) for name in names] == [3, 0, 4]
    (single,) = payloads.write([(9, [b"hi"])])
    assert file_of(single) == single and (payloads.directory / single).read_bytes() == b"hi"
    assert payloads.write([]) == [] and payloads.names() == {file, single}


def test_a_range_beyond_a_payload_does_not_read_its_neighbour(payloads: FilePayloads) -> None:
    first, second = payloads.write([(0, [b"first"]), (1, [b"second"])])
    assert payloads.read(first, [(0, 5), (3, 2)]) == [b"first", b"st"]
    assert payloads.read(second, [(0, 6), (5, 1), (6, 0)]) == [b"second", b"d", b""]
    for wrong in ((0, 6), (5, 1), (7, 2)):
        with pytest.raises(DataLoss, match=f"bytes at {wrong[0]}, expected {wrong[1]}: cut short"):
            payloads.read(first, [wrong])


@pytest.mark.parametrize(("length", "sizes"), [(8, [5, 3]), (3, [3, 0]), (0, [0, 0]), (None, [None, None])])
def test_a_file_that_is_cut_or_gone_has_lost_the_payloads_behind_the_cut(
    payloads: FilePayloads, length: int | None, sizes: list[int | None]
) -> None:
    names = payloads.write([(0, [b"first"]), (1, [b"second"])])
    path = payloads.directory / file_of(names[0])
    if length is None:
        path.unlink()
    else:
        os.truncate(path, length)
    assert [payloads.size(name) for name in names] == sizes
    for name, size, whole in zip(names, sizes, (5, 6), strict=True):
        if size == whole:
            assert payloads.read(name, [(0, whole)])
            continue
        # The message shows a file that there is, or was.
        shown = re.escape(f"payload of {whole} bytes from {0 if whole == 5 else 5} on in {path}")
        with pytest.raises(DataLoss, match=f"{shown} is gone" if length is None else f"{shown}: .*cut short"):
            payloads.read(name, [(0, whole)])


def test_a_file_goes_with_its_last_payload_however_often_each_is_deleted(payloads: FilePayloads) -> None:
    names = payloads.write([(index, [bytes([index])]) for index in range(3)])
    for left in (2, 1):
        for _ in range(3):
            payloads.delete(names[left])
        assert payloads.read(names[0], [(0, 1)]) == [b"\0"] and len(payloads.names()) == 1
    payloads.delete(names[0])
    assert not payloads.names()
    for name in names:
        payloads.delete(name)


def test_a_file_whose_other_payloads_are_not_known_is_not_deleted(payloads: FilePayloads) -> None:
    names = payloads.write([(0, [b"a"]), (1, [b"b"])])
    another = FilePayloads(payloads.directory)
    for name in names:
        another.delete(name)
    assert another.names() == {file_of(names[0])}
    # The database names one of them; the other was deleted before.
    another.track({names[1], "000000/0000000007-0123abcd"})
    another.delete(names[0])
    assert another.read(names[1], [(0, 1)]) == [b"b"]
    another.delete(names[1])
    assert another.names() == set()


@pytest.mark.parametrize("call", ["writev", "rename"])
def test_a_disk_that_fills_up_leaves_nothing_of_a_call(
    payloads: FilePayloads, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(OutOfSpace, match="2 groups: no space for 11 bytes"):
            payloads.write([(0, [b"first"]), (1, [b"second"])])
    assert stored(payloads.directory) == set() and not payloads._in_use
    (name, _) = payloads.write([(0, [b"first"]), (1, [b"second"])])
    assert payloads.read(name, [(0, 5)]) == [b"first"]


def test_each_file_is_flushed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    payloads = FilePayloads(tmp_path, fsync=True)
    names = payloads.write([(index, [b"samples"]) for index in range(3)])
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    payloads.flush(names)
    file = tmp_path / file_of(names[0])
    assert sorted(flushed) == sorted(map(str, (file, file.parent, tmp_path)))

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace, match="3 groups: no space for 21 bytes"):
        payloads.flush(names)


ACTIONS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.integers(0, 9000), st.lists(st.binary(max_size=6), min_size=1, max_size=3)), max_size=5),
        st.sampled_from(["delete", "delete again", "reopen"]).flatmap(
            lambda action: st.tuples(st.just(action), st.integers(0, 99))
        ),
    ),
    max_size=25,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_what_is_in_use_reads_back_and_nothing_else_keeps_a_file(
    actions: list[list[tuple[int, list[bytes]]] | tuple[str, int]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory) / "payloads"
        payloads = FilePayloads(place)
        in_use: dict[str, bytes] = {}
        deleted: list[str] = []
        for action in actions:
            if isinstance(action, list):
                names = payloads.write(action)
                in_use |= {name: b"".join(parts) for name, (_, parts) in zip(names, action, strict=True)}
            elif action[0] == "reopen":
                payloads = FilePayloads(place)
                payloads.track(in_use)
            elif action[0] == "delete again":
                if deleted:
                    payloads.delete(deleted[action[1] % len(deleted)])
            elif in_use:
                name = list(in_use)[action[1] % len(in_use)]
                payloads.delete(name)
                in_use.pop(name)
                deleted.append(name)
            assert {name: payloads.read(name, [(0, len(data))]) for name, data in in_use.items()} == {
                name: [data] for name, data in in_use.items()
            }
            assert stored(place) == payloads.names() == {*map(file_of, in_use)}


def test_threads_that_write_read_and_delete_at_once_lose_nothing_and_leave_nothing(payloads: FilePayloads) -> None:
    failures: list[BaseException] = []
    shared = [payloads.write([(n, [bytes([n])]) for n in range(16)]) for _ in range(40)]

    def work(number: int) -> None:
        try:
            order = random.Random(number)
            for names in shared:
                own = payloads.write([(0, [b"own"]), (1, [b"other"])])
                # Each thread deletes a quarter of each file.
                mine = list(range(number, 16, 4))
                order.shuffle(mine)
                for n in mine:
                    assert payloads.read(names[n], [(0, 1)]) == [bytes([n])]
                    payloads.delete(names[n])
                assert payloads.read(own[1], [(0, 5)]) == [b"other"]
                for name in own:
                    payloads.delete(name)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not payloads.names() and not payloads._in_use


def test_a_million_groups_that_are_kept_take_little_memory(payloads: FilePayloads) -> None:
    files, together = 5000, 16
    names = (
        f"{index >> 12:06d}/{index:010d}-0123abcd@{position}.{position * 4000}.4000"
        for index in range(files)
        for position in range(together)
    )
    tracemalloc.start()
    try:
        payloads.track(names)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept * 1_000_000 / (files * together) < 20e6
