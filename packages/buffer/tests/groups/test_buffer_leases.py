"""Leases over real gRPC: the samples that a worker may return, and no order of calls that loses or doubles a group."""

from __future__ import annotations

import grpc
import pytest
from buffer_samples import finish
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from slime.buffer.buffer import Buffer
from slime.buffer.service import serve_buffer
from slime.buffer.settings import BufferSettings
from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.codec import sample_to_proto
from slime.types.errors import DeadlineExceeded, InvalidField, LeaseLost
from slime.v1 import buffer_pb2, buffer_pb2_grpc

# With every store.
pytestmark = pytest.mark.stores


@pytest.fixture
def client(connected):
    client = connected(n_samples_per_prompt=2)
    client.add_prompts(["a", "b", "c"])
    return client


def test_completing_twice_is_the_same_as_once(client):
    (lease,) = client.lease_groups(1)
    samples = finish(lease.group.samples)
    assert client.complete_group(lease.token, samples) is False
    assert client.complete_group(lease.token, samples) is True
    client.seal_step(0, 1)
    assert client.complete_group(lease.token, samples) is True
    assert client.stats().groups["sealed"] == 1


def test_tokens_are_not_guessable(client):
    tokens = {lease.token for lease in client.lease_groups(3)}
    assert len(tokens) == 3 and all(len(token) >= 32 for token in tokens)
    for token in ("", "0", "a" * 32):
        with pytest.raises(LeaseLost):
            client.reject_group(token, "no")


def test_an_expired_lease_goes_to_the_next(client, clock):
    (first,) = client.lease_groups(1, ttl_seconds=10)
    clock.now += 9
    assert client.renew_leases([first.token, "other"], ttl_seconds=10) == ["other"]
    clock.now += 9
    assert client.stats().expired_leases == 0
    clock.now += 2
    with pytest.raises(LeaseLost, match="expired"):
        client.complete_group(first.token, finish(first.group.samples))
    (second,) = client.lease_groups(1, ttl_seconds=10)
    assert (second.group.group_index, second.attempt) == (0, 2) and second.token != first.token
    assert client.stats().expired_leases == 1
    for late in (
        lambda: client.complete_group(first.token, finish(first.group.samples)),
        lambda: client.return_group(first.token),
        lambda: client.reject_group(first.token, "no"),
    ):
        with pytest.raises(LeaseLost):
            late()
    assert client.renew_leases([first.token]) == [first.token]
    client.complete_group(second.token, finish(second.group.samples))


def test_a_waiting_worker_gets_what_expires(connected, clock):
    client = connected()
    client.add_prompts(["a"])
    client.lease_groups(1, ttl_seconds=0.05)
    # The clock stands still while the second worker waits, until its wait has begun.
    import threading

    timer = threading.Timer(0.1, lambda: setattr(clock, "now", clock.now + 1))
    timer.start()
    (second,) = client.lease_groups(1, wait_seconds=20)
    timer.join()
    assert second.attempt == 2


def test_a_returned_group_keeps_what_it_has(client):
    leased = client.lease_groups(2)
    partial = leased[0].group.samples
    partial[0].tokens = [1, 2, 3]
    partial[0].response_length = 1
    partial[0].status = Sample.Status.ABORTED
    client.return_group(leased[0].token, partial)
    client.return_group(leased[0].token, partial)
    client.return_group(leased[1].token)
    first, second, third = client.lease_groups(3)
    assert [lease.group.group_index for lease in (first, second, third)] == [0, 1, 2]
    assert [lease.attempt for lease in (first, second, third)] == [2, 2, 1]
    assert list(first.group.samples[0].tokens) == [1, 2, 3]
    assert first.group.samples[0].status is Sample.Status.ABORTED
    assert len(second.group.samples[0].tokens) == 0
    # A group that is given back without samples keeps those that it had.
    client.return_group(first.token)
    (again,) = client.lease_groups(1)
    assert list(again.group.samples[0].tokens) == [1, 2, 3]
    client.complete_group(again.token, finish(again.group.samples))
    with pytest.raises(LeaseLost, match="ended by complete"):
        client.return_group(again.token)
    with pytest.raises(LeaseLost):
        client.complete_group(first.token, finish(first.group.samples))


def test_a_prompt_may_fan_out(client):
    (lease,) = client.lease_groups(1)
    one, two = finish(lease.group.samples)
    three = Sample.from_dict(two.to_dict())
    with pytest.raises(InvalidField, match="rollout_id"):
        client.complete_group(lease.token, [one, two, three])
    two.rollout_id = 8
    three.rollout_id = 9
    with pytest.raises(InvalidField, match="one id shared by the 2 samples of index 1"):
        client.complete_group(lease.token, [one, two, three])
    three.rollout_id = 8
    client.complete_group(lease.token, [one, two, three])
    assert [(s.index, s.rollout_id) for s in client.seal_step(0, 1)] == [(0, None), (1, 8), (1, 8)]
    assert [s.index for s in client.read_step(0, [2, 1, 0])] == [1, 1, 0]


def _change(**values):
    def change(samples):
        for name, value in values.items():
            # Bypasses the dataclass's checks, as a client in another language could.
            samples[1].__dict__[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change(group_index=7), r"samples\[1\].group_index: got 7, expected 0"),
        (_change(group_index=None), r"samples\[1\].group_index"),
        (_change(index=2), r"samples\[1\].index: got 2, expected one of 0 to 1"),
        (_change(response_length=9), r"samples\[1\].*response_length"),
        (_change(response_length=2), r"samples\[1\].*loss_mask.*3"),
        (lambda samples: samples.pop(), r"every leased index: \[1\] missing"),
        (lambda samples: samples.clear(), r"every leased index: \[0, 1\] missing"),
    ],
)
def test_a_group_that_does_not_fit_is_refused_and_stays_leased(serving, change, message):
    address = serving(n_samples_per_prompt=2).address
    with BufferClient(address) as client, grpc.insecure_channel(address) as channel:
        writer = client.open_run("run").to_proto()
        client.add_prompts(["a"])
        (lease,) = client.lease_groups(1)
        samples = finish(lease.group.samples)
        change(samples)
        request = buffer_pb2.CompleteGroupRequest(
            writer=writer, lease_token=lease.token, samples=map(sample_to_proto, samples), commit=True
        )
        with pytest.raises(grpc.RpcError, match=message) as error:
            buffer_pb2_grpc.BufferServiceStub(channel).CompleteGroup(iter([request]), timeout=60)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client.stats().groups["leased"] == 1
        assert client.renew_leases([lease.token]) == []


def test_a_stream_without_commit_stores_nothing(serving):
    address = serving().address
    with BufferClient(address) as client, grpc.insecure_channel(address) as channel:
        writer = client.open_run("run").to_proto()
        client.add_prompts(["a"])
        (lease,) = client.lease_groups(1)
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        samples = list(map(sample_to_proto, finish(lease.group.samples)))
        header = buffer_pb2.CompleteGroupRequest(writer=writer, lease_token=lease.token, samples=samples)
        with pytest.raises(grpc.RpcError, match="commit"):
            stub.CompleteGroup(iter([header]), timeout=60)
        commit = buffer_pb2.CompleteGroupRequest(commit=True)
        with pytest.raises(grpc.RpcError, match="commit"):
            stub.CompleteGroup(iter([header, commit, commit]), timeout=60)
        with pytest.raises(grpc.RpcError, match="commit"):
            stub.CompleteGroup(iter([]), timeout=60)
        stats = client.stats()
        assert (stats.groups["leased"], stats.payload_bytes) == (1, 0)


@pytest.mark.parametrize(
    "wrong", [{"max_groups": 0}, {"max_groups": 1, "ttl_seconds": -1}, {"max_groups": 1, "wait_seconds": -1.0}]
)
def test_a_wrong_request_is_named(client, wrong):
    with pytest.raises(InvalidField) as error:
        client.lease_groups(**wrong)
    assert error.value.field == list(wrong)[-1]


class Leasing(RuleBasedStateMachine):
    """Workers, a trainer and time in any order, against a model of which groups are where."""

    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.service = serve_buffer(Buffer(BufferSettings(n_samples_per_prompt=2), clock=lambda: self.now))
        self.client = BufferClient(self.service.address)
        self.client.open_run("run")
        self.prompts = 0
        self.holder: dict[int, str] = {}
        self.expires: dict[int, float] = {}
        self.completed: set[int] = set()
        self.rejected: set[int] = set()
        self.quarantined: set[int] = set()
        self.sealed: list[list[int]] = []

    def teardown(self) -> None:
        self.client.close()
        self.service.stop(0)

    def _release(self) -> None:
        for group in [g for g, when in self.expires.items() if when <= self.now]:
            del self.holder[group], self.expires[group]

    def _ended(self, group: int) -> None:
        del self.holder[group], self.expires[group]

    @rule(count=st.integers(1, 3))
    def add(self, count):
        assert self.client.add_prompts(["p"] * count).first_group_index == self.prompts
        self.prompts += count

    @rule(target=leases, ttl=st.sampled_from([1, 5]))
    def lease(self, ttl):
        self._release()
        gone = self.completed | self.rejected | self.quarantined | set(sum(self.sealed, [])) | self.holder.keys()
        waiting = [g for g in range(self.prompts) if g not in gone]
        leased = self.client.lease_groups(1, ttl_seconds=ttl)
        assert [lease.group.group_index for lease in leased] == waiting[:1]
        for lease in leased:
            assert [s.index for s in lease.group.samples] == [2 * waiting[0], 2 * waiting[0] + 1]
            self.holder[waiting[0]], self.expires[waiting[0]] = lease.token, self.now + ttl
        return leased[0] if leased else None

    @rule(seconds=st.sampled_from([0.5, 2, 6]))
    def pass_time(self, seconds):
        self.now += seconds

    @rule(lease=consumes(leases), how=st.sampled_from(["complete", "return", "return partial", "reject"]))
    def end(self, lease, how):
        if lease is None:
            return
        self._release()
        group, samples = lease.group.group_index, finish(lease.group.samples)
        call = {
            "complete": lambda: self.client.complete_group(lease.token, samples),
            "return": lambda: self.client.return_group(lease.token),
            "return partial": lambda: self.client.return_group(lease.token, samples),
            "reject": lambda: self.client.reject_group(lease.token, "no"),
        }[how]
        if self.holder.get(group) != lease.token:
            with pytest.raises(LeaseLost):
                call()
            return
        for _ in range(2):
            call()
        self._ended(group)
        if how == "complete":
            self.completed.add(group)
        elif how == "reject":
            self.rejected.add(group)

    @rule(lease=leases)
    def renew(self, lease):
        if lease is None:
            return
        self._release()
        group = lease.group.group_index
        held = self.holder.get(group) == lease.token
        assert self.client.renew_leases([lease.token], ttl_seconds=3) == ([] if held else [lease.token])
        if held:
            self.expires[group] = self.now + 3

    @rule(count=st.integers(1, 3))
    def seal(self, count):
        step, expected = len(self.sealed), sorted(self.completed)[:count]
        if len(expected) < count:
            with pytest.raises(DeadlineExceeded):
                self.client.seal_step(step, count)
            return
        summaries = self.client.seal_step(step, count)
        assert sorted({s.group_index for s in summaries}) == expected and len(summaries) == 2 * count
        self.sealed.append(expected)
        self.completed -= set(expected)

    @rule(data=st.data(), quarantine=st.booleans())
    def drop(self, data, quarantine):
        """Rejects any group: a sealed one unseals its step and the later ones."""
        self._release()
        if not self.prompts:
            return
        group = data.draw(st.integers(0, self.prompts - 1))
        first = next((step for step, groups in enumerate(self.sealed) if group in groups), len(self.sealed))
        unsealed = list(range(first, len(self.sealed)))
        assert self.client.drop_groups([group], quarantine=quarantine) == unsealed
        for step in unsealed:
            self.completed.update(self.sealed[step])
        del self.sealed[first:]
        self.completed.discard(group)
        self.holder.pop(group, None)
        self.expires.pop(group, None)
        self.rejected.discard(group)
        self.quarantined.discard(group)
        (self.quarantined if quarantine else self.rejected).add(group)

    @rule()
    def open_again(self):
        self.client.open_run("run")
        self.holder.clear()
        self.expires.clear()

    @invariant()
    def every_group_is_in_one_place(self):
        self._release()
        counts = self.client.stats().groups
        assert sum(counts.values()) == self.prompts
        sealed = sum(self.sealed, [])
        assert len(sealed) == len(set(sealed)) == counts["sealed"]
        assert (counts["leased"], counts["completed"], counts["rejected"], counts["quarantined"]) == (
            len(self.holder),
            len(self.completed),
            len(self.rejected),
            len(self.quarantined),
        )


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_groups_come_together_only_to_a_client_that_asks_for_it(client):
    def messages(together: bool) -> list[buffer_pb2.LeaseGroupsResponse]:
        request = buffer_pb2.LeaseGroupsRequest(writer=client._writer(), max_groups=3, together=together)
        answers = list(client._stream("LeaseGroups", request))
        leased = [message for answer in answers for message in (answer, *answer.more)]
        assert [message.group.group_index for message in leased] == [0, 1, 2]
        assert [message.lease.group_index for message in leased] == [0, 1, 2]
        for message in leased:
            client.return_group(message.lease.token)
        return answers

    assert [len(answer.more) for answer in messages(together=False)] == [0, 0, 0]
    assert [len(answer.more) for answer in messages(together=True)] == [2]
    # Groups that were returned with much work are messages of their own.
    for lease in client.lease_groups(2):
        for sample in lease.group.samples:
            sample.tokens, sample.response_length = [1] * 80_000, 79_999
        client.return_group(lease.token, lease.group.samples)
    assert [len(answer.more) for answer in messages(together=True)] == [0, 1]
    assert [len(lease.group.samples[0].tokens) for lease in client.lease_groups(3)] == [80_000, 80_000, 0]
