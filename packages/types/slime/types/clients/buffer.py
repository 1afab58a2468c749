"""`BufferClient`: adds prompts, leases and completes groups, seals and reads steps."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar

from slime.types.blobs import BlobReader, resolver
from slime.types.clients.base import Client, Writer, build
from slime.types.clients.buffer_records import (
    AddPromptsResult,
    GroupInfo,
    LeasedGroup,
    SealedStep,
    Stats,
    StoredGroup,
    chunk_messages,
    info_from_proto,
    prompt_to_proto,
    state_name,
    state_number,
    stats_from_proto,
)
from slime.types.clients.handing_in import CompletingCall, calls_of, messages_of
from slime.types.codec import group_from_proto, sample_from_proto
from slime.types.errors import Busy, DeadlineExceeded
from slime.types.pace import TrainerPace
from slime.types.rpc import RpcSettings
from slime.types.rpc.retry import Repeatable
from slime.types.sample import Sample, SampleGroup
from slime.types.sample.validate import validate_finished, validate_sample, validate_samples
from slime.types.wire.json_fields import encode_plain, plain
from slime.v1 import buffer_pb2, buffer_pb2_grpc

T = TypeVar("T")
SERVICE_NAME = buffer_pb2.DESCRIPTOR.services_by_name["BufferService"].full_name
# Longest wait of one call; a longer wait takes several calls.
WAIT_SLICE_SECONDS = 30.0
SLACK_SECONDS = 10.0  # time that a call may take beyond its wait


class BufferClient(Client):
    """Client of `slime.v1.BufferService`. Writes carry `writer`, which `open_run` and `get_run` set.

    blobs: the store through which large tensors of a step may arrive; None: they arrive in the messages.
    """

    stub = buffer_pb2_grpc.BufferServiceStub

    def __init__(
        self,
        address: str,
        writer: Writer | None = None,
        settings: RpcSettings | None = None,
        blobs: BlobReader | None = None,
    ) -> None:
        super().__init__(address, writer, settings)
        self.blobs = blobs

    def open_run(self, run_id: str, last_committed_step: int = -1) -> Writer:
        """Starts a new incarnation of `run_id`; writes of older ones are refused from then on.

        last_committed_step: the last step in the checkpoint that the run continues from, -1 without one; later steps
        are sealed again with the same groups.
        """
        request = build(buffer_pb2.OpenRunRequest, run_id=run_id, last_committed_step=last_committed_step)
        answer = self._call("OpenRun", request)
        self.writer = Writer(answer.writer.run_id, answer.writer.incarnation, answer.next_step)
        return self.writer

    def get_run(self) -> Writer:
        """Joins the current incarnation of the run as a writer."""
        answer = self._call("GetRun", buffer_pb2.GetRunRequest())
        self.writer = Writer(answer.writer.run_id, answer.writer.incarnation)
        return self.writer

    def add_prompts(
        self, prompts: Iterable[str | Mapping[str, Any]], key: str = "", dataset: str = "train"
    ) -> AddPromptsResult:
        """Adds prompts: texts, or mappings with `prompt` (text or chat messages), `label` and `metadata`.

        key: a name for these prompts; adding them again under it adds nothing. While the buffer is unavailable, the
        call is retried only if it has a key.
        """
        messages = [prompt_to_proto(prompt, position) for position, prompt in enumerate(prompts)]
        requests = [build(buffer_pb2.AddPromptsRequest, key=key, dataset=dataset)]
        requests += [build(buffer_pb2.AddPromptsRequest, prompts=chunk) for chunk in chunk_messages(messages)]
        answer = self._call("AddPrompts", requests if key else iter(requests))
        return AddPromptsResult(answer.added, answer.first_group_index, answer.duplicate)

    def lease_groups(
        self,
        max_groups: int,
        ttl_seconds: float = 600.0,
        wait_seconds: float = 0.0,
        worker_id: str = "",
        pace: TrainerPace | None = None,
    ) -> list[LeasedGroup]:
        """Leases up to `max_groups` groups; fewer, or none, if no more are ready within `wait_seconds`.

        pace: leases no more groups than can be trained on within its staleness.
        """
        # The id lets a retry get the groups of an answer that was lost, or came after the deadline of its call.
        request_id = secrets.token_hex(8)

        def lease(wait: float) -> list[LeasedGroup]:
            request = build(
                buffer_pb2.LeaseGroupsRequest,
                request_id=request_id,
                writer=self._writer(),
                worker_id=worker_id or f"{socket.gethostname()}-{os.getpid()}",
                max_groups=max_groups,
                ttl_seconds=ttl_seconds,
                wait_seconds=wait,
                pace=None if pace is None else pace.to_proto(),
                together=True,
            )
            return [
                LeasedGroup(m.lease.token, group_from_proto(m.group), m.lease.attempt, m.lease.expires_in_seconds)
                for answer in self._stream("LeaseGroups", request, _waiting(wait))
                for m in (answer, *answer.more)
            ]

        return _in_slices(wait_seconds, lease)

    def renew_leases(self, tokens: Sequence[str], ttl_seconds: float = 600.0) -> list[str]:
        """Extends leases; returns the tokens of those that had already ended."""
        request = build(buffer_pb2.RenewLeasesRequest, writer=self._writer(), tokens=tokens, ttl_seconds=ttl_seconds)
        return list(self._call("RenewLeases", request).lost_tokens)

    def return_group(self, token: str, samples: Sequence[Sample] = ()) -> None:
        """Returns an unfinished group with its samples so far; without `samples`, as it was leased."""
        validate_samples(samples, validate_sample)
        self._hand_in("ReturnGroup", buffer_pb2.ReturnGroupRequest, buffer_pb2.ReturnGroupResponse, token, samples)

    def complete_group(self, token: str, samples: Sequence[Sample]) -> bool:
        """Completes a group with finished samples; returns True if this token had completed it before.

        `validate_finished` of slime.types.sample.validate says what a finished sample is. Raises InvalidField naming
        the sample.
        """
        # The buffer's settings decide whether a reward may be missing.
        validate_samples(samples, partial(validate_finished, reward_required=False))
        request, answer = buffer_pb2.CompleteGroupRequest, buffer_pb2.CompleteGroupResponse
        return self._hand_in("CompleteGroup", request, answer, token, samples).duplicate

    def complete_groups(self, groups: Sequence[tuple[str, Sequence[Sample]]]) -> list[bool]:
        """Completes groups of (lease token, finished samples); returns for each what `complete_group` does.

        Groups of up to 16 MiB together are one call, which stores all of them or none; more are several calls. Raises
        as `complete_group`, naming groups[POSITION]. Repeating it changes nothing for groups that are stored already.
        """
        calls = calls_of(groups, self._writer())
        first = list(islice(calls, 2))
        if len(first) > 1:
            # The buffer checks the samples of a call before it stores any of them, but not those of the calls after it.
            for position, (_, samples) in enumerate(groups):
                with CompletingCall(position, 1, []).naming_groups():
                    validate_samples(samples, partial(validate_finished, reward_required=False))
        duplicates: list[bool] = []
        for call in chain(first, calls):
            with call.naming_groups():
                if call.parts:
                    answer = self._send("CompleteGroups", buffer_pb2.CompleteGroupsResponse, call.messages)
                    duplicates += answer.duplicates
                else:
                    duplicates.append(self.complete_group(*groups[call.first]))
        return duplicates

    def reject_group(self, token: str, reason: str) -> None:
        self._call(
            "RejectGroup", build(buffer_pb2.RejectGroupRequest, writer=self._writer(), lease_token=token, reason=reason)
        )

    def requeue_groups(self, worker_id: str, *, unsealed: bool = False) -> int:
        """Makes the groups that a dead worker leased ready again; returns their number.

        unsealed: also the groups that any worker completed or rejected and that no step has counted yet; they start
        again from their prompts.
        """
        request = build(buffer_pb2.RequeueGroupsRequest, writer=self._writer(), worker_id=worker_id, unsealed=unsealed)
        return self._call("RequeueGroups", request).groups

    def seal_step(
        self,
        step: int,
        num_groups: int,
        wait_seconds: float = 0.0,
        metrics: Mapping[str, float] | None = None,
        pace: TrainerPace | None = None,
    ) -> SealedStep:
        """Fixes the groups of `step`; waits up to `wait_seconds` for enough completed ones.

        metrics: kept with the step; those of the first call stay. pace: chooses groups by the age of their weights.
        Raises DeadlineExceeded if too few groups are completed in time.
        """

        def seal(wait: float) -> SealedStep:
            request = build(buffer_pb2.SealStepRequest,
                writer=self._writer(), step=step, num_groups=num_groups, wait_seconds=wait, metrics=metrics,
                pace=None if pace is None else pace.to_proto(),
            )  # fmt: skip
            answer = self._call("SealStep", request, _waiting(wait))
            return SealedStep(answer.samples, dict(answer.metrics), dict(answer.rejected))

        return _in_slices(wait_seconds, seal)

    def store_plan(self, step: int, plan: Mapping[str, Any]) -> dict[str, Any]:
        """Stores the plan of a sealed step; returns the one that is stored, which is the first."""
        own = plain(plan, "plan")
        request = build(buffer_pb2.StorePlanRequest, writer=self._writer(), step=step, plan_json=encode_plain(own))
        stored = self._call("StorePlan", request).plan_json
        return own if stored == request.plan_json else json.loads(stored)

    def get_plan(self, step: int, wait_seconds: float = 0.0) -> dict[str, Any]:
        """Returns the plan of a step, waiting up to `wait_seconds` for it. Raises NotFound, or after a wait
        DeadlineExceeded."""

        def get(wait: float) -> dict[str, Any]:
            request = build(buffer_pb2.GetPlanRequest, step=step, wait_seconds=wait)
            return {"": json.loads(self._call("GetPlan", request, _waiting(wait)).plan_json)}

        # Wrapped, because an empty plan is an answer, too.
        return _in_slices(wait_seconds, get)[""]

    def read_step(self, step: int, positions: Sequence[int], *, leave_damaged: bool = False) -> Iterator[Sample]:
        """Yields the samples of a sealed step at `positions` of its summaries, in that order.

        Damaged samples raise DataLoss and unseal the step; with `leave_damaged` the step stays as it is.

        A step may be of any size, so the deadline of a call bounds the wait for more samples: what a call did not bring
        in time is asked for again. Raises DeadlineExceeded if one brings nothing.
        """
        left = list(positions)
        while True:
            read = 0
            try:
                for sample in self._read_step(step, left, leave_damaged):
                    read += 1
                    yield sample
                return
            except DeadlineExceeded:
                left = left[read:]
                if not read:
                    raise
                if not left:
                    return

    def _read_step(self, step: int, positions: Sequence[int], leave_damaged: bool) -> Iterator[Sample]:
        blobs = self.blobs
        request = build(
            buffer_pb2.ReadStepRequest,
            step=step,
            positions=positions,
            blob_store="" if blobs is None else blobs.name,
            leave_damaged=leave_damaged,
        )
        for message in self._stream("ReadStep", request):
            resolve = None if blobs is None else resolver(message.samples, blobs)
            for sample in message.samples:
                yield sample_from_proto(sample, resolve=resolve)

    def acknowledge_step(self, step: int) -> None:
        self._call("AcknowledgeStep", build(buffer_pb2.AcknowledgeStepRequest, writer=self._writer(), step=step))

    def commit_steps(self, step: int) -> None:
        """Commits every step up to and including `step`."""
        self._call("CommitSteps", build(buffer_pb2.CommitStepsRequest, writer=self._writer(), step=step))

    def rewind_steps(self, last_step: int) -> None:
        """Makes `last_step` the last trained step again, for a trainer that continues from that state; commits
        nothing."""
        self._call("RewindSteps", build(buffer_pb2.RewindStepsRequest, writer=self._writer(), last_step=last_step))

    def read_groups(
        self,
        states: Sequence[str] = (),
        group_indexes: Sequence[int] = (),
        limit: int = 0,
        after_group_index: int | None = None,
    ) -> Iterator[StoredGroup]:
        """Yields groups in any of `states` ("ready", "completed", ...), lowest group index first; changes nothing.

        They may be any number, and their reader may take any time, as in `read_step`.
        """
        request = build(
            buffer_pb2.ReadGroupsRequest,
            states=[state_number(state) for state in states],  # type: ignore[misc]
            group_indexes=group_indexes,
            limit=limit,
            after_group_index=after_group_index,
        )
        for message in self._stream_groups("ReadGroups", request, lambda message: message.group.group_index):
            state = state_name(message.state)
            step = message.step if message.HasField("step") else None
            yield StoredGroup(group_from_proto(message.group), state, message.reject_reason, step)

    def list_groups(
        self,
        states: Sequence[str] = (),
        group_indexes: Sequence[int] = (),
        limit: int = 0,
        after_group_index: int | None = None,
    ) -> Iterator[GroupInfo]:
        """Yields the same groups as `read_groups`, without their samples."""
        request = build(
            buffer_pb2.ListGroupsRequest,
            states=[state_number(state) for state in states],  # type: ignore[misc]
            group_indexes=group_indexes,
            limit=limit,
            after_group_index=after_group_index,
        )
        for message in self._stream_groups("ListGroups", request, lambda message: message.group_index):
            yield info_from_proto(message)

    def _stream_groups(self, name: str, request: Any, index_of: Callable[[Any], int]) -> Iterator[Any]:
        """Yields messages about groups; asks again for those that a call did not bring before its deadline."""
        while True:
            read, last = 0, 0
            try:
                for message in self._stream(name, request):
                    read, last = read + 1, index_of(message)
                    yield message
                return
            except DeadlineExceeded:
                if not read:
                    raise
                if request.limit:
                    request.limit -= read
                    if not request.limit:
                        return
                request.after_group_index = last

    def drop_groups(self, group_indexes: Sequence[int], reason: str = "", quarantine: bool = False) -> list[int]:
        """Takes groups out of the run. quarantine: keep them and their samples aside; otherwise they are rejected.

        Returns the steps that have to be sealed and planned again: those sealed with the groups, and all later ones.
        """
        request = build(buffer_pb2.DropGroupsRequest, group_indexes=group_indexes, reason=reason, quarantine=quarantine)
        return list(self._call("DropGroups", request).unsealed_steps)

    def read_evaluation_set(self, name: str) -> list[SampleGroup]:
        """Returns the prompts of an evaluation set, in order. Raises NotFound naming the known sets."""
        request = build(buffer_pb2.ReadEvaluationSetRequest, name=name)
        return [group_from_proto(message.group) for message in self._long_stream("ReadEvaluationSet", request)]

    def read_place(self, step: int) -> bytes:
        """Returns the content of a --data-place file: the place in the data after `step`, where a new buffer begins."""
        request = build(buffer_pb2.ReadPlaceRequest, step=step)
        return b"".join(message.part for message in self._long_stream("ReadPlace", request))

    def stats(self) -> Stats:
        return stats_from_proto(self._call("GetStats", buffer_pb2.GetStatsRequest()))

    def _hand_in(self, name: str, request: Any, answer: Any, token: str, samples: Sequence[Sample]) -> Any:
        """Calls the method `name` with the group of a lease; returns its answer."""
        header = request(writer=self._writer(), lease_token=token)
        return self._send(name, answer, lambda: messages_of(header, samples))

    def _send(self, name: str, answer: Any, messages: Callable[[], Iterator[bytes]]) -> Any:
        """Calls the method `name` with encoded messages, which `messages` makes again for each attempt."""
        begun = messages()
        message, path = next(begun), f"/{SERVICE_NAME}/{name}"
        if next(begun, None) is None:
            # A stream of one message and a call with one message are the same on the wire; gRPC starts a thread for
            # the stream, which takes longer than the rest of the call.
            return self._channel.unary_unary(path, response_deserializer=answer.FromString)(message)
        return self._channel.stream_unary(path, response_deserializer=answer.FromString)(Repeatable(messages))


def _in_slices(wait_seconds: float, call: Callable[[float], T]) -> T:
    """Calls `call(seconds to wait)` until it returns something or the time is over; returns the last answer.

    The server then need not hold one call for as long as its client waits.
    """
    if not wait_seconds > WAIT_SLICE_SECONDS:
        # Passed on unchanged, NaN included: the server names what is wrong with it.
        return call(wait_seconds)
    deadline = time.monotonic() + wait_seconds
    while (left := deadline - time.monotonic()) > WAIT_SLICE_SECONDS:
        with suppress(DeadlineExceeded, Busy):
            if answer := call(WAIT_SLICE_SECONDS):
                return answer
    return call(max(left, 0.0))


def _waiting(wait_seconds: float) -> float | None:
    return wait_seconds + SLACK_SECONDS if wait_seconds else None
