"""Servers and channels over loopback: errors, deadlines, retries, limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from slime.types import errors
from slime.types.clients.buffer_records import chunks
from slime.types.codec import decode_sample, encode_sample
from slime.types.rpc import Cancelled, MessageTooLarge, RpcSettings, RunningService, Server, connect
from slime.types.rpc.channel import RECONNECT_MS
from slime.types.rpc.retry import Repeatable
from slime.types.sample import Sample
from slime.v1 import buffer_pb2, buffer_pb2_grpc

NAME = "slime.v1.BufferService"
WAIT = 10.0


class Scripted(buffer_pb2_grpc.BufferServiceServicer):
    """Answers every call with what `script` does, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0
        self.received: list[Any] = []
        self.script: Callable[[int, grpc.ServicerContext], None] = lambda call, context: None

    def _run(self, context: grpc.ServicerContext) -> None:
        self.calls += 1
        self.script(self.calls, context)

    def GetStats(self, request: Any, context: Any) -> buffer_pb2.GetStatsResponse:
        self._run(context)
        return buffer_pb2.GetStatsResponse(next_step=3)

    def StorePlan(self, request: Any, context: Any) -> buffer_pb2.StorePlanResponse:
        return buffer_pb2.StorePlanResponse(plan_json=request.plan_json)

    def LeaseGroups(self, request: Any, context: Any) -> Iterator[buffer_pb2.LeaseGroupsResponse]:
        if request.max_groups == 0:
            self._run(context)
        yield buffer_pb2.LeaseGroupsResponse()
        if request.max_groups == 1:
            self._run(context)
        yield buffer_pb2.LeaseGroupsResponse()

    def CompleteGroup(self, requests: Any, context: Any) -> buffer_pb2.CompleteGroupResponse:
        self.received = list(requests)
        self._run(context)
        return buffer_pb2.CompleteGroupResponse()


def serve(servicer: Scripted, settings: RpcSettings | None = None) -> RunningService:
    add = buffer_pb2_grpc.add_BufferServiceServicer_to_server
    return RunningService(Server([(add, servicer)], settings or RpcSettings(), service_names=[NAME]))


@pytest.fixture
def servicer() -> Scripted:
    return Scripted()


@pytest.fixture
def address(servicer: Scripted) -> Iterator[str]:
    with serve(servicer) as service:
        yield service.address


@pytest.fixture
def stub(address: str) -> Iterator[buffer_pb2_grpc.BufferServiceStub]:
    with connect(address) as channel:
        yield buffer_pb2_grpc.BufferServiceStub(channel)


def get_stats(stub: Any, **keywords: Any) -> Any:
    return stub.GetStats(buffer_pb2.GetStatsRequest(), **keywords)


def raising(error: Exception) -> Callable[[int, Any], None]:
    def script(call: int, context: Any) -> None:
        raise error

    return script


KINDS = [
    errors.InvalidField("samples[3].loss_mask", 7, "0 or 1"),
    *(
        cls("what was wrong: ü", field="f", value="v", expected="e")
        for name, cls in sorted(errors.error_classes().items())
        if cls.__module__ == errors.__name__
        and cls not in (errors.InvalidField, errors.Unavailable, errors.PortInUse, errors.Busy)
    ),
]


@pytest.mark.parametrize("error", KINDS, ids=lambda e: type(e).__name__)
def test_an_error_arrives_as_what_it_was(servicer: Scripted, stub: Any, error: errors.SlimeError) -> None:
    servicer.script = raising(error)
    calls = [
        lambda: get_stats(stub),
        lambda: list(stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest(max_groups=1))),
        lambda: stub.CompleteGroup([buffer_pb2.CompleteGroupRequest()]),
    ]
    for call in calls:
        with pytest.raises(errors.SlimeError) as caught:
            call()
        got = caught.value
        assert type(got) is type(error)
        assert (got.message, got.field, got.value, got.expected) == (
            error.message,
            error.field,
            error.value,
            error.expected,
        )
    assert servicer.calls == len(calls)


def test_a_foreign_client_reads_the_status_and_the_detail(servicer: Scripted) -> None:
    servicer.script = raising(errors.LeaseLost("lost", field="lease_token", value="x"))
    with serve(servicer) as service, grpc.insecure_channel(service.address) as channel:
        assert service.token_file is not None
        token = ("authorization", f"Bearer {service.token_file.read_text().strip()}")
        with pytest.raises(grpc.RpcError) as caught:
            get_stats(buffer_pb2_grpc.BufferServiceStub(channel), timeout=WAIT, metadata=[token])
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION and caught.value.details() == "lost"
    assert "slime-error-bin" in dict(caught.value.trailing_metadata())


def test_an_unexpected_exception_keeps_its_traceback_to_itself(servicer: Scripted, stub: Any, caplog: Any) -> None:
    servicer.script = raising(KeyError("colour"))
    with pytest.raises(errors.RemoteError, match="KeyError: 'colour'") as caught:
        get_stats(stub)
    assert "Traceback" not in caught.value.message
    assert "Traceback" in caplog.text
    # Code outside of slime and of libraries stands for a plug-in: the error names its place.
    assert f"({Path(__file__).name}, line " in caught.value.message


def test_long_messages_of_any_script_fit(servicer: Scripted, stub: Any) -> None:
    for text in ("x" * 50_000, "語" * 50_000, "\ud800" * 9):
        servicer.script = raising(errors.EngineError(text, field=text, value=text, expected=text))
        with pytest.raises(errors.EngineError) as caught:
            get_stats(stub)
        assert caught.value.message.startswith(text[0].encode("utf-8", "backslashreplace").decode())


def test_what_has_begun_or_cannot_be_made_again_is_not_repeated(servicer: Scripted, stub: Any) -> None:
    def twice(call: int, context: grpc.ServicerContext) -> None:
        if call < 3:
            raise errors.Unavailable("not yet")

    servicer.script = twice
    assert get_stats(stub).next_step == 3 and servicer.calls == 3

    servicer.calls = 0
    assert len(list(stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest(max_groups=0)))) == 2 and servicer.calls == 3

    messages = [buffer_pb2.CompleteGroupRequest(lease_token="t"), buffer_pb2.CompleteGroupRequest(commit=True)]
    for request in (messages, Repeatable(lambda: (m for m in messages))):
        servicer.calls = 0
        stub.CompleteGroup(request)
        assert servicer.calls == 3 and servicer.received == messages

    servicer.calls = 0
    with pytest.raises(errors.Unavailable):
        stub.CompleteGroup(iter(messages))
    assert servicer.calls == 1

    servicer.calls = 0
    stream = stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest(max_groups=1))
    next(stream)
    with pytest.raises(errors.Unavailable):
        next(stream)
    assert servicer.calls == 1


def test_a_busy_server_is_called_again_and_a_full_disk_is_not(servicer: Scripted, stub: Any, address: str) -> None:
    def script(error: errors.SlimeError) -> None:
        def twice(call: int, context: grpc.ServicerContext) -> None:
            if call < 3:
                raise error

        servicer.calls, servicer.script = 0, twice

    script(errors.Busy("16 calls run already"))
    assert get_stats(stub).next_step == 3 and servicer.calls == 3
    script(errors.Busy("16 calls run already"))
    stub.CompleteGroup([buffer_pb2.CompleteGroupRequest(commit=True)])
    assert servicer.calls == 3
    servicer.script = raising(errors.Busy("16 calls run already", field="calls"))
    with connect(address, RpcSettings(retry_seconds=0.1)) as channel, pytest.raises(errors.Busy, match="16 "):
        get_stats(buffer_pb2_grpc.BufferServiceStub(channel))
    script(errors.OutOfSpace("no space left"))
    with pytest.raises(errors.OutOfSpace):
        get_stats(stub)
    assert servicer.calls == 1


def test_repeating_ends_with_the_deadline_or_its_own_limit(servicer: Scripted, address: str) -> None:
    servicer.script = raising(errors.Unavailable("gone"))
    for settings, timeout in ((RpcSettings(retry_seconds=1), None), (RpcSettings(), 1)):
        servicer.calls = 0
        started = time.monotonic()
        with connect(address, settings) as channel, pytest.raises(errors.Unavailable):
            get_stats(buffer_pb2_grpc.BufferServiceStub(channel), timeout=timeout)
        assert servicer.calls > 1 and time.monotonic() - started < WAIT


def test_a_server_that_starts_late_is_reached(servicer: Scripted) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    answers: list[Any] = []
    with connect(f"127.0.0.1:{port}", RpcSettings(retry_seconds=WAIT)) as channel:
        caller = threading.Thread(target=lambda: answers.append(get_stats(buffer_pb2_grpc.BufferServiceStub(channel))))
        caller.start()
        with serve(servicer, RpcSettings(port=port)):
            caller.join(WAIT)
    assert len(answers) == 1


def test_a_server_whose_greeting_takes_seconds_is_reached(servicer: Scripted, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-of-this-test")
    (tmp_path / "token").chmod(0o600)
    settings = RpcSettings(token_file=str(tmp_path / "token"), retry_seconds=0)
    with serve(servicer, settings) as service, socket.create_server(("127.0.0.1", 0)) as door:

        def relay() -> None:
            client, _ = door.accept()
            with client, socket.create_connection(("127.0.0.1", int(service.address.rsplit(":", 1)[1]))) as server:
                client_left = threading.Event()
                threading.Thread(target=pass_on, args=(client, server, client_left)).start()
                client_left.wait(2 * RECONNECT_MS[1] / 1000)
                pass_on(server, client, client_left)

        relaying = threading.Thread(target=relay)
        relaying.start()
        with connect(f"127.0.0.1:{door.getsockname()[1]}", settings) as channel:
            get_stats(buffer_pb2_grpc.BufferServiceStub(channel))
        relaying.join(WAIT)
    assert servicer.calls == 1


def pass_on(sender: socket.socket, receiver: socket.socket, ended: threading.Event) -> None:
    with suppress(OSError):
        while data := sender.recv(1 << 16):
            receiver.sendall(data)
        receiver.shutdown(socket.SHUT_WR)
    ended.set()


def test_every_call_has_a_deadline(servicer: Scripted, address: str) -> None:
    over = threading.Event()
    remaining: list[float] = []

    def stall(call: int, context: grpc.ServicerContext) -> None:
        remaining.append(context.time_remaining())
        over.wait(WAIT)

    servicer.script = stall
    with connect(address, RpcSettings(call_timeout_seconds=1.0)) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        for call in (
            lambda: get_stats(stub),
            lambda: list(stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest(max_groups=1))),
            lambda: stub.CompleteGroup([]),
        ):
            with pytest.raises(errors.DeadlineExceeded, match="no answer within 1 s"):
                call()
    over.set()
    assert len(remaining) == 3 and all(0 < seconds < 1.1 for seconds in remaining)


def test_cancelling_a_stream_reaches_the_server(servicer: Scripted, stub: Any) -> None:
    stalled, cancelled = threading.Event(), threading.Event()

    def stall(call: int, context: grpc.ServicerContext) -> None:
        context.add_callback(cancelled.set)
        stalled.set()
        cancelled.wait(WAIT)

    servicer.script = stall
    stream = stub.LeaseGroups(buffer_pb2.LeaseGroupsRequest(max_groups=1))
    next(stream)
    assert stalled.wait(WAIT)
    stream.cancel()
    with pytest.raises(Cancelled):
        next(stream)
    assert cancelled.wait(WAIT)


def test_a_message_beyond_the_limit_is_named(address: str) -> None:
    request = buffer_pb2.StorePlanRequest(plan_json="x" * (3 << 20))
    with connect(address) as channel:
        assert len(buffer_pb2_grpc.BufferServiceStub(channel).StorePlan(request).plan_json) == 3 << 20
    with connect(address, RpcSettings(max_message_mb=2)) as channel:
        with pytest.raises(MessageTooLarge, match="StorePlan"):
            buffer_pb2_grpc.BufferServiceStub(channel).StorePlan(request)
    with serve(Scripted(), RpcSettings(max_message_mb=2)) as service, connect(service.address) as channel:
        with pytest.raises(MessageTooLarge) as caught:
            buffer_pb2_grpc.BufferServiceStub(channel).StorePlan(request)
    assert caught.value.field == "--max-message-mb"


def test_stopping_lets_calls_end(servicer: Scripted) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(call: int, context: grpc.ServicerContext) -> None:
        entered.set()
        leave.wait(WAIT)

    servicer.script = hold
    service = serve(servicer)
    answers: list[Any] = []
    with connect(service.address, RpcSettings(retry_seconds=0)) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        caller = threading.Thread(target=lambda: answers.append(get_stats(stub)))
        caller.start()
        assert entered.wait(WAIT)
        with pytest.raises(errors.DeadlineExceeded):
            service.wait(0.01)
        stopper = threading.Thread(target=service.stop, args=(WAIT,))
        stopper.start()
        leave.set()
        for thread in (caller, stopper):
            thread.join(WAIT)
        assert len(answers) == 1
        service.wait(WAIT)
        service.stop()
        with pytest.raises(errors.Unavailable):
            get_stats(stub)


def test_a_call_that_the_server_ends_is_unavailable(servicer: Scripted) -> None:
    entered, cancelled = threading.Event(), threading.Event()

    def hold(call: int, context: grpc.ServicerContext) -> None:
        context.add_callback(cancelled.set)
        entered.set()
        cancelled.wait(WAIT)

    servicer.script = hold
    service = serve(servicer)
    raised: list[Exception] = []

    def call() -> None:
        try:
            get_stats(stub)
        except errors.SlimeError as error:
            raised.append(error)

    with connect(service.address, RpcSettings(retry_seconds=0)) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        caller = threading.Thread(target=call)
        caller.start()
        assert entered.wait(WAIT)
        service.stop(grace_seconds=0)
        caller.join(WAIT)
    assert [type(error) for error in raised] == [errors.Unavailable]
    assert cancelled.wait(WAIT)


def test_samples_are_cut_into_messages_in_order() -> None:
    samples = [Sample(index=i, tokens=range(100 if i != 2 else 5000)) for i in range(6)]
    messages = list(chunks(map(encode_sample, samples), len, max_bytes=1000))
    assert [[decode_sample(encoded).index for encoded in each] for each in messages] == [[0, 1], [2], [3, 4], [5]]
    assert list(chunks([], len, max_bytes=1000)) == []


def test_bytes_that_are_no_message_are_the_fault_of_the_caller(address: str) -> None:
    for method in ("unary_unary/StorePlan", "unary_stream/LeaseGroups", "stream_unary/CompleteGroup"):
        kind, name = method.split("/")
        with connect(address) as channel, pytest.raises(errors.InvalidField, match="request: got bytes that cannot be"):
            call = getattr(channel, kind)(f"/{NAME}/{name}")
            answer = call(iter([b"\xff" * 9]) if kind == "stream_unary" else b"\xff" * 9)
            list(answer)
