"""The typed clients against servers that record their requests: every call, in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from slime.types import Sample, SampleGroup
from slime.types.clients import (
    BufferClient,
    Engine,
    RolloutClient,
    SampleSummary,
    TrainerClient,
    TrainerInfo,
    Writer,
)  # fmt: skip
from slime.types.codec import group_to_proto, sample_to_proto
from slime.types.errors import InvalidField, LeaseLost, RemoteError
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.types.wire.tensor import tensor_to_proto
from slime.v1 import buffer_pb2, buffer_pb2_grpc, rollout_pb2, rollout_pb2_grpc, trainer_pb2, trainer_pb2_grpc

GROUP = SampleGroup(4, "train", [Sample(index=8, prompt="a"), Sample(index=9, prompt="a")])


class Recorder:
    def __init__(self) -> None:
        self.requests: list[Any] = []

    def record(self, request: Any) -> Any:
        self.requests.append(request)
        return request


class Buffer(Recorder, buffer_pb2_grpc.BufferServiceServicer):
    def OpenRun(self, request: Any, context: Any) -> Any:
        self.record(request)
        return buffer_pb2.OpenRunResponse(writer=buffer_pb2.Writer(run_id=request.run_id, incarnation=2), next_step=7)

    def GetRun(self, request: Any, context: Any) -> Any:
        return buffer_pb2.GetRunResponse(writer=buffer_pb2.Writer(run_id="r", incarnation=5))

    def AddPrompts(self, requests: Any, context: Any) -> Any:
        received = [self.record(r) for r in requests]
        return buffer_pb2.AddPromptsResponse(
            added=sum(len(r.prompts) for r in received), first_group_index=3, duplicate=True
        )

    def LeaseGroups(self, request: Any, context: Any) -> Any:
        self.record(request)
        lease = buffer_pb2.Lease(group_index=4, token="t", expires_in_seconds=9.5, attempt=2)
        yield buffer_pb2.LeaseGroupsResponse(lease=lease, group=group_to_proto(GROUP))

    def RenewLeases(self, request: Any, context: Any) -> Any:
        return buffer_pb2.RenewLeasesResponse(lost_tokens=self.record(request).tokens[1:])

    def ReturnGroup(self, requests: Any, context: Any) -> Any:
        self.requests = list(requests)
        return buffer_pb2.ReturnGroupResponse()

    def CompleteGroup(self, requests: Any, context: Any) -> Any:
        self.requests = list(requests)
        return buffer_pb2.CompleteGroupResponse(duplicate=True)

    def RejectGroup(self, request: Any, context: Any) -> Any:
        raise LeaseLost("gone", field="lease_token", value=self.record(request).lease_token)

    def SealStep(self, request: Any, context: Any) -> Any:
        self.record(request)
        plain = buffer_pb2.SampleSummary(index=1, group_index=2, status=2, reward_value=0.5, oldest_weight_version=-1)
        full = buffer_pb2.SampleSummary(rollout_id=0, status=3, reward_json='{"a": 1}', metadata_json='{"b": 2}')
        return buffer_pb2.SealStepResponse(samples=[plain, full, buffer_pb2.SampleSummary(status=1)])

    def StorePlan(self, request: Any, context: Any) -> Any:
        return buffer_pb2.StorePlanResponse(plan_json=self.record(request).plan_json)

    def GetPlan(self, request: Any, context: Any) -> Any:
        return buffer_pb2.GetPlanResponse(plan_json=json.dumps({"step": self.record(request).step}))

    def ReadStep(self, request: Any, context: Any) -> Any:
        for position in self.record(request).positions:
            yield buffer_pb2.ReadStepResponse(samples=[sample_to_proto(Sample(index=position))])

    def AcknowledgeStep(self, request: Any, context: Any) -> Any:
        self.record(request)
        return buffer_pb2.AcknowledgeStepResponse()

    def CommitSteps(self, request: Any, context: Any) -> Any:
        self.record(request)
        return buffer_pb2.CommitStepsResponse()

    def RequeueGroups(self, request: Any, context: Any) -> Any:
        self.record(request)
        return buffer_pb2.RequeueGroupsResponse(groups=3)

    def RewindSteps(self, request: Any, context: Any) -> Any:
        self.record(request)
        return buffer_pb2.RewindStepsResponse()

    def ReadGroups(self, request: Any, context: Any) -> Any:
        self.record(request)
        yield buffer_pb2.ReadGroupsResponse(group=group_to_proto(GROUP), state=buffer_pb2.GROUP_STATE_SEALED, step=0)
        yield buffer_pb2.ReadGroupsResponse(
            group=group_to_proto(GROUP), state=buffer_pb2.GROUP_STATE_REJECTED, reject_reason="x"
        )

    def ReadEvaluationSet(self, request: Any, context: Any) -> Any:
        yield buffer_pb2.ReadEvaluationSetResponse(group=group_to_proto(SampleGroup(0, self.record(request).name)))

    def GetStats(self, request: Any, context: Any) -> Any:
        return buffer_pb2.GetStatsResponse(groups={"ready": 3}, rejected={"x": 1}, next_step=2, evaluation_sets=["gsm"])


class Rollout(Recorder, rollout_pb2_grpc.RolloutServiceServicer):
    finish = True

    def GetStatus(self, request: Any, context: Any) -> Any:
        return rollout_pb2.GetStatusResponse(
            engines=[rollout_pb2.Engine(name="e0", healthy=True)], weight_version=3, running_rollouts=1
        )

    def Generate(self, request: Any, context: Any) -> Any:
        self.record(request)
        for done in range(1, request.num_groups + 1):
            yield rollout_pb2.GenerateResponse(completed_groups=done, num_groups=request.num_groups)
        if self.finish:
            yield rollout_pb2.GenerateResponse(
                done=True, metrics={"m": 1.5}, examples=[sample_to_proto(Sample(index=1))]
            )

    def Evaluate(self, request: Any, context: Any) -> Any:
        self.record(request)
        yield rollout_pb2.EvaluateResponse(completed_samples=1, num_samples=2)
        yield rollout_pb2.EvaluateResponse(done=True, metrics={"eval/gsm": 0.5})

    def BeginWeightUpdate(self, request: Any, context: Any) -> Any:
        self.record(request)
        return rollout_pb2.BeginWeightUpdateResponse(
            engines=[
                rollout_pb2.Engine(
                    name="e0",
                    url="http://h:1",
                    kind="embedded",
                    healthy=True,
                    weight_version=1,
                    delta_carriers=["disk"],
                )
            ]
        )

    def CommitWeightUpdate(self, request: Any, context: Any) -> Any:
        self.record(request)
        return rollout_pb2.CommitWeightUpdateResponse()

    def AbortWeightUpdate(self, request: Any, context: Any) -> Any:
        self.record(request)
        return rollout_pb2.AbortWeightUpdateResponse()


class Trainer(Recorder, trainer_pb2_grpc.TrainerServiceServicer):
    def GetInfo(self, request: Any, context: Any) -> Any:
        return trainer_pb2.GetInfoResponse(
            rank=1, world_size=2, backend="fsdp", device="cpu", num_parameters=9, next_step=3, weight_version=3
        )

    def TrainStep(self, request: Any, context: Any) -> Any:
        self.record(request)
        scores = {position: tensor_to_proto(np.float32([-0.5, -2])) for position in request.log_prob_positions}
        return trainer_pb2.TrainStepResponse(metrics={"train/loss": 0.25}, log_probs=scores)

    def UpdateWeights(self, request: Any, context: Any) -> Any:
        self.record(request)
        return trainer_pb2.UpdateWeightsResponse(metrics={"perf/update": 1.0})

    def SaveCheckpoint(self, request: Any, context: Any) -> Any:
        return trainer_pb2.SaveCheckpointResponse(path=self.record(request).path + "/iter_3")

    def ExportModel(self, request: Any, context: Any) -> Any:
        return trainer_pb2.ExportModelResponse(path=self.record(request).path)


def serve(servicer: Any, add: Any) -> RunningService:
    return RunningService(Server([(add, servicer)], RpcSettings(), service_names=[]))


@pytest.fixture
def buffer() -> Iterator[tuple[BufferClient, Buffer]]:
    servicer = Buffer()
    with serve(servicer, buffer_pb2_grpc.add_BufferServiceServicer_to_server) as service:
        with BufferClient(service.address) as client:
            yield client, servicer


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (lambda client: client.open_run("a\ud800"), "run_id", "text that UTF-8 can hold .*surrogates not allowed"),
        (lambda client: client.lease_groups(2**31), "max_groups", "out of range: 2147483648"),
        (lambda client: client.lease_groups("3"), "max_groups", "got '3', expected an integer of 32 bits"),
        (lambda client: client.drop_groups([1, 2**70], "why"), "group_indexes", "out of range"),
        (lambda client: client.add_prompts(["a", "\ud800"]), "prompts[1].prompt", "text that UTF-8 can hold"),
        (
            lambda client: client.add_prompts([{"prompt": "a", "label": "\ud800"}]),
            "prompts[0].label", "text that UTF-8 can hold",
        ),
    ],
)  # fmt: skip
def test_a_value_that_no_message_can_hold_is_named(buffer: Any, call: Any, field: str, words: str) -> None:
    client, servicer = buffer
    with pytest.raises(InvalidField, match=words) as caught:
        call(client)
    assert caught.value.field == field and not servicer.requests


def test_the_buffer_client_joins_runs(buffer: Any) -> None:
    client, servicer = buffer
    assert client.open_run("run", last_committed_step=3) == Writer("run", 2, 7) == client.writer
    assert servicer.requests[0].last_committed_step == 3
    assert client.get_run() == Writer("r", 5) == client.writer
    client.acknowledge_step(4)
    client.commit_steps(4)
    for request in servicer.requests[1:]:
        assert (request.writer.run_id, request.writer.incarnation, request.step) == ("r", 5, 4)
    assert client.requeue_groups("w", unsealed=True) == 3
    client.rewind_steps(2)
    requeue, rewind = servicer.requests[3:]
    assert (requeue.worker_id, requeue.unsealed, requeue.writer.incarnation) == ("w", True, 5)
    assert (rewind.last_step, rewind.writer.incarnation) == (2, 5)


def test_the_buffer_client_adds_prompts(buffer: Any) -> None:
    client, servicer = buffer
    prompts = [
        "a",
        {"prompt": [{"role": "user", "content": "b"}], "label": 3, "metadata": {"c": 1}},
        {"prompt": "d", "label": "e"},
    ]
    added = client.add_prompts(prompts, key="k", dataset="gsm")
    assert (added.added, added.first_group_index, added.duplicate) == (3, 3, True)
    first, second = servicer.requests
    assert (first.key, first.dataset, second.key) == ("k", "gsm", "")
    text, chat, labelled = second.prompts
    assert text.text == "a" and not text.HasField("label")
    assert json.loads(chat.messages_json)[0]["content"] == "b" and (chat.label, chat.metadata_json) == ("3", '{"c":1}')
    assert labelled.label == "e"
    servicer.requests.clear()
    client.add_prompts(["x" * 3_000_000] * 3)
    assert [len(r.prompts) for r in servicer.requests] == [0, 1, 1, 1]
    assert client.add_prompts([]).added == 0
    for bad, field in (
        ({"text": "a"}, "prompts[0]"),
        ({"prompt": 3}, "prompts[0].prompt"),
        ({"prompt": "a", "metadata": {"b": {1}}}, "prompts[0].metadata.b"),
    ):
        with pytest.raises(InvalidField) as caught:
            client.add_prompts([bad])
        assert caught.value.field == field


def test_the_buffer_client_leases_and_completes(buffer: Any) -> None:
    client, servicer = buffer
    (leased,) = client.lease_groups(3, ttl_seconds=5, wait_seconds=0.5)
    assert (leased.token, leased.group, leased.attempt, leased.expires_in_seconds) == ("t", GROUP, 2, 9.5)
    request = servicer.requests[0]
    assert (request.max_groups, request.ttl_seconds, request.wait_seconds) == (3, 5, 0.5) and request.worker_id
    assert client.renew_leases(["a", "b"]) == ["b"]

    client.open_run("run")
    removed = dict(remove_sample=True, status=Sample.Status.FAILED)
    assert client.complete_group("t", [Sample(index=8, **removed), Sample(index=9, **removed)]) is True
    assert servicer.requests[0].writer.run_id == "run" and servicer.requests[0].lease_token == "t"
    assert [s.index for r in servicer.requests for s in r.samples] == [8, 9]
    assert [r.commit for r in servicer.requests] == [True]
    client.complete_group("t", [Sample(response="x" * 3_000_000, **removed)] * 3)
    assert [(r.lease_token, len(r.samples), r.commit) for r in servicer.requests] == [
        ("t", 1, False),
        ("", 1, False),
        ("", 1, True),
    ]
    client.return_group("t", [])
    assert [(r.lease_token, len(r.samples), r.commit) for r in servicer.requests] == [("t", 0, True)]
    with pytest.raises(LeaseLost, match="gone"):
        client.reject_group("t", "no variance")
    broken = Sample(tokens=[1], response_length=1, loss_mask=[1, 1])
    with pytest.raises(InvalidField, match="length 2, expected 1") as caught:
        client.complete_group("t", [Sample(**removed), broken])
    assert caught.value.field == "samples[1].loss_mask"


def test_the_buffer_client_reads_steps_and_groups(buffer: Any) -> None:
    client, servicer = buffer
    plain, full, bare = client.seal_step(3, 2, wait_seconds=1)
    assert (plain.index, plain.rollout_id, plain.reward, plain.status, plain.metadata) == (
        1,
        None,
        0.5,
        Sample.Status.COMPLETED,
        {},
    )
    assert (full.rollout_id, full.reward, full.metadata, bare.reward) == (0, {"a": 1}, {"b": 2}, None)
    assert plain.oldest_weight_version == -1
    step = client.seal_step(3, 2)
    assert (len(step), step[0], step[-1], step[1:]) == (3, plain, bare, [full, bare])
    assert step == client.seal_step(3, 2) == [plain, full, bare] and step != [plain]
    names = [*vars(plain), "weight_versions", "effective_response_length"]
    for decoded in (client.seal_step(3, 2), step):
        assert all(decoded.column(name) == [getattr(summary, name) for summary in step] for name in names)
    assert full == SampleSummary(0, 0, 0, reward={"a": 1}, status=Sample.Status.TRUNCATED, metadata={"b": 2},
                                 oldest_weight_version=0, newest_weight_version=0)  # fmt: skip
    assert repr(client.store_plan(3, {"a": (1, np.float64(0.5), True)})) == "{'a': [1, 0.5, True]}"
    assert client.get_plan(3) == {"step": 3}
    assert [s.index for s in client.read_step(3, [2, 0])] == [2, 0]
    sealed, rejected = client.read_groups(
        states=["sealed", "rejected"], group_indexes=[4], limit=2, after_group_index=1
    )
    assert tuple(sealed) == (GROUP, "sealed", "", 0) and tuple(rejected) == (GROUP, "rejected", "x", None)
    assert servicer.requests[-1].after_group_index == 1
    with pytest.raises(InvalidField, match="one of ready, leased"):
        list(client.read_groups(states=["done"]))
    assert client.read_evaluation_set("gsm") == [SampleGroup(0, "gsm")]
    stats = client.stats()
    assert (stats.groups, stats.rejected, stats.next_step, stats.evaluation_sets) == (
        {"ready": 3},
        {"x": 1},
        2,
        ("gsm",),
    )


def test_the_rollout_client() -> None:
    servicer = Rollout()
    with serve(servicer, rollout_pb2_grpc.add_RolloutServiceServicer_to_server) as service:
        with RolloutClient(service.address, writer=Writer("run", 1)) as client:
            assert (client.status().weight_version, client.status().engines[0].name) == (3, "e0")
            seen: list[tuple[int, int]] = []
            result = client.generate(5, 2, timeout=60, on_progress=lambda done, total: seen.append((done, total)))
            assert (result.metrics, [s.index for s in result.examples], seen) == ({"m": 1.5}, [1], [(1, 2), (2, 2)])
            assert client.evaluate(5, names=("gsm",), timeout=60).metrics == {"eval/gsm": 0.5}
            assert list(servicer.requests[-1].names) == ["gsm"]
            assert client.begin_weight_update(1) == [
                Engine("e0", "http://h:1", "embedded", True, 1, delta_carriers=("disk",))
            ]
            client.commit_weight_update(1)
            client.abort_weight_update(1, "why")
            assert servicer.requests[-1].reason == "why" and servicer.requests[-1].writer.run_id == "run"
            servicer.finish = False
            with pytest.raises(RemoteError, match="last message"):
                client.generate(5, 1, timeout=60)


def test_the_trainer_client() -> None:
    servicer = Trainer()
    with serve(servicer, trainer_pb2_grpc.add_TrainerServiceServicer_to_server) as service:
        with TrainerClient(service.address, writer=Writer("run", 1)) as client:
            assert client.info() == TrainerInfo(1, 2, "fsdp", "cpu", 9, 3, 3)
            assert client.train_step(3, 4, timeout=60) == {"train/loss": 0.25}
            scored = client.train_and_score(3, 4, [5, 1], timeout=60)
            assert scored.metrics == {"train/loss": 0.25} and sorted(scored.log_probs) == [1, 5]
            assert scored.log_probs[5].tolist() == [-0.5, -2.0]
            assert (
                servicer.requests[0].step,
                servicer.requests[0].num_groups,
                servicer.requests[0].writer.incarnation,
            ) == (3, 4, 1)
            assert client.update_weights(4, timeout=60) == {"perf/update": 1.0}
            assert client.save_checkpoint(3, "ckpt", timeout=60) == "ckpt/iter_3"
            assert client.export_model("hf", timeout=60) == "hf"
