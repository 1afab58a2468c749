"""The life of a group in the buffer, over real gRPC."""

from __future__ import annotations

import json
import threading

import grpc
import numpy as np
import pytest
from buffer_samples import complete, finish

from slime.types import Sample
from slime.types.clients import BufferClient
from slime.types.errors import DeadlineExceeded, InvalidField, NotFound, StaleWriter, Unavailable, WrongState
from slime.types.rpc import RpcSettings
from slime.v1 import buffer_pb2, buffer_pb2_grpc

# With every store.
pytestmark = pytest.mark.stores


@pytest.fixture
def prompts(write_jsonl):
    return write_jsonl([{"input": f"q{i}", "label": str(i), "metadata": {"n": i}} for i in range(5)])


def test_the_way_of_a_group(connected, prompts):
    client = connected(prompt_data=prompts, label_key="label", n_samples_per_prompt=2)
    leased = client.lease_groups(3)
    assert [lease.group.group_index for lease in leased] == [0, 1, 2]
    assert [[s.index for s in lease.group.samples] for lease in leased] == [[0, 1], [2, 3], [4, 5]]
    sample = leased[1].group.samples[0]
    assert (sample.prompt, sample.label, sample.metadata, sample.group_index) == ("q1", "1", {"n": 1}, 1)
    assert sample.status is Sample.Status.PENDING and leased[1].group.dataset == "train"

    # The groups are completed in another order, and sealed by index.
    for lease in reversed(leased):
        assert client.complete_group(lease.token, finish(lease.group.samples)) is False
    summaries = client.seal_step(0, 2)
    assert [(s.group_index, s.index) for s in summaries] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    first = summaries[0]
    assert (first.total_length, first.response_length, first.loss_mask_sum) == (5, 3, 2)
    assert (first.reward, first.status, first.metadata) == (1.0, Sample.Status.COMPLETED, {"n": 0})
    assert (first.oldest_weight_version, first.newest_weight_version) == (3, 4)

    assert client.store_plan(0, {"shards": [[0], [1]]}) == {"shards": [[0], [1]]}
    assert client.store_plan(0, {"shards": []}) == {"shards": [[0], [1]]}
    assert client.get_plan(0) == {"shards": [[0], [1]]}
    read = list(client.read_step(0, [3, 0, 0]))
    assert [s.index for s in read] == [3, 0, 0]
    np.testing.assert_array_equal(read[0].tokens, [1, 2, 3, 4, 5])
    np.testing.assert_allclose(read[0].rollout_log_probs, [-0.1, 0.0, -0.3])

    client.acknowledge_step(0)
    assert client.stats().next_step == 1
    client.commit_steps(0)
    states = {group.group_index: (state, step) for group, state, _, step in client.read_groups()}
    assert states == {0: ("committed", 0), 1: ("committed", 0), 2: ("completed", None)}
    # A checkpoint holds what they have taught.
    (stored,) = client.read_groups(group_indexes=[1])
    assert stored.group.samples == []


def test_stats(connected, prompts, write_jsonl):
    evaluation = write_jsonl([{"input": "e"}], "e.jsonl")
    client = connected(prompt_data=prompts, eval_prompt_data=[["held-out", evaluation]])
    complete(client, 6)
    stats = client.stats()
    assert stats.groups["completed"] == 6 and stats.groups["sealed"] == 0
    assert (stats.epoch, stats.prompts_in_dataset, stats.next_group_index, stats.next_sample_index) == (1, 5, 6, 6)
    assert stats.payload_bytes > 0 and stats.evaluation_sets == ("held-out",) and stats.writer.run_id == "run"


def test_prompts_of_a_client(connected):
    client = connected(n_samples_per_prompt=2)
    assert client.lease_groups(1) == []
    chat = [{"role": "user", "content": "hi"}]
    rows = ["a", {"prompt": chat, "label": "b", "metadata": {"k": [1]}}]
    added = client.add_prompts(rows, key="batch-1")
    assert (added.added, added.first_group_index, added.duplicate) == (2, 0, False)
    again = client.add_prompts(rows, key="batch-1")
    assert (again.added, again.first_group_index, again.duplicate) == (0, 0, True)
    assert client.add_prompts(["c"]).first_group_index == 2
    leased = client.lease_groups(9)
    assert [lease.group.samples[0].prompt for lease in leased] == ["a", chat, "c"]
    assert (leased[1].group.samples[1].label, leased[1].group.samples[1].metadata) == ("b", {"k": [1]})


def test_prompts_of_clients_come_before_new_ones_of_the_dataset(connected, prompts):
    client = connected(prompt_data=prompts)
    client.lease_groups(1)
    client.add_prompts(["mine"])
    assert [lease.group.samples[0].prompt for lease in client.lease_groups(2)] == ["mine", "q1"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (buffer_pb2.Prompt(), r"prompts\[1\].prompt"),
        (buffer_pb2.Prompt(messages_json="{}"), r"prompts\[1\].messages_json"),
        (buffer_pb2.Prompt(messages_json="[1]"), r"prompts\[1\].messages_json"),
        (buffer_pb2.Prompt(text="a", metadata_json="[]"), r"prompts\[1\].metadata_json"),
        (buffer_pb2.Prompt(text="a", metadata_json="{"), r"prompts\[1\].metadata_json"),
    ],
)
def test_a_bad_prompt_is_named_and_nothing_is_added(serving, prompt, field):
    with grpc.insecure_channel(serving().address) as channel:
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        requests = [
            buffer_pb2.AddPromptsRequest(prompts=[buffer_pb2.Prompt(text="fine")]),
            buffer_pb2.AddPromptsRequest(prompts=[prompt]),
        ]
        with pytest.raises(grpc.RpcError, match=field) as error:
            stub.AddPrompts(iter(requests), timeout=60)
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert stub.GetStats(buffer_pb2.GetStatsRequest(), timeout=60).next_group_index == 0


def test_evaluation_sets(connected, write_jsonl):
    first = write_jsonl([{"q": f"e{i}", "a": str(i)} for i in range(3)], "one.jsonl")
    second = write_jsonl([{"q": "x", "answer": "y"}], "two.jsonl")
    client = connected(
        eval_columns={"two": {"label_key": "answer"}},
        eval_prompt_data=[["one", f"{first}@[1:3]", "two", second]],
        eval_input_key="q",
        eval_label_key="a",
        n_samples_per_eval_prompt=2,
    )
    for _ in range(2):
        groups = client.read_evaluation_set("one")
        assert [g.group_index for g in groups] == [0, 1] and {g.dataset for g in groups} == {"one"}
        assert [[s.index for s in g.samples] for g in groups] == [[0, 1], [2, 3]]
        assert [g.samples[0].prompt for g in groups] == ["e1", "e2"] and groups[0].samples[1].label == "1"
    assert client.add_prompts(["more"], dataset="two").first_group_index == 1
    client.add_prompts(["other"], dataset="three")
    assert [g.samples[0].prompt for g in client.read_evaluation_set("two")] == ["x", "more"]
    assert client.read_evaluation_set("two")[0].samples[0].label == "y"
    assert client.stats().evaluation_sets == ("one", "two", "three")
    assert client.lease_groups(1) == []
    with pytest.raises(NotFound, match="'four'; known ones are one, two, three"):
        client.read_evaluation_set("four")


def test_only_the_newest_incarnation_writes(serving, prompts):
    address = serving(prompt_data=prompts).address
    with BufferClient(address) as old, BufferClient(address) as new:
        with pytest.raises(StaleWriter, match="no run is open"):
            old.lease_groups(1)
        with pytest.raises(NotFound, match="no run is open"):
            old.get_run()
        old.open_run("run")
        (lease,) = old.lease_groups(1)
        assert new.open_run("run").incarnation == 2
        for write in (
            lambda: old.lease_groups(1),
            lambda: old.renew_leases([lease.token]),
            lambda: old.return_group(lease.token),
            lambda: old.complete_group(lease.token, finish(lease.group.samples)),
            lambda: old.reject_group(lease.token, "no"),
            lambda: old.seal_step(0, 1),
            lambda: old.store_plan(0, {}),
            lambda: old.acknowledge_step(0),
            lambda: old.commit_steps(0),
        ):
            with pytest.raises(StaleWriter, match="incarnation 2"):
                write()
        # The old incarnation's lease has ended; its group waits.
        (again,) = new.lease_groups(1)
        assert (again.group.group_index, again.attempt) == (0, 2)
        old.get_run()
        assert old.writer.incarnation == 2
        with pytest.raises(WrongState, match="holds run 'run'"):
            new.open_run("another")
        with pytest.raises(InvalidField, match="run_id"):
            new.open_run("")


def test_sealing_is_idempotent_and_in_order(connected, prompts):
    client = connected(prompt_data=prompts)
    complete(client, 3)
    sealed = client.seal_step(0, 2)
    assert client.seal_step(0, 2) == sealed
    with pytest.raises(InvalidField, match="2, with which step 0 was sealed"):
        client.seal_step(0, 3)
    with pytest.raises(DeadlineExceeded, match="step 1: 1 of 2 groups were complete"):
        client.seal_step(1, 2)
    for wrong in (
        lambda: client.seal_step(-1, 1),
        lambda: client.seal_step(1, 0),
        lambda: client.seal_step(1, 1, -1.0),
    ):
        with pytest.raises(InvalidField):
            wrong()
    client.acknowledge_step(0)
    client.acknowledge_step(0)
    with pytest.raises(WrongState, match="step 5 cannot be sealed before step 1"):
        client.seal_step(5, 1)
    client.open_run("run", last_committed_step=4)
    client.seal_step(5, 1)
    with pytest.raises(WrongState, match="step 3 was never sealed"):
        client.seal_step(3, 1)


def test_what_a_step_must_be_for_each_call(connected, prompts):
    client = connected(prompt_data=prompts)
    complete(client, 2)
    for call in (
        lambda: client.store_plan(0, {}),
        lambda: client.get_plan(0),
        lambda: list(client.read_step(0, [0])),
        lambda: client.acknowledge_step(0),
    ):
        with pytest.raises(NotFound, match="step 0"):
            call()
    client.seal_step(0, 2)
    with pytest.raises(NotFound, match="no plan"):
        client.get_plan(0)
    with pytest.raises(DeadlineExceeded, match="no plan"):
        client.get_plan(0, wait_seconds=0.01)
    with pytest.raises(InvalidField, match="positions: got 2, expected 0 to 1"):
        list(client.read_step(0, [0, 2]))
    with pytest.raises(WrongState, match="not acknowledged"):
        client.commit_steps(0)
    client.acknowledge_step(0)
    client.commit_steps(0)
    client.commit_steps(0)


@pytest.mark.parametrize("plan", ["", "[1]", "{"])
def test_a_plan_is_a_json_object(serving, prompts, plan):
    address = serving(prompt_data=prompts).address
    with BufferClient(address) as client, grpc.insecure_channel(address) as channel:
        client.open_run("run")
        complete(client, 1)
        client.seal_step(0, 1)
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        with pytest.raises(grpc.RpcError, match="plan_json"):
            stub.StorePlan(buffer_pb2.StorePlanRequest(writer=client.writer.to_proto(), plan_json=plan), timeout=60)


def test_calls_that_wait_end_when_there_is_something(connected):
    client = connected()
    results: dict[str, object] = {}

    def waiting(name, call):
        thread = threading.Thread(target=lambda: results.update({name: call()}))
        thread.start()
        return thread

    threads = [
        waiting("lease", lambda: client.lease_groups(1, wait_seconds=20)),
        waiting("seal", lambda: client.seal_step(0, 1, wait_seconds=20)),
        waiting("plan", lambda: client.get_plan(0, wait_seconds=20)),
    ]
    client.add_prompts(["p"])
    threads[0].join(20)
    (lease,) = results["lease"]
    client.complete_group(lease.token, finish(lease.group.samples))
    threads[1].join(20)
    assert len(results["seal"]) == 1
    client.store_plan(0, {"a": 1})
    threads[2].join(20)
    assert results["plan"] == {"a": 1}


def test_stopping_ends_calls_that_wait(serving):
    service = serving()
    with BufferClient(service.address, settings=RpcSettings(retry_seconds=0)) as client:
        client.open_run("run")
        raised = []

        def wait():
            try:
                client.get_plan(0, wait_seconds=30)
            except Unavailable as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        service.stop(grace_seconds=1)
        thread.join(20)
        assert raised


def test_a_client_that_goes_away_leases_nothing(serving):
    service = serving()
    with BufferClient(service.address) as client, grpc.insecure_channel(service.address) as channel:
        writer = client.open_run("run").to_proto()
        stub = buffer_pb2_grpc.BufferServiceStub(channel)
        call = stub.LeaseGroups(
            buffer_pb2.LeaseGroupsRequest(writer=writer, max_groups=1, wait_seconds=30), timeout=0.1
        )
        with pytest.raises(grpc.RpcError):
            next(call)
        client.add_prompts(["p"])
        (lease,) = client.lease_groups(1, wait_seconds=5)
        assert lease.attempt == 1


def test_groups_are_read_in_pages(connected):
    client = connected()
    client.add_prompts([f"p{i}" for i in range(150)])
    leased = client.lease_groups(3)
    client.reject_group(leased[1].token, "too easy")
    assert len(list(client.read_groups())) == 150
    page = list(client.read_groups(limit=70, after_group_index=9))
    assert [stored.group.group_index for stored in page] == list(range(10, 80))
    assert [s.group.group_index for s in client.read_groups(states=["leased", "rejected"])] == [0, 1, 2]
    (rejected,) = client.read_groups(states=["rejected"])
    assert (rejected.reject_reason, client.stats().rejected) == ("too easy", {"too easy": 1})
    assert [s.group.group_index for s in client.read_groups(group_indexes=[7, 3])] == [3, 7]
    with pytest.raises(NotFound, match="no group 999"):
        list(client.read_groups(group_indexes=[3, 999]))


def test_large_groups_are_streamed(connected):
    client = connected(n_samples_per_prompt=4)
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    for sample in lease.group.samples:
        sample.reward, sample.status = 1.0, sample.Status.COMPLETED
        sample.tokens = np.arange(600_000)
        sample.response_length = 599_999
        sample.rollout_log_probs = np.zeros(599_999)
    client.complete_group(lease.token, lease.group.samples)
    client.seal_step(0, 1)
    samples = list(client.read_step(0, [0, 1, 2, 3]))
    assert [s.index for s in samples] == [0, 1, 2, 3] and all(s.tokens[-1] == 599_999 for s in samples)


def test_a_group_beyond_the_limit_is_refused(connected):
    client = connected(max_group_mb=1)
    client.add_prompts(["p"])
    (lease,) = client.lease_groups(1)
    (sample,) = lease.group.samples
    sample.reward, sample.status, sample.response_length = 1.0, sample.Status.COMPLETED, 1
    sample.tokens = np.arange(400_000)
    with pytest.raises(InvalidField, match="max-group-mb"):
        client.complete_group(lease.token, [sample])


def test_metadata_and_dict_rewards_are_in_the_summaries(connected):
    client = connected()
    client.add_prompts([{"prompt": "p", "metadata": {"source": "x"}}])
    (lease,) = client.lease_groups(1)
    (sample,) = finish(lease.group.samples)
    sample.reward = {"score": 0.5, "format": 1}
    sample.remove_sample = True
    sample.loss_mask = None
    sample.weight_versions = ["default"]
    client.complete_group(lease.token, [sample])
    (summary,) = client.seal_step(0, 1)
    assert summary.reward == {"score": 0.5, "format": 1} and summary.remove_sample
    assert (summary.metadata, summary.loss_mask_sum, summary.oldest_weight_version) == ({"source": "x"}, 3, -1)
    assert json.loads(json.dumps(summary.metadata)) == {"source": "x"}
