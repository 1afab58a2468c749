"""The state in PostgreSQL: databases that cannot be used, connections that break, secrets."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from buffer_samples import complete, finish
from postgres_server import PostgresServer, missing, postgres_server

from slime.buffer.buffer import Buffer
from slime.buffer.cli import main
from slime.buffer.groups.handed_in import HandedIn
from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store import postgres_session
from slime.buffer.store.base import State
from slime.buffer.waits import Caller
from slime.types.clients import BufferClient
from slime.types.codec import sample_from_proto, sample_to_proto
from slime.types.errors import InvalidField, InvalidFile, InvalidSetting, MissingFile, NotAvailable, Unavailable


@pytest.fixture
def settings(postgres: PostgresServer, tmp_path: Path) -> dict[str, Any]:
    return {"buffer_store": postgres.new_store(), "buffer_dir": str(tmp_path / "samples")}


@pytest.fixture
def execute(postgres: PostgresServer, settings: dict[str, Any]) -> Callable[[str], list[tuple[Any, ...]]]:
    schema = settings["buffer_store"].rpartition("search_path%3D")[2]
    return lambda query: postgres.execute(query, schema)


def fill(settings: dict[str, Any], groups: int = 3) -> None:
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"p{number}" for number in range(groups)])
        complete(client, groups)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            "DROP TABLE groups, group_templates, group_summaries, steps, prompt_batches, evaluation_prompts, state, "
            "seal_records, buffer_meta",
            "it is empty",
        ),
        ("DROP TABLE groups", "it has no table groups"),
        ("DROP TABLE group_templates, group_summaries", "it has no table group_summaries, group_templates"),
        ("DROP TABLE buffer_meta", "it has no table buffer_meta"),
        ("DELETE FROM buffer_meta", "buffer_meta has 0 rows"),
        ("DELETE FROM state; DELETE FROM groups", "not those of"),
        ("DELETE FROM groups", "is older than 3 files"),
        ("DELETE FROM group_templates WHERE group_index = 1", "groups lack their prompts or summaries"),
        ("DELETE FROM group_summaries WHERE group_index = 1", "groups lack their prompts or summaries"),
        ("DROP TABLE group_templates; UPDATE buffer_meta SET version = 4", "it has no table group_templates"),
        ("DROP TABLE group_templates; UPDATE buffer_meta SET version = 99", "schema version 99, expected at most 5"),
        ("UPDATE buffer_meta SET version = 99", "schema version 99, expected at most 5"),
    ],
)
def test_a_database_that_lost_something_is_an_error_and_no_sample_is_touched(settings, execute, damage, message):
    fill(settings)
    directory = Path(settings["buffer_dir"])
    before = sorted(directory.rglob("*"))
    execute(damage)
    for _ in range(2):
        with pytest.raises(InvalidFile, match=message):
            serve(BufferSettings(**settings))
    assert sorted(directory.rglob("*")) == before


TO_VERSION_3 = (
    "ALTER TABLE groups ADD COLUMN template BYTEA, ADD COLUMN summaries BYTEA;"
    "UPDATE groups SET template = t.template FROM group_templates t WHERE t.group_index = groups.group_index;"
    "UPDATE groups SET summaries = s.summaries FROM group_summaries s WHERE s.group_index = groups.group_index;"
    "ALTER TABLE groups ALTER COLUMN template SET NOT NULL;"
    "DROP TABLE group_templates, group_summaries; UPDATE buffer_meta SET version = 3"
)


@pytest.mark.parametrize("older", [TO_VERSION_3, "UPDATE buffer_meta SET version = 4"], ids=["3", "4"])
def test_a_database_of_an_older_version_is_brought_to_this_version(settings, execute, older):
    fill(settings)
    execute(older)
    for _ in range(2):
        with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
            client.open_run("run")
            assert len(client.seal_step(0, 3)) == len(list(client.read_step(0, range(3)))) == 3
        assert execute("SELECT version FROM buffer_meta") == [(5,)]
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'groups'"
    assert not {("template",), ("summaries",)} & {*execute(f"{columns} AND table_schema = current_schema()")}


def test_a_plan_of_an_empty_table_is_not_kept_for_a_full_one(settings):
    with serve(BufferSettings(**settings)) as service:
        ((mode,),) = service.buffer.store._rows("SHOW plan_cache_mode")
    assert mode == "force_custom_plan"


def test_samples_of_another_buffer_are_an_error(settings, postgres):
    fill(settings)
    other = settings | {"buffer_store": postgres.new_store()}
    with pytest.raises(InvalidFile, match="it is empty, and there are samples that belong to it"):
        serve(BufferSettings(**other))
    fill(other | {"buffer_dir": settings["buffer_dir"] + "2"})
    with pytest.raises(InvalidFile, match="not those of"):
        serve(BufferSettings(**other))
    # Neither can a buffer without a database take them for its own.
    with pytest.raises(InvalidSetting, match="keeps the samples of a --buffer-store: name that database"):
        serve(BufferSettings(buffer_dir=settings["buffer_dir"]))


def test_a_damaged_page_is_an_error_at_the_start(tmp_path):
    if reason := missing():
        pytest.skip(reason)
    with postgres_server() as server:
        settings = {"buffer_store": server.new_store(), "buffer_dir": str(tmp_path / "samples")}
        fill(settings, 40)
        server.execute("CHECKPOINT")
        ((file,),) = server.execute("SELECT pg_relation_filepath('run0.groups')")
        server.kill()
        path = server.data / file
        data = bytearray(path.read_bytes())
        data[8000:8100] = bytes(100)
        path.write_bytes(data)
        server.start()
        with pytest.raises(InvalidFile, match="is damaged: invalid page"):
            serve(BufferSettings(**settings))


def test_one_server_a_database(settings, monkeypatch):
    monkeypatch.setattr(postgres_session, "LOCK_SECONDS", 0.1)
    assert postgres_session.look(settings["buffer_store"]) == ""
    with serve(BufferSettings(**settings)):
        assert f"(process {os.getpid()})" in postgres_session.look(settings["buffer_store"])
        with pytest.raises(InvalidSetting, match=rf"the slime-buffer on .* \(process {os.getpid()}\) uses it"):
            serve(BufferSettings(**settings))
    serve(BufferSettings(**settings)).stop()


def test_schemas_of_one_database_are_stores_of_their_own(settings, postgres):
    other = {"buffer_store": postgres.new_store(), "buffer_dir": settings["buffer_dir"] + "2"}
    with serve(BufferSettings(**settings)) as one, serve(BufferSettings(**other)) as two:
        with BufferClient(one.address) as first, BufferClient(two.address) as second:
            first.open_run("one")
            second.open_run("two")
            assert (first.get_run().run_id, second.get_run().run_id) == ("one", "two")


def test_a_database_that_is_not_there_is_an_error_at_once(postgres, tmp_path):
    directory = {"buffer_dir": str(tmp_path / "samples")}
    host = postgres.url("public").rpartition("?")[2]
    with pytest.raises(MissingFile, match='--buffer-store .*database "none" does not exist'):
        serve(BufferSettings(buffer_store=f"postgresql://postgres@/none?{host}", **directory))
    with pytest.raises(InvalidSetting, match='role "nobody" does not exist'):
        serve(BufferSettings(buffer_store=f"postgresql://nobody@/postgres?{host}", **directory))
    with pytest.raises(InvalidSetting, match="create the schema first"):
        serve(BufferSettings(buffer_store=postgres.url("no_such_schema"), **directory))
    with pytest.raises(InvalidSetting, match="--buffer-store postgresql:///postgres: .*No such file"):
        serve(BufferSettings(buffer_store=f"postgresql:///postgres?host={tmp_path}", **directory))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:s3cret@host/db",
        "postgresql://me:s3c/ret@host/db",
        "postgresql://me:s3c?ret@host/db",
        "postgresql://host/db?user=me&password=s3cret",
        "mysql://me:s3cret@host/db",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url, capsys):
    assert main(["serve", "--buffer-store", url, "--buffer-dir", "d"]) == 2
    shown = capsys.readouterr().err
    assert "--buffer-store must hold no password" in shown and "PGPASSWORD" in shown and "s3c" not in shown


@pytest.mark.parametrize("parameter", ["oauth_client_secret", "scram_client_key", "%70assword"])
def test_other_secrets_in_the_url_are_refused(parameter):
    with pytest.raises(InvalidSetting, match="must hold no password"):
        BufferSettings(buffer_store=f"postgresql://host/db?{parameter}=s3cret", buffer_dir="d")


@pytest.mark.parametrize("url", ["host=h password=s3cret", "postgresql:/me:s3cret@host/db", "me:s3cret@host"])
def test_what_is_no_url_is_not_repeated_with_its_password(url):
    with pytest.raises(InvalidSetting, match="must be a URL postgresql://") as error:
        BufferSettings(buffer_store=url, buffer_dir="d")
    assert "s3cret" not in f"{error.value} {error.value.value}"


def test_a_directory_is_that_of_a_database_or_has_a_state_of_its_own(settings, postgres, tmp_path):
    """Otherwise each would move the samples of the other to lost+found."""
    serve(BufferSettings(**settings)).stop()
    with pytest.raises(InvalidSetting, match="keeps the samples of a --buffer-store"):
        serve(BufferSettings(buffer_dir=settings["buffer_dir"]))
    own = str(tmp_path / "own")
    serve(BufferSettings(buffer_dir=own)).stop()
    with pytest.raises(InvalidSetting, match="has the state.sqlite of a buffer without --buffer-store"):
        serve(BufferSettings(buffer_store=postgres.new_store(), buffer_dir=own))
    serve(BufferSettings(**settings)).stop()
    serve(BufferSettings(buffer_dir=own)).stop()


def test_a_database_is_not_served_with_an_empty_place_for_its_samples(settings, tmp_path):
    """Otherwise all samples would count as lost and be generated again."""
    fill(settings)
    for _ in range(2):
        with pytest.raises(InvalidFile, match="not those of"):
            serve(BufferSettings(**settings | {"buffer_dir": str(tmp_path / "mistyped")}))
    with serve(BufferSettings(**settings)) as service:
        assert service.buffer.store.count(State.COMPLETED) == 3


def test_a_buffer_can_be_stopped_while_its_database_does_not_answer(settings, monkeypatch):
    monkeypatch.setattr("slime.buffer.store.postgres.CLOSE_SECONDS", 0.2)
    buffer = Buffer(BufferSettings(**settings))
    store: Any = buffer.store
    ((pid,),) = store._rows("SELECT pg_backend_pid()")
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor() as threads:
            call = threads.submit(store.count, State.READY)
            while not store._session.connection.lock.locked():
                time.sleep(0.01)
            closing = threads.submit(buffer.close)
            try:
                closing.result(20)
            finally:
                os.kill(pid, signal.SIGCONT)
            with pytest.raises(Unavailable, match="does not answer"):
                call.result(20)
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--buffer-store", "sqlite:///x", "--buffer-dir", "d"], "must be a URL postgresql://"),
        (["--buffer-store", "postgresql:///x"], "--buffer-store requires --buffer-dir DIR or --buffer-payloads URL"),
        (["--standby", "--buffer-dir", "d"], "--standby requires --buffer-store URL"),
        (["--buffer-store", "postgresql://h/x?colour=red", "--buffer-dir", "d"], "that PostgreSQL's clients take"),
    ],
)
def test_wrong_settings_are_named(words, message, capsys):
    assert main(["serve", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_psycopg_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(NotAvailable, match=r'--buffer-store requires .* pip install "slime-buffer\[postgresql\]"'):
        serve(BufferSettings(buffer_store="postgresql:///x", buffer_dir=str(tmp_path)))


def test_a_commit_whose_answer_is_lost_keeps_its_samples(settings, postgres):
    """It took place, though the server cannot know: the repeated call finds it."""
    with closing(Buffer(BufferSettings(**settings))) as buffer:
        writer, _ = buffer.open_run("run", -1)
        buffer.add_prompts([b""], key="", dataset="")
        (leased,) = buffer.lease(writer, 1, ttl=60, wait=0, worker="w", caller=Caller())
        samples = list(map(sample_to_proto, finish(map(sample_from_proto, leased.samples))))
        connection = buffer.store._session.connection  # type: ignore[attr-defined]
        execute = connection.execute

        def answer_lost(query, *values):
            if query == "COMMIT":
                execute(query)
                postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
                return execute("SELECT 1")
            return execute(query, *values)

        connection.execute = answer_lost
        with pytest.raises(Unavailable, match="does not answer"):
            buffer.complete(writer, [HandedIn(leased.group.token or "", samples)])
        assert buffer.complete(writer, [HandedIn(leased.group.token or "", samples)]) == [True]
        assert buffer.seal(writer, 0, 1, wait=0, caller=Caller())
        assert len(list(buffer.read_step(0, [0], ""))) == 1


def test_a_connection_that_breaks_between_calls_is_made_again(settings, postgres):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        for number in range(3):
            postgres.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
            client.add_prompts([f"p{number}"], key=str(number))
        assert client.stats().groups["ready"] == 3


def test_text_that_the_database_cannot_hold_is_refused_by_name(settings):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        with pytest.raises(InvalidField, match="NUL"):
            client.add_prompts(["p"], key="a\0b")
        client.add_prompts(["p"], key="ab")
