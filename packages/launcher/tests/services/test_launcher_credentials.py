"""The credentials of a run: nobody without them is let in, and nothing that opens a door travels in plain text."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from slime.launcher.loops.services import Services
from slime.launcher.placement.plan import Placement
from slime.launcher.services.credentials import Authority, Identity, remove_access
from slime.types import errors
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.types.rpc.auth import read_token
from slime.types.rpc.roles import Role
from slime.v1 import buffer_pb2, buffer_pb2_grpc


class Stats(buffer_pb2_grpc.BufferServiceServicer):
    def GetStats(self, request: object, context: object) -> buffer_pb2.GetStatsResponse:
        return buffer_pb2.GetStatsResponse(next_step=3)


def serve(authority: Authority, host: str) -> RunningService:
    identity = Identity()
    grant = pickle.loads(pickle.dumps(authority.grant(identity.public_key, host)))
    rpc = identity.accept(grant, RpcSettings(host=host))
    add = buffer_pb2_grpc.add_BufferServiceServicer_to_server
    return RunningService(Server([(add, Stats())], rpc, service_names=["slime.v1.BufferService"]))


@pytest.fixture(params=[False, True], ids=["one-node", "several-nodes"])
def authority(request: pytest.FixtureRequest) -> Iterator[Authority]:
    authority = Authority(several_nodes=request.param)
    yield authority
    authority.close()


def test_the_services_of_a_run_let_in_its_launcher_and_nobody_else(authority: Authority) -> None:
    stranger = Authority(several_nodes=authority.client_settings.tls_ca is not None)
    with serve(authority, "127.0.0.2") as service:
        with BufferClient(service.address, settings=authority.client_settings) as client:
            assert client.stats().next_step == 3
        with BufferClient(service.address, settings=stranger.client_settings) as client:
            with pytest.raises((errors.Unauthenticated, errors.Unavailable)):
                client.stats()


def test_what_the_launcher_sends_to_a_service_opens_nothing_for_who_reads_it(authority: Authority) -> None:
    identity, other = Identity(), Identity()
    grant = authority.grant(identity.public_key, "192.0.2.7")
    sent = pickle.dumps(grant) + identity.public_key
    assert authority.token.encode() not in sent and b"PRIVATE KEY" not in sent
    assert read_token(identity.accept(grant, RpcSettings())) == authority.token
    with pytest.raises(Exception, match="^$"):  # cryptography's InvalidTag
        other.accept(grant, RpcSettings())


def test_on_several_nodes_the_token_travels_through_tls_only(tmp_path: Path) -> None:
    authority = Authority(several_nodes=True)
    with serve(authority, "127.0.0.2") as service, grpc.insecure_channel(service.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            buffer_pb2_grpc.BufferServiceStub(channel).GetStats(buffer_pb2.GetStatsRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        # A certificate is of one host.
        wrong = RpcSettings(tls_ca=authority.client_settings.tls_ca, retry_seconds=0)
        port = service.address.rpartition(":")[2]
        with BufferClient(f"127.0.0.1:{port}", settings=wrong) as client, pytest.raises(errors.Unavailable):
            client.stats()


def test_the_credentials_of_a_process_are_on_no_disk_and_closed_to_others(authority: Authority) -> None:
    identity = Identity()
    rpc = identity.accept(authority.grant(identity.public_key, "127.0.0.2"), RpcSettings())
    for path in filter(None, (rpc.token_file, rpc.tls_key, rpc.tls_cert, rpc.tls_ca)):
        assert os.readlink(path).startswith("/memfd:") and os.stat(path).st_mode & 0o077 == 0


def test_without_files_in_memory_credentials_are_private_files_that_end_with_the_process(tmp_path: Path) -> None:
    program = (
        "import os, sys; vars(os).pop('memfd_create', None)\n"
        "from slime.launcher.services.credentials import in_memory\n"
        "path = in_memory('token', b'secret'); print(path, open(path).read(), oct(os.stat(path).st_mode), flush=True)\n"
        "if sys.argv[1] == 'killed': os.kill(os.getpid(), 9)"
    )
    for end in ("killed", "ends"):  # the second one also removes what the first one left
        words = [sys.executable, "-c", program, end]
        done = subprocess.run(
            words, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=60
        )
        path, content, mode = done.stdout.split()
        assert (content, mode) == ("secret", "0o100600"), done.stderr
        assert Path(path).exists() == (end == "killed") and Path(path).is_relative_to(tmp_path)
        assert {each.stat().st_mode & 0o777 for each in tmp_path.iterdir()} <= {0o700}
    assert list(tmp_path.iterdir()) == []


def test_clients_of_the_user_find_a_token_for_each_role(authority: Authority, tmp_path: Path) -> None:
    directory = tmp_path / "access"
    with serve(authority, "127.0.0.2") as service:
        authority.write(directory, {"buffer": service.address})
        ca = str(directory / "ca.pem") if authority.client_settings.tls_ca else None
        address = json.loads((directory / "addresses.json").read_text())["buffer"]
        for role in Role:
            settings = RpcSettings(token_file=str(directory / f"{role}.token"), tls_ca=ca)
            with BufferClient(address, settings=settings) as client:
                assert client.stats().next_step == 3
                if role is not Role.TRAIN:
                    with pytest.raises(errors.PermissionDenied):
                        client.open_run("run")
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert not any(authority.token in path.read_text() for path in directory.iterdir())
    authority.close()
    assert not directory.exists()


def test_where_others_could_read_them_no_tokens_are_left(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "access"
    directory.mkdir(mode=0o755)
    authority.write(directory, {})
    assert list(directory.iterdir()) == [] and "only this user can read" in caplog.text


def test_tokens_of_a_run_that_was_killed_are_gone_at_the_next_start(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority.write(tmp_path / "access", {"buffer": "127.0.0.1:1"})
    (tmp_path / "access" / ".feed.token.1a2b3c4d").touch()

    def start(*_: object) -> None:
        assert not (tmp_path / "access").exists()
        raise errors.Unavailable("as far as this test goes")

    monkeypatch.setattr("slime.launcher.loops.services.start_services", start)
    numbers = dict(start_timeout_seconds=1.0, rollout_engine_start_seconds=1.0, stop_grace_seconds=1.0)
    settings = SimpleNamespace(**numbers, use_fault_tolerance=False, log_samples=1)
    config: Any = SimpleNamespace(launcher=settings, rollout=settings, trainer=settings, flat={})
    with pytest.raises(errors.Unavailable), Services(config, Placement(1), tmp_path, lambda *_: None):
        pass


def test_removing_tokens_leaves_what_others_have_put_there(tmp_path: Path) -> None:
    directory = tmp_path / "access"
    remove_access(directory)
    directory.mkdir()
    (directory / "feed.token").touch()
    (directory / "notes.txt").touch()
    remove_access(directory)
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    (tmp_path / "link").symlink_to(directory)
    (directory / "read.token").touch()
    remove_access(tmp_path / "link")
    assert (directory / "read.token").exists()
