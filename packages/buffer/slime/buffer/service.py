"""BufferService of buffer.proto over a `Buffer`: reads requests, calls it, writes answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from slime.buffer.buffer import Buffer
from slime.buffer.prompts import prompt_of_message
from slime.buffer.runs import Writer
from slime.buffer.samples import group_message
from slime.buffer.settings import BufferSettings
from slime.buffer.sources.base import Prompt
from slime.buffer.store.base import Group, State
from slime.types.blobs import BlobWriter
from slime.types.errors import InvalidField, WrongState
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.v1 import buffer_pb2, buffer_pb2_grpc, sample_pb2

SERVICE_NAME = "slime.v1.BufferService"
# A call that waits holds a thread; with every rank of a large job in GetPlan there must be one left for StorePlan.
WAITING_CALLS = 512
STATES = {state: getattr(buffer_pb2, f"GROUP_STATE_{state.name}") for state in State}
STATE_OF_NUMBER = {number: state for state, number in STATES.items()}


class BufferService(buffer_pb2_grpc.BufferServiceServicer):
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer

    def OpenRun(self, request: buffer_pb2.OpenRunRequest, context: Any) -> buffer_pb2.OpenRunResponse:
        writer, next_step = self.buffer.open_run(request.run_id, request.last_committed_step)
        return buffer_pb2.OpenRunResponse(writer=_writer_message(writer), next_step=next_step)

    def GetRun(self, request: buffer_pb2.GetRunRequest, context: Any) -> buffer_pb2.GetRunResponse:
        return buffer_pb2.GetRunResponse(writer=_writer_message(self.buffer.runs.current()))

    def AddPrompts(
        self, requests: Iterator[buffer_pb2.AddPromptsRequest], context: Any
    ) -> buffer_pb2.AddPromptsResponse:
        key = dataset = ""
        prompts: list[Prompt] = []
        for number, request in enumerate(requests):
            if number == 0:
                key, dataset = request.key, request.dataset
            elif request.key not in ("", key) or request.dataset not in ("", dataset):
                raise InvalidField("key", request.key or request.dataset, "key and dataset in the first message only")
            prompts += [prompt_of_message(prompt, len(prompts) + at) for at, prompt in enumerate(request.prompts)]
        added, first, duplicate = self.buffer.add_prompts(prompts, key=key, dataset=dataset)
        return buffer_pb2.AddPromptsResponse(added=added, first_group_index=first, duplicate=duplicate)

    def LeaseGroups(
        self, request: buffer_pb2.LeaseGroupsRequest, context: grpc.ServicerContext
    ) -> Iterator[buffer_pb2.LeaseGroupsResponse]:
        for leased in self.buffer.lease(
            _writer(request),
            request.max_groups,
            ttl=request.ttl_seconds,
            wait=request.wait_seconds,
            worker=request.worker_id,
            active=self._active(context),
        ):
            group = leased.group
            yield buffer_pb2.LeaseGroupsResponse(
                lease=buffer_pb2.Lease(
                    group_index=group.group_index,
                    token=group.token,
                    expires_in_seconds=leased.seconds,
                    attempt=group.attempt,
                ),
                group=group_message(group, leased.samples),
            )

    def RenewLeases(self, request: buffer_pb2.RenewLeasesRequest, context: Any) -> buffer_pb2.RenewLeasesResponse:
        lost = self.buffer.renew(_writer(request), request.tokens, request.ttl_seconds)
        return buffer_pb2.RenewLeasesResponse(lost_tokens=lost)

    def ReturnGroup(
        self, requests: Iterator[buffer_pb2.ReturnGroupRequest], context: Any
    ) -> buffer_pb2.ReturnGroupResponse:
        self.buffer.give_back(*self._handed_in(requests))
        return buffer_pb2.ReturnGroupResponse()

    def CompleteGroup(
        self, requests: Iterator[buffer_pb2.CompleteGroupRequest], context: Any
    ) -> buffer_pb2.CompleteGroupResponse:
        return buffer_pb2.CompleteGroupResponse(duplicate=self.buffer.complete(*self._handed_in(requests)))

    def _handed_in(self, requests: Iterator[Any]) -> tuple[Writer, str, list[sample_pb2.Sample]]:
        """(writer, token, samples) of a stream whose last message commits. Raises InvalidField for any other."""
        writer, token, committed = Writer("", 0), "", False
        samples: list[sample_pb2.Sample] = []
        size, limit = 0, self.buffer.settings.max_group_mb << 20
        for number, request in enumerate(requests):
            if committed:
                raise InvalidField("commit", "a message after the one with commit", "commit in the last message")
            if number == 0:
                writer, token = _writer(request), request.lease_token
                self.buffer.runs.check(writer)
            size += request.ByteSize()
            if size > limit:
                raise InvalidField(
                    "samples", f"more than {limit} bytes", f"a group of at most {limit >> 20} MiB (--max-group-mb)"
                )
            samples.extend(request.samples)
            committed = request.commit
        if not committed:
            raise InvalidField("commit", False, "true in the last message of the stream: nothing was stored")
        return writer, token, samples

    def RejectGroup(self, request: buffer_pb2.RejectGroupRequest, context: Any) -> buffer_pb2.RejectGroupResponse:
        self.buffer.reject(_writer(request), request.lease_token, request.reason)
        return buffer_pb2.RejectGroupResponse()

    def SealStep(
        self, request: buffer_pb2.SealStepRequest, context: grpc.ServicerContext
    ) -> buffer_pb2.SealStepResponse:
        summaries = self.buffer.seal(
            _writer(request),
            request.step,
            request.num_groups,
            metrics=request.metrics,
            wait=request.wait_seconds,
            active=self._active(context),
        )
        return buffer_pb2.SealStepResponse.FromString(summaries)

    def StorePlan(self, request: buffer_pb2.StorePlanRequest, context: Any) -> buffer_pb2.StorePlanResponse:
        plan = self.buffer.store_plan(_writer(request), request.step, request.plan_json)
        return buffer_pb2.StorePlanResponse(plan_json=plan)

    def GetPlan(self, request: buffer_pb2.GetPlanRequest, context: grpc.ServicerContext) -> buffer_pb2.GetPlanResponse:
        plan = self.buffer.plan(request.step, wait=request.wait_seconds, active=self._active(context))
        return buffer_pb2.GetPlanResponse(plan_json=plan)

    def ReadStep(self, request: buffer_pb2.ReadStepRequest, context: Any) -> Iterator[buffer_pb2.ReadStepResponse]:
        detached = self.buffer.detached
        if detached is not None and request.blob_store == detached.blobs.name:
            read = detached.read(request.step, request.positions)
        else:
            read = self.buffer.batches.read(request.step, request.positions)
        for chunk in read:
            yield buffer_pb2.ReadStepResponse(samples=map(sample_pb2.Sample.FromString, chunk))

    def AcknowledgeStep(
        self, request: buffer_pb2.AcknowledgeStepRequest, context: Any
    ) -> buffer_pb2.AcknowledgeStepResponse:
        self.buffer.acknowledge(_writer(request), request.step)
        return buffer_pb2.AcknowledgeStepResponse()

    def CommitSteps(self, request: buffer_pb2.CommitStepsRequest, context: Any) -> buffer_pb2.CommitStepsResponse:
        self.buffer.commit(_writer(request), request.step)
        return buffer_pb2.CommitStepsResponse()

    def ReadGroups(
        self, request: buffer_pb2.ReadGroupsRequest, context: Any
    ) -> Iterator[buffer_pb2.ReadGroupsResponse]:
        for number in request.states:
            if number not in STATE_OF_NUMBER:
                raise InvalidField("states", number, "GroupState values other than UNSPECIFIED")
        if request.limit < 0:
            raise InvalidField("limit", request.limit, "at least 0")
        after = request.after_group_index if request.HasField("after_group_index") else None
        states = [STATE_OF_NUMBER[number] for number in request.states]
        for group in self.buffer.groups(states, request.group_indexes, after=after, limit=request.limit):
            yield self._read_group(group)

    def _read_group(self, group: Group) -> buffer_pb2.ReadGroupsResponse:
        samples = self.buffer.samples(group)
        return buffer_pb2.ReadGroupsResponse(
            group=group_message(group, samples),
            state=STATES[group.state],
            reject_reason=group.reject_reason or "",
            step=group.step,
        )

    def ReadEvaluationSet(
        self, request: buffer_pb2.ReadEvaluationSetRequest, context: Any
    ) -> Iterator[buffer_pb2.ReadEvaluationSetResponse]:
        for group in self.buffer.evaluation.read(request.name):
            yield buffer_pb2.ReadEvaluationSetResponse(group=group)

    def ReadPlace(self, request: buffer_pb2.ReadPlaceRequest, context: Any) -> Iterator[buffer_pb2.ReadPlaceResponse]:
        for part in self.buffer.place(request.step):
            yield buffer_pb2.ReadPlaceResponse(part=part)

    def GetStats(self, request: buffer_pb2.GetStatsRequest, context: Any) -> buffer_pb2.GetStatsResponse:
        buffer = self.buffer
        buffer.expire()
        with buffer.store.lock:
            writer = buffer.runs.find()
            return buffer_pb2.GetStatsResponse(
                writer=None if writer is None else _writer_message(writer),
                groups=dict.fromkeys(State, 0) | buffer.store.counts(),
                rejected=buffer.store.reject_counts(),
                next_group_index=buffer.store.get("next_group_index", 0),
                next_sample_index=buffer.store.get("next_sample_index", 0),
                prompts_in_dataset=0 if buffer.prompts.dataset is None else len(buffer.prompts.dataset),
                epoch=buffer.prompts.cursor.epoch,
                next_step=buffer.batches.next_step(),
                payload_bytes=buffer.store.payload_bytes(),
                evaluation_sets=buffer.evaluation.names(),
                dataset="" if buffer.prompts.dataset is None else buffer.prompts.dataset.identity,
                expired_leases=buffer.store.get("expired_leases", 0),
            )

    def _active(self, context: grpc.ServicerContext) -> Callable[[], bool]:
        # False where the call has ended already: then nobody would receive the answer.
        if not context.add_callback(self.buffer.wake):
            raise WrongState("the call has ended", field="deadline")
        return context.is_active


def _writer(request: Any) -> Writer:
    return Writer(request.writer.run_id, request.writer.incarnation)


def _writer_message(writer: Writer) -> buffer_pb2.Writer:
    return buffer_pb2.Writer(run_id=writer.run_id, incarnation=writer.incarnation)


class RunningBuffer(RunningService):
    """A buffer that serves until `stop`; calls that wait for groups or plans end at once then."""

    def __init__(self, server: Server, buffer: Buffer) -> None:
        self.buffer = buffer
        super().__init__(server, buffer.close)

    def __enter__(self) -> Self:
        return self

    def stop(self, grace_seconds: float = 5.0) -> None:
        self.buffer.end_waits()
        super().stop(grace_seconds)


def serve(
    settings: BufferSettings, rpc: RpcSettings | None = None, *, blobs: BlobWriter | None = None
) -> RunningBuffer:
    """Serves a buffer until `stop`. Raises ConfigError for files or settings that do not fit, PortInUse.

    blobs: through which readers of a step that know it get large tensors.
    """
    return serve_buffer(Buffer(settings, blobs=blobs), rpc)


def serve_buffer(buffer: Buffer, rpc: RpcSettings | None = None) -> RunningBuffer:
    """As `serve`; `buffer` is closed at the end, or where serving fails."""
    rpc = rpc or RpcSettings()
    rpc = dataclasses.replace(rpc, rpc_threads=rpc.rpc_threads + WAITING_CALLS)
    try:
        server = Server(
            [(buffer_pb2_grpc.add_BufferServiceServicer_to_server, BufferService(buffer))],
            rpc,
            service_names=[SERVICE_NAME],
        )
    except BaseException:
        buffer.close()
        raise
    return RunningBuffer(server, buffer)
