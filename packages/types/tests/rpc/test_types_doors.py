"""Access to a service: which token permits which calls, where tokens lie, and what is never sent in plain text."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from slime.types import errors
from slime.types.clients import BufferClient
from slime.types.rpc import RpcSettings, RunningService, Server, connect, token_files
from slime.types.rpc.roles import CALLERS, Role, role_token
from slime.v1 import buffer_pb2, buffer_pb2_grpc, rollout_pb2, trainer_pb2

FILES = (buffer_pb2, rollout_pb2, trainer_pb2)
METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
NAME = "slime.v1.BufferService"
# Imports come first: the interpreter's own files may be closed to another user.
STRANGER = """
import os, sys, grpc, encodings.idna
address, directory = sys.argv[1:]
call = grpc.insecure_channel(address).unary_unary("/slime.v1.BufferService/GetStats")
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    call(b"", timeout=20)
    print("let in")
except grpc.RpcError as error:
    print(error.code().name)
try:
    print(os.listdir(directory))
except PermissionError:
    print("no look")
"""


class Stats(buffer_pb2_grpc.BufferServiceServicer):
    def GetStats(self, request: object, context: object) -> buffer_pb2.GetStatsResponse:
        return buffer_pb2.GetStatsResponse(next_step=3)

    def AddPrompts(self, requests: object, context: object) -> buffer_pb2.AddPromptsResponse:
        return buffer_pb2.AddPromptsResponse(added=1)


def serve(settings: RpcSettings | None = None) -> RunningService:
    add = buffer_pb2_grpc.add_BufferServiceServicer_to_server
    return RunningService(Server([(add, Stats())], settings or RpcSettings(), service_names=[NAME]))


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "slime"


@pytest.fixture
def service() -> Iterator[RunningService]:
    with serve() as service:
        yield service


def token_of(service: RunningService) -> str:
    assert service.token_file is not None
    return service.token_file.read_text().strip()


def written(path: Path, token: str) -> RpcSettings:
    token_files.write_private(path, token)
    return RpcSettings(token_file=str(path))


@pytest.mark.parametrize("method", METHODS)
def test_every_call_says_who_may_make_it(method: str) -> None:
    assert CALLERS[method] and CALLERS[method] <= set(Role)


def test_no_call_is_declared_that_there_is_not() -> None:
    assert set(CALLERS) == set(METHODS)


def test_who_feeds_prompts_can_do_nothing_else() -> None:
    fed = {method for method, roles in CALLERS.items() if Role.FEED in roles}
    assert fed == {"/slime.v1.BufferService/AddPrompts", "/slime.v1.BufferService/GetStats"}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("role", Role)
def test_the_token_of_a_role_opens_its_calls_only(
    service: RunningService, tmp_path: Path, role: Role, method: str
) -> None:
    # Bytes that are not a message: the test asks whether the call is permitted, not what it answers.
    if not method.startswith(f"/{NAME}/"):
        assert CALLERS[method] - {Role.FEED}
        return
    with connect(service.address, written(tmp_path / "token", role_token(token_of(service), role))) as channel:
        call = channel.stream_stream(method)
        try:
            list(call(iter([b""]), timeout=60))
            refused = False
        except errors.PermissionDenied as error:
            assert f"a token for {role} may not call {method}" in str(error)
            refused = True
        except errors.SlimeError:
            refused = False
    assert refused == (role not in CALLERS[method])


def test_a_service_on_the_loopback_has_a_token_that_its_user_finds(service: RunningService, runtime: Path) -> None:
    with BufferClient(service.address) as client:
        assert client.stats().next_step == 3
    with BufferClient(service.address.replace("127.0.0.1", "localhost")) as client:
        assert client.stats().next_step == 3
    path = service.token_file
    assert path is not None and path.parent == runtime and path.name == service.address
    assert path.stat().st_mode & 0o777 == 0o600 and runtime.stat().st_mode & 0o777 == 0o700
    service.stop()
    assert not path.exists()


def test_without_a_token_only_health_answers(service: RunningService) -> None:
    with grpc.insecure_channel(service.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            buffer_pb2_grpc.BufferServiceStub(channel).GetStats(buffer_pb2.GetStatsRequest(), timeout=60)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError) as caught:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=60)
        assert check.status == health_pb2.HealthCheckResponse.SERVING


def test_an_open_service_has_no_reflection() -> None:
    with serve(RpcSettings(insecure=True)) as service, grpc.insecure_channel(service.address) as channel:
        assert service.token_file is None
        assert buffer_pb2_grpc.BufferServiceStub(channel).GetStats(buffer_pb2.GetStatsRequest()).next_step == 3
        with pytest.raises(grpc.RpcError) as caught:
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_a_client_follows_a_service_that_starts_anew_with_another_token() -> None:
    with serve() as service, BufferClient(service.address) as client:
        assert client.stats().next_step == 3
        port = int(service.address.rpartition(":")[2])
        service.stop()
        with serve(RpcSettings(port=port)):
            assert client.stats().next_step == 3
        # Without a key, prompts are sent once: a call with the token that was kept would be refused.
        with serve(RpcSettings(port=port)):
            assert client.add_prompts(["p"]).added == 1


def test_the_file_with_a_token_is_read_again_only_where_a_service_refuses_it(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    find = token_files.find
    monkeypatch.setattr(token_files, "find", lambda address: found.append(address) or find(address))
    with BufferClient(service.address) as client:
        for _ in range(3):
            client.stats()
    assert found == [service.address]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_of_the_machine_is_not_let_in(service: RunningService, runtime: Path) -> None:
    command = [sys.executable, "-c", STRANGER, service.address, str(runtime)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["UNAUTHENTICATED", "no look"], done.stderr


def test_a_directory_of_tokens_that_others_can_read_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o755)
    with pytest.raises(errors.InvalidFile, match=r"slime is not a directory that only this user can read.*chmod 700"):
        serve()
    runtime.rmdir()
    runtime.symlink_to("/tmp")
    with pytest.raises(errors.InvalidFile, match="only this user"):
        serve()


def test_what_somebody_else_may_have_put_there_is_not_sent(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    token_files.write_private(runtime / "127.0.0.1:1", "s3cret")
    assert token_files.find("127.0.0.1:1") == token_files.find("localhost:1") == "s3cret"
    assert token_files.find("192.0.2.7:1") is None
    runtime.chmod(0o755)
    assert token_files.find("127.0.0.1:1") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directories_of_other_users_are_not_used(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    token_files.write_private(runtime / "127.0.0.1:1", "s3cret")
    os.chown(runtime, 65534, 65534)
    assert token_files.find("127.0.0.1:1") is None
    runtime.rename(runtime.with_name("other"))
    os.chown(runtime.parent, 65534, 65534)
    with serve() as service:
        assert service.token_file is not None and runtime not in service.token_file.parents
    os.chown(runtime.parent, 0, 0)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602])
def test_a_token_that_everybody_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "run.token"
    settings = written(path, "s3cret")
    path.chmod(mode)
    for use in (serve, lambda settings: connect("127.0.0.1:1", settings)):
        with pytest.raises(errors.InvalidFile, match=f"--token-file: .*run.token .mode 0{mode:o}.: chmod 600"):
            use(settings)


def test_a_token_that_the_group_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.token"
    settings = written(path, "s3cret")
    path.chmod(0o640)
    connect("127.0.0.1:1", settings).close()
    assert "run.token" in caplog.text and "0640" in caplog.text


@pytest.mark.parametrize("address", ["192.0.2.7:1", "somewhere.example:1", "[2001:db8::1]:1"])
def test_a_token_never_leaves_the_machine_in_plain_text(tmp_path: Path, address: str) -> None:
    settings = written(tmp_path / "token", "s3cret")
    with pytest.raises(errors.InvalidSetting, match=r"--token-file requires --tls-ca FILE to call ") as caught:
        connect(address, settings)
    assert address in str(caught.value)
    connect(address, RpcSettings(token_file=settings.token_file, insecure=True)).close()
    for here in ("127.0.0.1:1", "127.0.0.2:1", "localhost:1", "[::1]:1", "unix:/run/socket"):
        connect(here, settings).close()
