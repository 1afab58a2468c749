"""`slime.v1.BufferService` over a `Buffer`: reads requests, calls the buffer, writes answers."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Self

import grpc

from slime.buffer.buffer import WAITING_CALLS, Buffer
from slime.buffer.groups.handed_in import GroupPart, part_of, parts_of, read_group, read_groups
from slime.buffer.groups.leases import Leased
from slime.buffer.groups.prompts import encode_prompt, prompt_of_message
from slime.buffer.groups.run_lock import WriterId
from slime.buffer.groups.samples import group_message
from slime.buffer.settings import BufferSettings
from slime.buffer.store.base import Group, State, Wait
from slime.buffer.streams import Streams
from slime.buffer.waits import Caller
from slime.types.blobs import BlobWriter
from slime.types.clients.buffer_records import chunk_messages
from slime.types.errors import InvalidField, WrongState, counted
from slime.types.pace import TrainerPace
from slime.types.rpc import RpcSettings, RunningService, Server
from slime.types.rpc.status import takes_bytes
from slime.types.wire.encoded import encode_list
from slime.v1 import buffer_pb2, buffer_pb2_grpc

SERVICE_NAME = "slime.v1.BufferService"
# A stream holds a thread for as long as its client likes, as a waiting call does. The limits leave threads for others.
INCOMING_STREAMS = 128
OUTGOING_STREAMS = 128
STREAM_SECONDS = 3600.0
LONGEST_TEXT = 4096
# Leased groups of one message together, for clients that take several.
TOGETHER_BYTES = 1 << 20
REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{0,64}")
# Memory of a prompt besides its bytes.
PROMPT_BYTES = 256
STATES = {state: getattr(buffer_pb2, f"GROUP_STATE_{state.name}") for state in State}
STATE_OF_NUMBER = {number: state for state, number in STATES.items()}


class BufferService(buffer_pb2_grpc.BufferServiceServicer):
    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        settings = buffer.settings
        held = 2 * max(settings.max_group_mb, settings.max_prompts_mb) << 20
        self._most_bytes = settings.max_group_mb << 20
        self._incoming = Streams(INCOMING_STREAMS, STREAM_SECONDS, held)
        self._outgoing = Streams(OUTGOING_STREAMS, STREAM_SECONDS)

    def OpenRun(self, request: buffer_pb2.OpenRunRequest, context: Any) -> buffer_pb2.OpenRunResponse:
        writer, next_step = self.buffer.open_run(_short("run_id", request.run_id), request.last_committed_step)
        return buffer_pb2.OpenRunResponse(writer=_writer_message(writer), next_step=next_step)

    def GetRun(self, request: buffer_pb2.GetRunRequest, context: Any) -> buffer_pb2.GetRunResponse:
        return buffer_pb2.GetRunResponse(writer=_writer_message(self.buffer.run_lock.current()))

    def AddPrompts(
        self, requests: Iterator[buffer_pb2.AddPromptsRequest], context: Any
    ) -> buffer_pb2.AddPromptsResponse:
        key = dataset = ""
        templates: list[bytes] = []
        size, limit = 0, self.buffer.settings.max_prompts_mb << 20
        with self._incoming.open(context) as taken:
            for number, request in enumerate(requests):
                if number == 0:
                    key, dataset = _short("key", request.key), _short("dataset", request.dataset)
                elif request.key not in ("", key) or request.dataset not in ("", dataset):
                    raise InvalidField(
                        "key", request.key or request.dataset, "key and dataset in the first message only"
                    )
                # Even a short prompt takes more memory than its text.
                added = request.ByteSize() + PROMPT_BYTES * len(request.prompts)
                size += added
                if size > limit:
                    raise InvalidField(
                        "prompts",
                        f"more than {limit >> 20} MiB",
                        f"at most {limit >> 20} MiB in a call (--max-prompts-mb): several calls, each with a key",
                    )
                taken(added)
                for message in request.prompts:
                    templates.append(encode_prompt(prompt_of_message(message, len(templates))))
            added_prompts, first, duplicate = self.buffer.add_prompts(templates, key=key, dataset=dataset)
        return buffer_pb2.AddPromptsResponse(added=added_prompts, first_group_index=first, duplicate=duplicate)

    def LeaseGroups(
        self, request: buffer_pb2.LeaseGroupsRequest, context: grpc.ServicerContext
    ) -> Iterator[buffer_pb2.LeaseGroupsResponse]:
        leased = self.buffer.lease(
            _writer(request),
            request.max_groups,
            ttl=request.ttl_seconds,
            wait=request.wait_seconds,
            worker=_short("worker_id", request.worker_id),
            caller=self._caller(context),
            pace=_pace(request),
            request=_request_id(request.request_id),
        )
        size = TOGETHER_BYTES if request.together else 0
        for first, *more in chunk_messages(map(_leased_message, leased), size):
            first.more.extend(more)
            yield first

    def RenewLeases(self, request: buffer_pb2.RenewLeasesRequest, context: Any) -> buffer_pb2.RenewLeasesResponse:
        lost = self.buffer.renew(_writer(request), request.tokens, request.ttl_seconds)
        return buffer_pb2.RenewLeasesResponse(lost_tokens=lost)

    # Samples are checked, and stored as the bytes that arrived.
    @takes_bytes
    def ReturnGroup(self, requests: Iterator[bytes], context: Any) -> buffer_pb2.ReturnGroupResponse:
        with self._incoming.open(context) as taken:
            writer, parts = self._begun(part_of(buffer_pb2.ReturnGroupRequest, data) for data in requests)
            self.buffer.give_back(writer, read_group(parts, taken, self._most_bytes))
        return buffer_pb2.ReturnGroupResponse()

    @takes_bytes
    def CompleteGroup(self, requests: Iterator[bytes], context: Any) -> buffer_pb2.CompleteGroupResponse:
        with self._incoming.open(context) as taken:
            writer, parts = self._begun(part_of(buffer_pb2.CompleteGroupRequest, data) for data in requests)
            (duplicate,) = self.buffer.complete(writer, [read_group(parts, taken, self._most_bytes)])
        return buffer_pb2.CompleteGroupResponse(duplicate=duplicate)

    @takes_bytes
    def CompleteGroups(self, requests: Iterator[bytes], context: Any) -> buffer_pb2.CompleteGroupsResponse:
        with self._incoming.open(context) as taken:
            writer, parts = self._begun(parts_of(requests))
            duplicates = self.buffer.complete(writer, read_groups(parts, taken, self._most_bytes))
        return buffer_pb2.CompleteGroupsResponse(duplicates=duplicates)

    def _begun(self, parts: Iterator[GroupPart]) -> tuple[WriterId, Iterator[GroupPart]]:
        """Returns the writer in the first part, and all parts. Raises StaleWriter before the others are read."""
        first = next(parts, None)
        if first is None:
            return WriterId("", 0), iter(())
        writer = _writer(first.message)
        self.buffer.run_lock.check(writer)
        return writer, chain([first], parts)

    def RejectGroup(self, request: buffer_pb2.RejectGroupRequest, context: Any) -> buffer_pb2.RejectGroupResponse:
        self.buffer.reject(_writer(request), request.lease_token, _short("reason", request.reason))
        return buffer_pb2.RejectGroupResponse()

    def RequeueGroups(self, request: buffer_pb2.RequeueGroupsRequest, context: Any) -> buffer_pb2.RequeueGroupsResponse:
        worker = _short("worker_id", request.worker_id)
        return buffer_pb2.RequeueGroupsResponse(
            groups=self.buffer.requeue(_writer(request), worker, unsealed=request.unsealed)
        )

    def SealStep(self, request: buffer_pb2.SealStepRequest, context: grpc.ServicerContext) -> bytes:
        # The summaries were encoded when their groups were completed, and pass through as they are.
        return self.buffer.seal(
            _writer(request),
            request.step,
            request.num_groups,
            metrics=request.metrics,
            pace=_pace(request),
            wait=request.wait_seconds,
            caller=self._caller(context),
        )

    def StorePlan(self, request: buffer_pb2.StorePlanRequest, context: Any) -> buffer_pb2.StorePlanResponse:
        plan = self.buffer.store_plan(_writer(request), request.step, request.plan_json)
        return buffer_pb2.StorePlanResponse(plan_json=plan)

    def GetPlan(self, request: buffer_pb2.GetPlanRequest, context: grpc.ServicerContext) -> buffer_pb2.GetPlanResponse:
        plan = self.buffer.plan(request.step, wait=request.wait_seconds, caller=self._caller(context))
        return buffer_pb2.GetPlanResponse(plan_json=plan)

    def ReadStep(self, request: buffer_pb2.ReadStepRequest, context: Any) -> Iterator[bytes]:
        with self._outgoing.open(context):
            for chunk in self.buffer.read_step(
                request.step, request.positions, request.blob_store, leave_damaged=request.leave_damaged
            ):
                # Samples were checked when they were stored, and pass through as they are.
                yield encode_list(buffer_pb2.ReadStepResponse, "samples", chunk)

    def AcknowledgeStep(
        self, request: buffer_pb2.AcknowledgeStepRequest, context: Any
    ) -> buffer_pb2.AcknowledgeStepResponse:
        self.buffer.acknowledge(_writer(request), request.step)
        return buffer_pb2.AcknowledgeStepResponse()

    def CommitSteps(self, request: buffer_pb2.CommitStepsRequest, context: Any) -> buffer_pb2.CommitStepsResponse:
        self.buffer.commit(_writer(request), request.step)
        return buffer_pb2.CommitStepsResponse()

    def RewindSteps(self, request: buffer_pb2.RewindStepsRequest, context: Any) -> buffer_pb2.RewindStepsResponse:
        self.buffer.reopen(_writer(request), request.last_step)
        return buffer_pb2.RewindStepsResponse()

    def ReadGroups(
        self, request: buffer_pb2.ReadGroupsRequest, context: Any
    ) -> Iterator[buffer_pb2.ReadGroupsResponse]:
        with self._outgoing.open(context):
            for group in self._requested_groups(request):
                group, samples = self.buffer.samples(group)
                yield buffer_pb2.ReadGroupsResponse(
                    group=group_message(group, samples),
                    state=STATES[group.state],
                    reject_reason=group.reject_reason or "",
                    step=group.step,
                )

    def ListGroups(
        self, request: buffer_pb2.ListGroupsRequest, context: Any
    ) -> Iterator[buffer_pb2.ListGroupsResponse]:
        with self._outgoing.open(context):
            for group in self._requested_groups(request):
                yield buffer_pb2.ListGroupsResponse(
                    group_index=group.group_index,
                    dataset=group.dataset,
                    state=STATES[group.state],
                    num_samples=len(group.sizes),
                    payload_bytes=sum(group.sizes),
                    attempt=group.attempt,
                    worker_id=group.worker or "",
                    step=group.step,
                    reason=group.reject_reason or "",
                )

    def _requested_groups(self, request: Any) -> Iterator[Group]:
        for number in request.states:
            if number not in STATE_OF_NUMBER:
                raise InvalidField("states", number, "GroupState values other than UNSPECIFIED")
        if request.limit < 0:
            raise InvalidField("limit", request.limit, "at least 0")
        after = request.after_group_index if request.HasField("after_group_index") else None
        states = [STATE_OF_NUMBER[number] for number in request.states]
        return self.buffer.groups(states, request.group_indexes, after=after, limit=request.limit)

    def DropGroups(self, request: buffer_pb2.DropGroupsRequest, context: Any) -> buffer_pb2.DropGroupsResponse:
        steps = self.buffer.drop(request.group_indexes, _short("reason", request.reason), keep=request.quarantine)
        return buffer_pb2.DropGroupsResponse(unsealed_steps=steps)

    def ReadEvaluationSet(
        self, request: buffer_pb2.ReadEvaluationSetRequest, context: Any
    ) -> Iterator[buffer_pb2.ReadEvaluationSetResponse]:
        with self._outgoing.open(context):
            for group in self.buffer.evaluation.read(request.name):
                yield buffer_pb2.ReadEvaluationSetResponse(group=group)

    def ReadPlace(self, request: buffer_pb2.ReadPlaceRequest, context: Any) -> Iterator[buffer_pb2.ReadPlaceResponse]:
        with self._outgoing.open(context):
            for part in self.buffer.place(request.step):
                yield buffer_pb2.ReadPlaceResponse(part=part)

    def GetStats(self, request: buffer_pb2.GetStatsRequest, context: Any) -> buffer_pb2.GetStatsResponse:
        buffer = self.buffer
        buffer.expire()
        with buffer.store.lock:
            writer = buffer.run_lock.find()
            return buffer_pb2.GetStatsResponse(
                writer=None if writer is None else _writer_message(writer),
                groups=dict.fromkeys(State, 0) | buffer.store.counts(),
                rejected=buffer.store.reject_counts(),
                next_group_index=buffer.store.get("next_group_index", 0),
                next_sample_index=buffer.store.get("next_sample_index", 0),
                prompts_in_dataset=0 if buffer.prompts.dataset is None else len(buffer.prompts.dataset),
                epoch=buffer.prompts.cursor.epoch,
                next_step=buffer.steps.next_step(),
                payload_bytes=buffer.store.payload_bytes(),
                evaluation_sets=buffer.evaluation.names(),
                dataset="" if buffer.prompts.dataset is None else buffer.prompts.dataset.identity,
                expired_leases=buffer.store.get("expired_leases", 0),
                damaged_payloads=buffer.store.get("damaged_payloads", 0),
            )

    def _caller(self, context: grpc.ServicerContext) -> Caller:
        caller = Caller(context.is_active)
        # False if the call has ended: nobody would receive the answer.
        if not context.add_callback(caller.end):
            raise WrongState("the call has ended", field="deadline")
        return caller


def _leased_message(leased: Leased) -> buffer_pb2.LeaseGroupsResponse:
    group = leased.group
    return buffer_pb2.LeaseGroupsResponse(
        lease=buffer_pb2.Lease(
            group_index=group.group_index,
            token=group.token,
            expires_in_seconds=leased.seconds,
            attempt=group.attempt,
        ),
        group=group_message(group, leased.samples),
    )


def _short(field: str, text: str) -> str:
    """Limits a name or a reason, which is stored and shown in lists and statistics."""
    if len(text) > LONGEST_TEXT:
        raise InvalidField(field, counted(len(text), "character"), f"at most {LONGEST_TEXT} characters")
    return text


def _request_id(text: str) -> str:
    if not REQUEST_ID.fullmatch(text):
        raise InvalidField("request_id", text, "at most 64 letters, digits, - and _, or none")
    return text


def _pace(request: Any) -> TrainerPace | None:
    return TrainerPace.from_proto(request.pace) if request.HasField("pace") else None


def _writer(request: Any) -> WriterId:
    return WriterId(request.writer.run_id, request.writer.incarnation)


def _writer_message(writer: WriterId) -> buffer_pb2.Writer:
    return buffer_pb2.Writer(run_id=writer.run_id, incarnation=writer.incarnation)


class RunningBuffer(RunningService):
    """A buffer that serves until `stop`, which ends calls that wait for groups or plans at once."""

    def __init__(self, server: Server, buffer: Buffer) -> None:
        self.buffer = buffer
        super().__init__(server, buffer.close)

    def __enter__(self) -> Self:
        return self

    def stop(self, grace_seconds: float = 5.0) -> None:
        self.buffer.end_waits()
        super().stop(grace_seconds)


def serve(
    settings: BufferSettings,
    rpc: RpcSettings | None = None,
    *,
    blobs: BlobWriter | None = None,
    standby: Wait | None = None,
) -> RunningBuffer:
    """Serves a buffer until `stop`. Raises ConfigError for files or settings that cannot be used, PortInUse.

    blobs: store of the large tensors of a step, for readers that know it. standby: see `Buffer`; the port is opened
    after the wait.
    """
    return serve_buffer(Buffer(settings, blobs=blobs, standby=standby), rpc)


def serve_buffer(buffer: Buffer, rpc: RpcSettings | None = None) -> RunningBuffer:
    """Serves `buffer`, and closes it at the end or if serving fails."""
    rpc = rpc or RpcSettings()
    rpc = dataclasses.replace(rpc, rpc_threads=rpc.rpc_threads + WAITING_CALLS + INCOMING_STREAMS + OUTGOING_STREAMS)
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
