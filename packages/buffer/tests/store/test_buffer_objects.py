"""Samples in an object store: damage, outages, other buffers, settings."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest
from buffer_samples import complete, finish

from slime.buffer.cli import main
from slime.buffer.service import serve
from slime.buffer.settings import BufferSettings
from slime.buffer.store.blobs import FilePayloads
from slime.buffer.store.objects import UPLOADED_TOGETHER, ObjectPayloads
from slime.types.clients import BufferClient
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable, OutOfSpace, Unavailable
from slime.types.rpc import RpcSettings

BUCKET = "samples"


@pytest.fixture
def settings(new_prefix: Callable[[], str], tmp_path: Path) -> dict[str, Any]:
    """State in SQLite: these tests do not depend on the database."""
    return {"buffer_payloads": new_prefix(), "buffer_dir": str(tmp_path / "state")}


@pytest.fixture
def keys(settings: dict[str, Any]) -> Callable[[str], list[str]]:
    prefix = settings["buffer_payloads"].rpartition("/")[2]

    def keys(below: str) -> list[str]:
        found = boto3.client("s3").list_objects_v2(Bucket=BUCKET, Prefix=f"{prefix}/{below}/")
        return [item["Key"] for item in found.get("Contents", ())]

    return keys


def cut(key: str) -> None:
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=b"0123456789")


def flip(key: str) -> None:
    data = bytearray(boto3.client("s3").get_object(Bucket=BUCKET, Key=key)["Body"].read())
    data[len(data) // 2] ^= 4
    boto3.client("s3").put_object(Bucket=BUCKET, Key=key, Body=bytes(data))


def delete(key: str) -> None:
    boto3.client("s3").delete_object(Bucket=BUCKET, Key=key)


@pytest.mark.parametrize("damage", [cut, flip, delete])
def test_a_damaged_object_costs_its_group_and_the_run_goes_on(settings, keys, damage):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts([f"p{number}" for number in range(5)])
        complete(client, 4)
        client.seal_step(0, 2)
        (lease,) = client.lease_groups(1)
        client.return_group(lease.token, finish(lease.group.samples))
    assert len(keys("payloads")) == 5
    damage(keys("payloads")[0])
    damage(keys("payloads")[-1])
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        assert client.stats().damaged_payloads == 2
        assert [s.group_index for s in client.seal_step(0, 2)] == [1, 2]
        assert [s.response for s in client.read_step(0, [1, 0])] == ["345", "345"]
        # A waiting group starts again from its prompt.
        (lease,) = client.lease_groups(1)
        assert (lease.group.group_index, lease.group.samples[0].response) == (4, "")


def test_an_outage_is_no_damage(settings, keys, monkeypatch):
    patient = RpcSettings(retry_seconds=0)
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address, settings=patient) as client:
        client.open_run("run")
        client.add_prompts(["a", "b"])
        complete(client, 1)
        (lease,) = client.lease_groups(1)
        client.seal_step(0, 1)
        bucket, service.buffer.payloads._bucket = service.buffer.payloads._bucket, "another"
        for call in (
            lambda: list(client.read_step(0, [0])),
            lambda: client.complete_group(lease.token, finish(lease.group.samples)),
        ):
            with pytest.raises(Unavailable, match="does not answer: .*NoSuchBucket"):
                call()
        service.buffer.payloads._bucket = bucket
        assert len(list(client.read_step(0, [0]))) == 1
        assert client.complete_group(lease.token, finish(lease.group.samples)) is False
        assert client.stats().damaged_payloads == 0 and len(keys("payloads")) == 2


def test_strays_of_a_crash_are_kept_aside(settings, keys):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts(["a"])
        complete(client, 1)
        service.buffer.payloads.write([(0, [b"of a crash"])])
    before = keys("payloads")
    with serve(BufferSettings(**settings)):
        (kept,), (aside,) = keys("payloads"), keys("lost+found")
    assert len(before) == 2 and kept in before and aside.replace("lost+found", "payloads") in before


def test_samples_of_another_buffer_or_without_their_database_are_an_error(settings, keys, tmp_path):
    with serve(BufferSettings(**settings)) as service, BufferClient(service.address) as client:
        client.open_run("run")
        client.add_prompts(["a"])
        complete(client, 1)
    with pytest.raises(InvalidFile, match="restore the database"):
        serve(BufferSettings(**settings | {"buffer_dir": str(tmp_path / "empty")}))
    other = {"buffer_dir": str(tmp_path / "other")}
    serve(BufferSettings(**other)).stop()
    with pytest.raises(InvalidFile, match="the samples in s3://samples/run-.* are not those of"):
        serve(BufferSettings(**settings | other))
    assert len(keys("payloads")) == 1 and not keys("lost+found")


def test_a_place_without_samples_yet_is_that_of_the_first_database(settings, tmp_path, capsys):
    serve(BufferSettings(**settings)).stop()
    other = settings | {"buffer_dir": str(tmp_path / "other")}
    with pytest.raises(InvalidFile, match="are not those of .*payloads-of"):
        serve(BufferSettings(**other))
    flags = [word for name, value in other.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert main(["check", *flags]) == 2 and "payloads-of" in capsys.readouterr().err
    serve(BufferSettings(**settings)).stop()


def test_of_two_databases_that_claim_a_place_at_once_one_has_it(settings, tmp_path, monkeypatch):
    other = settings | {"buffer_dir": str(tmp_path / "other")}
    read = ObjectPayloads.owner

    def claimed_meanwhile(payloads: ObjectPayloads) -> str | None:
        monkeypatch.setattr(ObjectPayloads, "owner", read)
        owner = payloads.owner()
        serve(BufferSettings(**settings)).stop()
        return owner

    monkeypatch.setattr(ObjectPayloads, "owner", claimed_meanwhile)
    with pytest.raises(InvalidFile, match="are not those of .*payloads-of"):
        serve(BufferSettings(**other))
    serve(BufferSettings(**settings)).stop()
    files = FilePayloads(tmp_path / "files" / "payloads")
    for owner in ("first", "second"):
        files.claim(owner)
    assert files.owner() == "first"


def test_a_store_without_conditional_writes_is_claimed_all_the_same(settings, monkeypatch):
    payloads = ObjectPayloads(settings["buffer_payloads"])
    put = payloads._client.put_object

    def plain(**arguments: Any) -> Any:
        if "IfNoneMatch" in arguments:
            refusal = {"Error": {"Code": "NotImplemented", "Message": "If-None-Match"}}
            raise payloads._client.exceptions.ClientError(refusal, "PutObject")
        return put(**arguments)

    monkeypatch.setattr(payloads._client, "put_object", plain)
    payloads.claim("first")
    assert payloads.owner() == "first"


def test_a_bucket_or_credentials_that_are_not_there_are_an_error_at_once(settings, tmp_path, monkeypatch):
    with pytest.raises(InvalidSetting, match="--buffer-payloads s3://none/x: .*Not Found"):
        serve(BufferSettings(**settings | {"buffer_payloads": "s3://none/x"}))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(InvalidSetting, match="Unable to locate credentials; .* AWS_ACCESS_KEY_ID"):
        serve(BufferSettings(**settings))


def test_without_boto3_the_error_names_the_extra(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(NotAvailable, match=r'--buffer-payloads requires .* pip install "slime-buffer\[s3\]"'):
        serve(BufferSettings(**settings))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--buffer-payloads", "s3://b/p"], "--buffer-payloads requires --buffer-dir DIR or --buffer-store URL"),
        (["--buffer-payloads", "/tmp/x", "--buffer-dir", "d"], "--buffer-payloads must be a URL s3://BUCKET[/PREFIX]"),
        (["--buffer-payloads", "s3://", "--buffer-dir", "d"], "--buffer-payloads must be a URL s3://BUCKET[/PREFIX]"),
        (["--buffer-payloads", "s3://key:s3cret@b/p", "--buffer-dir", "d"], "--buffer-payloads must hold no password"),
    ],
)
def test_wrong_settings_are_named(words, message, capsys):
    assert main(["serve", *words]) == 2
    shown = capsys.readouterr().err
    assert message in shown and "s3cret" not in shown


@pytest.mark.parametrize(("status", "error", "left"), [(507, OutOfSpace, 1), (503, Unavailable, 3)])
def test_a_call_that_is_not_stored_whole_leaves_nothing_behind_a_full_store(
    settings, keys, monkeypatch, status, error, left
):
    """A store that does not answer is asked for nothing more; what is left there is set aside at the next start."""
    with serve(BufferSettings(**settings)) as service:
        payloads = service.buffer.payloads
        (kept,) = payloads.write([(0, [b"kept"])])
        put = payloads._client.put_object

        def full(**arguments: Any) -> Any:
            if arguments["Body"] == b"c":
                refusal = {"Error": {"Code": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
                raise payloads._client.exceptions.ClientError(refusal, "PutObject")
            return put(**arguments)

        monkeypatch.setattr(payloads._client, "put_object", full)
        with pytest.raises(error):
            payloads.write([(1, [b"a"]), (2, [b"c"]), (3, [b"d"])])
        assert len(keys("payloads")) == left and any(key.endswith(kept) for key in keys("payloads"))


def test_the_objects_of_a_call_are_uploaded_at_the_same_time(settings, monkeypatch):
    with serve(BufferSettings(**settings)) as service:
        payloads = service.buffer.payloads
        put, together = payloads._client.put_object, threading.Barrier(UPLOADED_TOGETHER, timeout=60)

        def wait(**arguments: Any) -> Any:
            together.wait()
            return put(**arguments)

        monkeypatch.setattr(payloads._client, "put_object", wait)
        names = payloads.write([(number, [b"%d" % number]) for number in range(UPLOADED_TOGETHER)])
        assert [payloads.read(name, [(0, payloads.size(name))]) for name in names] == [
            [b"%d" % number] for number in range(UPLOADED_TOGETHER)
        ]


def test_samples_that_were_moved_from_files_with_several_groups_are_refused(settings):
    with serve(BufferSettings(**settings)) as service:
        payloads = service.buffer.payloads
        payloads.track({"000000/0000000001-0123abcd"})
        with pytest.raises(InvalidFile, match="000000/0000000001-0123abcd@1.4.7 share a file with others: s3://"):
            payloads.track({"000000/0000000001-0123abcd@1.4.7"})
