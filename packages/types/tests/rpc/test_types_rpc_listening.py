"""Servers that listen: ports, addresses, TLS, token, health and reflection."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from slime.types import errors
from slime.types.rpc import RpcSettings, RunningService, Server, connect
from slime.v1 import buffer_pb2, buffer_pb2_grpc

NAME = "slime.v1.BufferService"


class Answering(buffer_pb2_grpc.BufferServiceServicer):
    """Answers a call of each kind: one message, a stream of answers, a stream of requests."""

    def GetStats(self, request: Any, context: Any) -> buffer_pb2.GetStatsResponse:
        return buffer_pb2.GetStatsResponse(next_step=3)

    def LeaseGroups(self, request: Any, context: Any) -> Iterator[buffer_pb2.LeaseGroupsResponse]:
        yield from (buffer_pb2.LeaseGroupsResponse() for _ in range(2))

    def CompleteGroup(self, requests: Any, context: Any) -> buffer_pb2.CompleteGroupResponse:
        list(requests)
        return buffer_pb2.CompleteGroupResponse()


def serve(settings: RpcSettings) -> RunningService:
    add = buffer_pb2_grpc.add_BufferServiceServicer_to_server
    return RunningService(Server([(add, Answering())], settings, service_names=[NAME]))


def get_stats(stub: Any) -> Any:
    return stub.GetStats(buffer_pb2.GetStatsRequest())


@pytest.fixture
def address() -> Iterator[str]:
    with serve(RpcSettings()) as service:
        yield service.address


def test_a_port_in_use_is_named(address: str) -> None:
    port = int(address.rsplit(":", 1)[1])
    closed: list[bool] = []
    with pytest.raises(errors.PortInUse, match=str(port)):
        serve(RpcSettings(port=port))
    with pytest.raises(errors.PortInUse):
        RunningService(Server([], RpcSettings(port=port), service_names=[]), close=lambda: closed.append(True))
    assert closed == [True]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (RpcSettings(host="0.0.0.0"), "--host 0.0.0.0.*--tls-cert"),
        (RpcSettings(host="0.0.0.0", token_file="t"), "--insecure"),
        (RpcSettings(tls_cert="c"), "--tls-cert requires --tls-key FILE"),
        (RpcSettings(token_file="nowhere"), "--token-file: no such file nowhere"),
        (RpcSettings(host="192.0.2.1", insecure=True), "192.0.2.1"),
    ],
)
def test_unsafe_or_impossible_listening_is_refused(settings: RpcSettings, words: str) -> None:
    with pytest.raises(errors.ConfigError, match=words):
        serve(settings)


def test_insecure_is_a_choice() -> None:
    with serve(RpcSettings(host="0.0.0.0", insecure=True)) as service:
        port = service.address.rsplit(":", 1)[1]
        with connect(f"127.0.0.1:{port}") as channel:
            assert get_stats(buffer_pb2_grpc.BufferServiceStub(channel)).next_step == 3


@pytest.fixture
def secured(tmp_path: Path) -> dict[str, str]:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    files = {name: str(tmp_path / name) for name in ("cert", "key", "ca", "token", "other")}
    certificate.private_key_pem.write_to_path(files["key"])
    certificate.cert_chain_pems[0].write_to_path(files["cert"])
    authority.cert_pem.write_to_path(files["ca"])
    Path(files["token"]).write_text("s3cret\n")
    Path(files["other"]).write_text("guess\n")
    for name in ("key", "token", "other"):
        Path(files[name]).chmod(0o600)
    return files


def test_tls_and_token(secured: dict[str, str]) -> None:
    settings = RpcSettings(tls_cert=secured["cert"], tls_key=secured["key"], token_file=secured["token"])
    with serve(settings) as service:
        with connect(service.address, RpcSettings(tls_ca=secured["ca"], token_file=secured["token"])) as channel:
            stub = buffer_pb2_grpc.BufferServiceStub(channel)
            assert get_stats(stub).next_step == 3
            assert len(list(stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest()))) == 2
            stub.CompleteGroup([])
        for token_file in (None, secured["other"]):
            with connect(service.address, RpcSettings(tls_ca=secured["ca"], token_file=token_file)) as channel:
                stub = buffer_pb2_grpc.BufferServiceStub(channel)
                for call in (
                    lambda s=stub: get_stats(s),
                    lambda s=stub: list(s.LeaseGroups(buffer_pb2.LeaseGroupsRequest())),
                    lambda s=stub: s.CompleteGroup([]),
                ):
                    with pytest.raises(errors.Unauthenticated, match="token"):
                        call()
                # Probes need no token.
                check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=NAME))
                assert check.status == health_pb2.HealthCheckResponse.SERVING
        with connect(service.address, RpcSettings(token_file=secured["token"], retry_seconds=0)) as channel:
            with pytest.raises(errors.Unavailable):
                get_stats(buffer_pb2_grpc.BufferServiceStub(channel))


def test_health_and_reflection(address: str) -> None:
    with connect(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(errors.NotFound):
            health.Check(health_pb2.HealthCheckRequest(service="nothing"))
        database = ProtoReflectionDescriptorDatabase(channel)
        assert NAME in database.get_services()
        service = DescriptorPool(database).FindServiceByName(NAME)
        assert {"AddPrompts", "ReadStep"} <= {method.name for method in service.methods}
