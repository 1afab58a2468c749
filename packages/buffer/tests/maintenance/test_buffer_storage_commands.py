"""`slime-buffer groups`, `check`, `repair` and `backup` of buffers in PostgreSQL and in an object store."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from buffer_samples import complete

from slime.buffer.cli import main
from slime.buffer.service import RunningBuffer, serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store import postgres_session
from slime.buffer.store.objects import ObjectPayloads
from slime.types.clients import BufferClient

DATABASES = ("postgresql", "postgresql and s3")


@pytest.fixture
def settings(storage: Callable[[], dict[str, str]]) -> dict[str, str]:
    return storage()


@pytest.fixture
def flags(settings: dict[str, str]) -> list[str]:
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", value)]


def fill(settings: dict[str, str]) -> RunningBuffer:
    """Returns a served buffer with a sealed step of two groups, and one group after it."""
    service = serve(BufferSettings(**settings))  # type: ignore[arg-type]
    with BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"p{i}" for i in range(3)])
        complete(client, 3)
        client.seal_step(0, 2)
    return service


def command(capsys: pytest.CaptureFixture[str], *words: object, expect: int = 0) -> str:
    assert main(list(map(str, words))) == expect
    captured = capsys.readouterr()
    return captured.out + captured.err


def states(capsys: pytest.CaptureFixture[str], flags: list[str]) -> dict[int, str]:
    rows = map(json.loads, command(capsys, "groups", "list", "--json", *flags).splitlines())
    return {row["group_index"]: row["state"] for row in rows}


@pytest.mark.stores(*DATABASES)
def test_what_is_damaged_is_named_and_set_aside(settings, flags, capsys):
    with fill(settings) as service:
        pass
    assert command(capsys, "check", *flags).endswith(": no problems\n")
    with serve(BufferSettings(**settings)) as service:
        (group,) = service.buffer.store.groups(indexes=[1])
        service.buffer.payloads.delete(group.payload)
        (stray,) = service.buffer.payloads.write([(2, [b"of a crash"])])
    for _ in range(2):
        found = command(capsys, "check", *flags, expect=1)
        assert "group 1 (sealed): payload " in found and f"{stray}: left by a crash" in found
        assert found.endswith("/postgres: 2 problems\n")
    repaired = command(capsys, "repair", *flags)
    assert "1 file moved to " in repaired and "lost+found, 1 damaged group taken out of the run" in repaired
    assert "1 problem\n" in command(capsys, "check", *flags, expect=1)
    assert states(capsys, flags) == {0: "completed", 1: "quarantined", 2: "completed"}
    command(capsys, "groups", "reject", 2, *flags)
    assert states(capsys, flags) == {0: "completed", 1: "quarantined", 2: "rejected"}


@pytest.mark.stores(*DATABASES)
def test_a_database_without_a_buffer_stays_empty(settings, flags, capsys):
    if "buffer_dir" in settings:
        (Path(settings["buffer_dir"]) / "payloads").mkdir(parents=True)
    for words in (["check"], ["repair"], ["groups", "list"]):
        for _ in range(2):
            assert "no buffer in postgresql://" in command(capsys, *words, *flags, expect=2)


@pytest.mark.stores("postgresql")
def test_a_directory_that_holds_no_samples_is_not_created(settings, flags, capsys):
    for words in (["check"], ["repair"], ["groups", "list"]):
        assert f"no buffer in {settings['buffer_dir']}" in command(capsys, *words, *flags, expect=2)
    assert not Path(settings["buffer_dir"]).exists()


@pytest.mark.stores("postgresql")
def test_a_database_in_use_is_left_to_its_server(settings, flags, capsys, monkeypatch):
    monkeypatch.setattr(postgres_session, "LOCK_SECONDS", 0.1)
    with fill(settings) as service, BufferClient(service.address) as client:
        for words in (["check"], ["repair"], ["groups", "list"]):
            assert "the slime-buffer on " in command(capsys, *words, *flags, expect=2)
        assert client.stats().groups["sealed"] == 2


@pytest.mark.stores("postgresql")
def test_a_backup_of_a_database_is_postgresqls_own(settings, flags, tmp_path, capsys):
    for words in (["backup", *flags[:2]], ["backup", *flags, tmp_path / "copy"]):
        found = command(capsys, *words, expect=2)
        assert (
            "backup with --buffer-store is not supported yet" in found and "use pg_dump, and copy the samples" in found
        )


@pytest.mark.stores("postgresql")
def test_the_samples_of_a_database_are_no_buffer_without_it(settings, flags, tmp_path, capsys):
    """All of its groups would look damaged, and would be taken out of the run."""
    fill(settings).stop()
    directory = settings["buffer_dir"]
    for words in (["check"], ["repair"], ["groups", "list", "--buffer-dir"]):
        assert "keeps the samples of a --buffer-store" in command(capsys, *words, directory, expect=2)
    assert "no state.sqlite" in command(capsys, "backup", directory, tmp_path / "copy", expect=2)
    assert command(capsys, "check", *flags).endswith(": no problems\n")


@pytest.fixture
def objects(new_prefix: Callable[[], str], tmp_path: Path) -> dict[str, str]:
    """State in SQLite, samples as objects."""
    return {"buffer_dir": str(tmp_path / "state"), "buffer_payloads": new_prefix()}


def test_a_directory_whose_samples_are_objects_is_not_read_without_them(objects, tmp_path, capsys):
    """All of its groups would look damaged, and would be taken out of the run."""
    fill(objects).stop()
    directory, where = objects["buffer_dir"], ("--buffer-payloads", objects["buffer_payloads"])
    for words in (["check"], ["repair"]):
        assert "are not those of" in command(capsys, *words, directory, expect=2)
        assert "are not those of" in command(capsys, *words, directory, *where[:1], f"{where[1]}-other", expect=2)
    copy = tmp_path / "copy"
    assert "requires the --buffer-payloads of its run" in command(capsys, "backup", directory, copy, expect=2)
    assert not copy.exists() and not copy.with_name("copy.partial").exists()
    assert command(capsys, "check", directory, *where).endswith(": no problems\n")


def test_a_backup_brings_objects_as_files(objects, tmp_path, capsys):
    copy = tmp_path / "copy"
    where = ("--buffer-payloads", objects["buffer_payloads"])
    with fill(objects):
        assert "3 groups, samples of 3" in command(
            capsys, "backup", "--buffer-dir", objects["buffer_dir"], copy, *where
        )
    assert command(capsys, "check", copy).endswith(": no problems\n")
    with serve(BufferSettings(buffer_dir=str(copy))) as service, BufferClient(service.address) as client:
        client.get_run()
        assert [s.response for s in client.read_step(0, [0, 1])] == ["345", "345"]


def test_a_look_at_a_buffer_creates_nothing_in_its_directory(tmp_path, capsys):
    state = tmp_path / "state"
    fill({"buffer_dir": str(state)}).stop()
    shutil.rmtree(state / "payloads")
    before = sorted(path.name for path in state.iterdir() if not path.name.startswith("state.sqlite-"))
    command(capsys, "backup", state, tmp_path / "copy", expect=1)
    assert not (state / "payloads").exists()
    for words, expect in ((["check"], 1), (["repair"], 0), (["groups", "list", "--buffer-dir"], 0)):
        command(capsys, *words, state, expect=expect)
    assert sorted(path.name for path in state.iterdir() if not path.name.startswith("state.sqlite-")) == before
    (state / "payloads").write_text("a file")
    assert "payloads: Not a directory" in command(capsys, "check", state, expect=2)


def test_a_store_whose_first_server_was_killed_before_its_claim_is_whole(objects, capsys, monkeypatch):
    def killed(self, owner):
        raise KeyboardInterrupt

    settings = BufferSettings(**objects)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ObjectPayloads, "claim", killed)
        serve(settings)
    flags = [word for name, value in objects.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert command(capsys, "check", *flags).endswith(": no problems\n")
    # Inspecting the storage claims nothing.
    assert ObjectPayloads(objects["buffer_payloads"]).owner() is None
    with serve(settings) as service, BufferClient(service.address) as client:
        assert client.stats().groups
    assert ObjectPayloads(objects["buffer_payloads"]).owner() is not None


def test_a_backup_that_has_no_place_is_refused_by_name_and_leaves_nothing(tmp_path, capsys):
    state = tmp_path / "state"
    fill({"buffer_dir": str(state)}).stop()
    (tmp_path / "file").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    before = sorted(path.name for path in tmp_path.iterdir())
    for target, message in (
        (tmp_path / "file" / "x", f"cannot write {tmp_path}/file/x: Not a directory"),
        (tmp_path / ("n" * 300), "File name too long"),
        (tmp_path / "loop", "exists: a backup is a new directory"),
        (state / "copy", f"copy is in the buffer {state}"),
    ):
        assert message in command(capsys, "backup", state, target, expect=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before and not (state / "copy").exists()


def test_a_backup_is_on_the_disk_before_it_has_its_name(tmp_path, capsys, monkeypatch):
    with fill({"buffer_dir": str(tmp_path / "run")}):
        pass
    fsync, flushed = os.fsync, {}

    def record(descriptor):
        fsync(descriptor)
        # A file keeps its number when its directory gets another name.
        flushed[os.fstat(descriptor).st_ino] = (tmp_path / "backup").exists()

    monkeypatch.setattr(os, "fsync", record)
    command(capsys, "backup", tmp_path / "run", tmp_path / "backup")
    copied = [tmp_path / "backup", *(tmp_path / "backup").rglob("*")]
    assert {flushed.get(path.stat().st_ino) for path in copied} == {False}
    # The name itself is on the disk once its directory is.
    assert flushed[tmp_path.stat().st_ino]


def test_an_index_beyond_64_bits_is_named(tmp_path, capsys):
    fill({"buffer_dir": str(tmp_path / "state")}).stop()
    words = ("groups", "show", 2**63, "--buffer-dir", tmp_path / "state")
    assert f"INDEX must be an integer of 64 bits, got {2**63}" in command(capsys, *words, expect=2)


def test_a_disk_that_fills_under_a_backup_is_named_with_its_place(tmp_path, capsys):
    fill({"buffer_dir": str(tmp_path / "state")}).stop()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "state" / "state.sqlite").stat().st_size
    # SQLite maps 32 KiB to read the original.
    assert size > 36 << 10
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 4096, limits[1]))
    try:
        found = command(capsys, "backup", tmp_path / "state", tmp_path / "copy", expect=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"DEST: no space left while writing {tmp_path}/copy" in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


def test_a_damaged_database_is_not_copied(tmp_path, capsys):
    fill({"buffer_dir": str(tmp_path / "state")}).stop()
    (tmp_path / "state" / "state.sqlite").write_bytes(b"no database" * 1000)
    found = command(capsys, "backup", tmp_path / "state", tmp_path / "copy", expect=2)
    assert "state.sqlite: file is not a database: see slime-buffer check" in found
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("check", "DIR is required: Directory of the buffer (its --buffer-dir), or --buffer-store URL"),
        ("check --buffer-store postgresql:///x", "--buffer-store requires --buffer-dir DIR or --buffer-payloads URL"),
        ("check d --buffer-store postgresql://me:s3cret@/x", "--buffer-store must hold no password"),
        ("repair d --buffer-payloads /x", "--buffer-payloads must be a URL s3://BUCKET[/PREFIX]"),
        ("check d --buffer-dir e", "DIR d and --buffer-dir cannot be used together"),
        ("groups list --buffer-payloads s3://b", "--buffer-payloads requires --buffer-dir DIR or --buffer-store URL"),
        ("groups list --address h:1 --buffer-store postgresql:///x", "--buffer-store and --address cannot be used"),
        ("backup --buffer-dir d", "DEST is required"),
    ],
)
def test_wrong_words_are_named(words, message, capsys):
    found = command(capsys, *words.split(), expect=2)
    assert found.startswith("slime-buffer: error: ") and message in found and "s3cret" not in found
