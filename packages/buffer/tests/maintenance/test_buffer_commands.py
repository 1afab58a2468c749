"""`slime-buffer groups`, `check`, `repair` and `backup`, as an operator types them."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from buffer_samples import complete

from slime.buffer.cli import main
from slime.buffer.service import RunningBuffer, serve
from slime.buffer.settings import BufferSettings
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def served(directory: Path) -> Iterator[RunningBuffer]:
    """A served buffer with a sealed step of two groups, and one group after it."""
    with serve(BufferSettings(buffer_dir=str(directory))) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"p{i}" for i in range(3)])
        complete(client, 3)
        client.seal_step(0, 2)
        yield service


@pytest.fixture
def stopped(served: RunningBuffer, directory: Path) -> Path:
    served.stop()
    return directory


def command(capsys, *words: object, expect: int = 0) -> str:
    assert main(list(map(str, words))) == expect
    captured = capsys.readouterr()
    assert not (captured.err and expect == 0), captured.err
    return captured.out + captured.err


def states(capsys, *where: object) -> dict[int, str]:
    rows = command(capsys, "groups", "list", "--json", *where).splitlines()
    return {row["group_index"]: row["state"] for row in map(json.loads, rows)}


def test_groups_of_a_server_are_listed_shown_and_taken_out(served, capsys):
    where = ("--address", served.address)
    table = command(capsys, "groups", "list", *where, "--state", "completed")
    assert [line.split()[:2] for line in table.splitlines()] == [["group", "state"], ["2", "completed"]]
    shown = json.loads(command(capsys, "groups", "show", 1, *where))
    assert (shown["state"], shown["step"]) == ("sealed", 0)
    (sample,) = shown["samples"]
    assert (sample["response"], sample["reward"], sample["tokens"], sample["problem"]) == ("345", 1.0, 5, None)
    assert "steps 0" in command(capsys, "groups", "quarantine", 1, *where, "--reason", "poison")
    assert "steps" not in command(capsys, "groups", "reject", 2, *where)
    assert states(capsys, *where) == {0: "completed", 1: "quarantined", 2: "rejected"}
    assert "no group 99" in command(capsys, "groups", "show", 99, *where, expect=1)


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "127.0.0.1", "127.0.0.1:0"])
def test_an_address_that_is_none_is_refused(address, capsys):
    found = command(capsys, "groups", "list", "--address", address, expect=2)
    assert found.startswith("slime-buffer: error: --address must be HOST:PORT")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("groups", "a groups command is required: one of list, show, reject, quarantine; see --help"),
        ("groups lst", "unknown groups command 'lst'; did you mean list?"),
        ("groups list", "--address, --buffer-dir or --buffer-store is required"),
        ("groups show --address h:1", "INDEX is required: Index of a group"),
        ("groups show x --address h:1", "INDEX must be an integer, got 'x'"),
        ("groups list --address h:1 --buffer-dir d", "--buffer-dir and --address cannot be used together"),
        ("groups list --address h:1 --state complete", "did you mean completed?"),
        ("check", "DIR is required"),
        ("backup d", "DEST is required: Directory to create"),
    ],
)
def test_wrong_words_are_named(words, message, capsys):
    found = command(capsys, *words.split(), expect=2)
    assert found.startswith("slime-buffer: error: ") and message in found


def test_a_buffer_that_is_not_there_is_told_without_the_words_of_grpc(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        found = command(capsys, "groups", "list", "--address", address, expect=1)
    assert found == f"slime-buffer: error: cannot connect to {address}: nothing listens there\n"


def test_a_call_without_the_token_says_how_to_bring_it_and_prints_no_table(tmp_path, capsys):
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("s3cret")
    with serve(BufferSettings(), RpcSettings(token_file=str(token))) as service:
        for action in ("list", "show 1", "reject 1"):
            found = command(capsys, "groups", *action.split(), "--address", service.address, expect=1)
            assert found.startswith("slime-buffer: error: ") and "--token-file" in found and service.address in found
        command(capsys, "groups", "list", "--address", service.address, "--token-file", token)


def test_help_shows_no_defaults_that_say_nothing(capsys):
    with pytest.raises(SystemExit):
        main(["groups", "list", "--help"])
    found = " ".join(capsys.readouterr().out.split())
    assert "(default: 0)" in found and not {"None)", "False)", "[])"} & set(found.split())


def test_groups_of_a_directory_are_taken_out(stopped, capsys):
    assert "steps 0" in command(capsys, "groups", "reject", 0, "--buffer-dir", stopped)
    assert states(capsys, "--buffer-dir", stopped) == {0: "rejected", 1: "completed", 2: "completed"}


def test_a_directory_in_use_is_left_to_its_server(served, directory, capsys):
    for words in (["check", directory], ["repair", directory], ["groups", "list", "--buffer-dir", directory]):
        assert "another slime-buffer uses it" in command(capsys, *words, expect=2)


@pytest.mark.parametrize(
    "words", [["groups"], ["groups", "look"], ["groups", "list"], ["groups", "show", "x"], ["check"]]
)
def test_wrong_words_exit_with_2(words, capsys):
    command(capsys, *words, expect=2)


@pytest.mark.parametrize("words", [["check"], ["groups", "list", "--buffer-dir"]])
def test_a_reader_that_has_had_enough_ends_the_command_without_a_traceback(words, stopped, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main([*words, str(stopped)]) == 141


def test_an_output_that_is_full_is_told_in_one_line(stopped, monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(["check", str(stopped)]) == 1
    problem = "slime-buffer: error: cannot write to the standard output: No space left on device\n"
    assert capsys.readouterr().err == problem


def test_check_names_what_is_wrong_and_changes_nothing(stopped, capsys):
    assert command(capsys, "check", stopped).endswith(": no problems\n")
    (stopped / "payloads" / "000000" / "0000000002-01234567").write_bytes(b"stray")
    next((stopped / "payloads").glob("*/0000000001-*")).write_bytes(b"short")
    for _ in range(2):
        found = command(capsys, "check", stopped, expect=1)
        assert "group 1 (sealed): payload " in found and "cut short" in found and "0000000002-01234567" in found
        assert found.endswith(": 2 problems\n")
    assert "1 file moved" in command(capsys, "repair", stopped)
    assert [path.name for path in (stopped / "lost+found").rglob("*-*")] == ["0000000002-01234567"]
    # The rest of the damaged group stays, and is shown.
    assert "group 1 (quarantined)" in command(capsys, "check", stopped, expect=1)
    assert states(capsys, "--buffer-dir", stopped) == {0: "completed", 1: "quarantined", 2: "completed"}


def test_repair_gives_up_what_the_database_is_too_old_for(stopped, capsys):
    (stopped / "payloads" / "000000" / "0000000077-01234567").write_bytes(b"newer")
    assert "slime-buffer repair" in command(capsys, "groups", "list", "--buffer-dir", stopped, expect=2)
    command(capsys, "repair", stopped)
    assert len(states(capsys, "--buffer-dir", stopped)) == 3


@pytest.mark.parametrize("kind", ["file", "pipe", "loop"])
@pytest.mark.parametrize("name", ["payloads", "state.sqlite"])
def test_what_is_no_directory_or_no_file_is_named_and_nothing_waits_for_it(stopped, name, kind, capsys):
    path = stopped / name
    path.rename(stopped / "aside")
    {"file": path.touch, "pipe": lambda: os.mkfifo(path), "loop": lambda: path.symlink_to(path)}[kind]()
    for words in (["check", stopped], ["repair", stopped], ["groups", "list", "--buffer-dir", stopped]):
        assert str(stopped) in command(capsys, *words, expect=2)


def test_a_pipe_in_the_place_of_a_payload_is_a_damaged_group(stopped, capsys):
    payload = next((stopped / "payloads").glob("*/0000000001-*"))
    payload.unlink()
    os.mkfifo(payload)
    assert "group 1 (sealed): payload " in command(capsys, "check", stopped, expect=1)
    assert "not a regular file" in command(capsys, "check", stopped, expect=1)


@pytest.mark.parametrize("name", ["check", "repair", "backup"])
def test_a_directory_without_a_buffer_is_none(name, tmp_path, capsys):
    words = [name, tmp_path / "none"] + ([tmp_path / "copy"] if name == "backup" else [])
    assert "no buffer in" in command(capsys, *words, expect=2)
    assert not list(tmp_path.iterdir())


def test_a_backup_of_a_server_is_a_whole_buffer(served, directory, tmp_path, capsys):
    copy = tmp_path / "copy"
    assert "3 groups, samples of 3" in command(capsys, "backup", directory, copy)
    assert f"{copy} exists" in command(capsys, "backup", directory, copy, expect=2)
    served.stop()
    shutil.rmtree(directory)
    assert command(capsys, "check", copy).endswith(": no problems\n")
    with serve(BufferSettings(buffer_dir=str(copy))) as service, BufferClient(service.address) as client:
        client.get_run()
        assert [s.group_index for s in client.seal_step(0, 2)] == [0, 1]
        assert [s.response for s in client.read_step(0, [0, 1])] == ["345", "345"]
