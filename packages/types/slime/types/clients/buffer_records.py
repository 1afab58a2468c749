"""Records that `BufferClient` takes and returns, and their conversion to and from messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

from google.protobuf.message import Message

from slime.types.clients.base import Writer
from slime.types.errors import InvalidField
from slime.types.sample import SampleGroup
from slime.types.sample.status import STATUS_BY_NUMBER
from slime.types.sample.summary import SampleSummary
from slime.types.sample.validate import check_finite
from slime.types.wire.json_fields import is_utf8, to_json
from slime.v1 import buffer_pb2

M = TypeVar("M", bound=Message)
T = TypeVar("T")
# Larger messages are slow, smaller ones too many.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True)
class AddPromptsResult:
    added: int
    first_group_index: int
    duplicate: bool


@dataclass(frozen=True)
class LeasedGroup:
    token: str
    group: SampleGroup
    attempt: int
    expires_in_seconds: float


class SealedStep(Sequence[SampleSummary]):
    """Summaries of a step's samples, in order, decoded when they are first needed.

    metrics: as the first `seal_step` of the step gave them. rejected: number of groups rejected since the previous
    step, by reason.
    """

    def __init__(
        self, messages: Sequence[buffer_pb2.SampleSummary], metrics: dict[str, float], rejected: dict[str, int]
    ) -> None:
        # A container of messages makes each of them anew for every pass.
        self._messages = list(messages)
        self._summaries: list[SampleSummary] | None = None
        self.metrics = metrics
        self.rejected = rejected

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[SampleSummary]:
        return iter(self._all())

    def __getitem__(self, position: Any) -> Any:
        """Decodes the summary at a position alone; a slice decodes all."""
        if self._summaries is None and isinstance(position, int):
            return summary_from_proto(self._messages[position])
        return self._all()[position]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def column(self, name: str) -> list[Any]:
        """Returns one attribute of all summaries; faster than to decode them all, as long as that was not done."""
        if self._summaries is not None:
            return list(map(attrgetter(name), self._summaries))
        return list(map(_DECODED.get(name) or attrgetter(name), self._messages))

    def _all(self) -> list[SampleSummary]:
        if self._summaries is None:
            self._summaries = [summary_from_proto(message) for message in self._messages]
        return self._summaries


@dataclass(frozen=True)
class StoredGroup:
    group: SampleGroup
    state: str
    reject_reason: str
    step: int | None

    def __iter__(self) -> Iterator[Any]:
        return iter((self.group, self.state, self.reject_reason, self.step))


@dataclass(frozen=True)
class GroupInfo:
    """A group without its samples. num_samples, payload_bytes: as stored. reason: of a rejection or quarantine."""

    group_index: int
    dataset: str
    state: str
    num_samples: int
    payload_bytes: int
    attempt: int
    worker_id: str
    step: int | None
    reason: str


@dataclass(frozen=True)
class Stats:
    writer: Writer
    groups: dict[str, int]
    rejected: dict[str, int]
    next_group_index: int
    next_sample_index: int
    prompts_in_dataset: int
    epoch: int
    next_step: int
    payload_bytes: int
    evaluation_sets: tuple[str, ...]
    expired_leases: int
    damaged_payloads: int = 0
    dataset: str = ""


def state_number(state: str) -> int:
    try:
        return buffer_pb2.GroupState.Value(f"GROUP_STATE_{state.upper()}")
    except ValueError:
        known = ", ".join(name.removeprefix("GROUP_STATE_").lower() for name in buffer_pb2.GroupState.keys()[1:])
        raise InvalidField("states", state, f"one of {known}") from None


def state_name(number: Any) -> str:
    return buffer_pb2.GroupState.Name(number).removeprefix("GROUP_STATE_").lower()


def prompt_to_proto(prompt: str | Mapping[str, Any], position: int) -> buffer_pb2.Prompt:
    row: Mapping[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else prompt
    field = f"prompts[{position}]"
    unknown = set(row) - {"prompt", "label", "metadata"}
    if unknown or "prompt" not in row:
        raise InvalidField(field, sorted(row), "the keys prompt, label and metadata")
    message = buffer_pb2.Prompt()
    text = row["prompt"]
    if isinstance(text, str):
        message.text = _text(text, f"{field}.prompt")
    elif isinstance(text, list) and all(isinstance(turn, Mapping) for turn in text):
        message.messages_json = to_json(text, f"{field}.prompt")
    else:
        raise InvalidField(f"{field}.prompt", text, "a text or a list of chat messages")
    if row.get("label") is not None:
        label = row["label"]
        check_finite(f"{field}.label", label)
        message.label = _text(label if isinstance(label, str) else to_json(label, f"{field}.label"), f"{field}.label")
    if row.get("metadata"):
        message.metadata_json = to_json(row["metadata"], f"{field}.metadata")
    return message


def _text(text: str, field: str) -> str:
    if not is_utf8(text):
        raise InvalidField(field, repr(text), "text that UTF-8 can hold")
    return text


def _reward(message: buffer_pb2.SampleSummary) -> Any:
    if value := message.reward_value:
        return value
    kind = message.WhichOneof("reward")
    if kind is None:
        return None
    return message.reward_value if kind == "reward_value" else json.loads(message.reward_json)


def _rollout_id(message: buffer_pb2.SampleSummary) -> int | None:
    return message.rollout_id if message.HasField("rollout_id") else None


def _metadata(message: buffer_pb2.SampleSummary) -> dict[str, Any]:
    text = message.metadata_json
    return dict(json.loads(text)) if text else {}


# Attributes of a summary that its message has in another form.
_DECODED: dict[str, Callable[[buffer_pb2.SampleSummary], Any]] = {
    "reward": _reward,
    "rollout_id": _rollout_id,
    "metadata": _metadata,
    "status": lambda message: STATUS_BY_NUMBER[message.status],
    "weight_versions": lambda message: summary_from_proto(message).weight_versions,
    "effective_response_length": lambda message: message.loss_mask_sum,
}


def summary_from_proto(message: buffer_pb2.SampleSummary) -> SampleSummary:
    values = {
        "index": message.index,
        "group_index": message.group_index,
        "rollout_id": _rollout_id(message),
        "total_length": message.total_length,
        "response_length": message.response_length,
        "loss_mask_sum": message.loss_mask_sum,
        "reward": _reward(message),
        "status": STATUS_BY_NUMBER[message.status],
        "remove_sample": message.remove_sample,
        "metadata": _metadata(message),
        "oldest_weight_version": message.oldest_weight_version,
        "newest_weight_version": message.newest_weight_version,
        "non_generation_time": message.non_generation_time,
    }
    summary = object.__new__(SampleSummary)
    # __init__ is bypassed: a frozen dataclass sets field by field, which takes longer than all else here.
    object.__setattr__(summary, "__dict__", values)
    return summary


def info_from_proto(message: buffer_pb2.ListGroupsResponse) -> GroupInfo:
    return GroupInfo(
        group_index=message.group_index,
        dataset=message.dataset,
        state=state_name(message.state),
        num_samples=message.num_samples,
        payload_bytes=message.payload_bytes,
        attempt=message.attempt,
        worker_id=message.worker_id,
        step=message.step if message.HasField("step") else None,
        reason=message.reason,
    )


def stats_from_proto(answer: buffer_pb2.GetStatsResponse) -> Stats:
    return Stats(
        writer=Writer(answer.writer.run_id, answer.writer.incarnation, answer.next_step),
        groups=dict(answer.groups),
        rejected=dict(answer.rejected),
        next_group_index=answer.next_group_index,
        next_sample_index=answer.next_sample_index,
        prompts_in_dataset=answer.prompts_in_dataset,
        epoch=answer.epoch,
        next_step=answer.next_step,
        payload_bytes=answer.payload_bytes,
        evaluation_sets=tuple(answer.evaluation_sets),
        expired_leases=answer.expired_leases,
        dataset=answer.dataset,
        damaged_payloads=answer.damaged_payloads,
    )


def chunk_messages(messages: Iterable[M], max_bytes: int = CHUNK_BYTES) -> Iterator[list[M]]:
    """Yields `messages` in lists of about `max_bytes`; a larger message is a list of its own."""
    yield from chunks(messages, lambda message: message.ByteSize(), max_bytes)


def chunks(items: Iterable[T], size_of: Callable[[T], int], max_bytes: int) -> Iterator[list[T]]:
    """Yields `items` in lists of about `max_bytes`; a larger item is a list of its own."""
    chunk: list[T] = []
    size = 0
    for item in items:
        length = size_of(item)
        if chunk and size + length > max_bytes:
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += length
    if chunk:
        yield chunk
