from slime.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GroupState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_STATE_UNSPECIFIED: _ClassVar[GroupState]
    GROUP_STATE_READY: _ClassVar[GroupState]
    GROUP_STATE_LEASED: _ClassVar[GroupState]
    GROUP_STATE_COMPLETED: _ClassVar[GroupState]
    GROUP_STATE_SEALED: _ClassVar[GroupState]
    GROUP_STATE_ACKNOWLEDGED: _ClassVar[GroupState]
    GROUP_STATE_COMMITTED: _ClassVar[GroupState]
    GROUP_STATE_REJECTED: _ClassVar[GroupState]
    GROUP_STATE_QUARANTINED: _ClassVar[GroupState]

class StalenessPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STALENESS_POLICY_UNSPECIFIED: _ClassVar[StalenessPolicy]
    STALENESS_POLICY_WAIT: _ClassVar[StalenessPolicy]
    STALENESS_POLICY_DROP: _ClassVar[StalenessPolicy]
    STALENESS_POLICY_KEEP: _ClassVar[StalenessPolicy]
GROUP_STATE_UNSPECIFIED: GroupState
GROUP_STATE_READY: GroupState
GROUP_STATE_LEASED: GroupState
GROUP_STATE_COMPLETED: GroupState
GROUP_STATE_SEALED: GroupState
GROUP_STATE_ACKNOWLEDGED: GroupState
GROUP_STATE_COMMITTED: GroupState
GROUP_STATE_REJECTED: GroupState
GROUP_STATE_QUARANTINED: GroupState
STALENESS_POLICY_UNSPECIFIED: StalenessPolicy
STALENESS_POLICY_WAIT: StalenessPolicy
STALENESS_POLICY_DROP: StalenessPolicy
STALENESS_POLICY_KEEP: StalenessPolicy

class Writer(_message.Message):
    __slots__ = ("run_id", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("run_id", "last_committed_step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMITTED_STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    last_committed_step: int
    def __init__(self, run_id: _Optional[str] = ..., last_committed_step: _Optional[int] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("writer", "next_step")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    next_step: int
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., next_step: _Optional[int] = ...) -> None: ...

class GetRunRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("writer",)
    WRITER_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("text", "messages_json", "label", "metadata_json")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    text: str
    messages_json: str
    label: str
    metadata_json: str
    def __init__(self, text: _Optional[str] = ..., messages_json: _Optional[str] = ..., label: _Optional[str] = ..., metadata_json: _Optional[str] = ...) -> None: ...

class AddPromptsRequest(_message.Message):
    __slots__ = ("key", "dataset", "prompts")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    dataset: str
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    def __init__(self, key: _Optional[str] = ..., dataset: _Optional[str] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ...) -> None: ...

class AddPromptsResponse(_message.Message):
    __slots__ = ("added", "first_group_index", "duplicate")
    ADDED_FIELD_NUMBER: _ClassVar[int]
    FIRST_GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    added: int
    first_group_index: int
    duplicate: bool
    def __init__(self, added: _Optional[int] = ..., first_group_index: _Optional[int] = ..., duplicate: bool = ...) -> None: ...

class Pace(_message.Message):
    __slots__ = ("max_staleness", "policy", "groups_per_step", "stop_step", "weight_version")
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    GROUPS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    STOP_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    max_staleness: int
    policy: StalenessPolicy
    groups_per_step: int
    stop_step: int
    weight_version: int
    def __init__(self, max_staleness: _Optional[int] = ..., policy: _Optional[_Union[StalenessPolicy, str]] = ..., groups_per_step: _Optional[int] = ..., stop_step: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class LeaseGroupsRequest(_message.Message):
    __slots__ = ("writer", "worker_id", "max_groups", "ttl_seconds", "wait_seconds", "pace", "request_id", "together")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_GROUPS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOGETHER_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    worker_id: str
    max_groups: int
    ttl_seconds: float
    wait_seconds: float
    pace: Pace
    request_id: str
    together: bool
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., worker_id: _Optional[str] = ..., max_groups: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ..., request_id: _Optional[str] = ..., together: bool = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("group_index", "token", "expires_in_seconds", "attempt")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    token: str
    expires_in_seconds: float
    attempt: int
    def __init__(self, group_index: _Optional[int] = ..., token: _Optional[str] = ..., expires_in_seconds: _Optional[float] = ..., attempt: _Optional[int] = ...) -> None: ...

class LeaseGroupsResponse(_message.Message):
    __slots__ = ("lease", "group", "more")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    lease: Lease
    group: _sample_pb2.SampleGroup
    more: _containers.RepeatedCompositeFieldContainer[LeaseGroupsResponse]
    def __init__(self, lease: _Optional[_Union[Lease, _Mapping]] = ..., group: _Optional[_Union[_sample_pb2.SampleGroup, _Mapping]] = ..., more: _Optional[_Iterable[_Union[LeaseGroupsResponse, _Mapping]]] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("writer", "tokens", "ttl_seconds")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    tokens: _containers.RepeatedScalarFieldContainer[str]
    ttl_seconds: float
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., tokens: _Optional[_Iterable[str]] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("lost_tokens",)
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lost_tokens: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost_tokens: _Optional[_Iterable[str]] = ...) -> None: ...

class ReturnGroupRequest(_message.Message):
    __slots__ = ("writer", "lease_token", "samples", "commit")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    lease_token: str
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Sample]
    commit: bool
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., lease_token: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[_sample_pb2.Sample, _Mapping]]] = ..., commit: bool = ...) -> None: ...

class ReturnGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CompleteGroupRequest(_message.Message):
    __slots__ = ("writer", "lease_token", "samples", "commit")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    lease_token: str
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Sample]
    commit: bool
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., lease_token: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[_sample_pb2.Sample, _Mapping]]] = ..., commit: bool = ...) -> None: ...

class CompleteGroupResponse(_message.Message):
    __slots__ = ("duplicate",)
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    def __init__(self, duplicate: bool = ...) -> None: ...

class CompleteGroupsRequest(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[CompleteGroupRequest]
    def __init__(self, parts: _Optional[_Iterable[_Union[CompleteGroupRequest, _Mapping]]] = ...) -> None: ...

class CompleteGroupsResponse(_message.Message):
    __slots__ = ("duplicates",)
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    duplicates: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, duplicates: _Optional[_Iterable[bool]] = ...) -> None: ...

class RejectGroupRequest(_message.Message):
    __slots__ = ("writer", "lease_token", "reason")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    LEASE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    lease_token: str
    reason: str
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., lease_token: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RejectGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RequeueGroupsRequest(_message.Message):
    __slots__ = ("writer", "worker_id", "unsealed")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    UNSEALED_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    worker_id: str
    unsealed: bool
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., worker_id: _Optional[str] = ..., unsealed: bool = ...) -> None: ...

class RequeueGroupsResponse(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: int
    def __init__(self, groups: _Optional[int] = ...) -> None: ...

class SampleSummary(_message.Message):
    __slots__ = ("index", "group_index", "rollout_id", "total_length", "response_length", "loss_mask_sum", "reward_value", "reward_json", "status", "remove_sample", "metadata_json", "oldest_weight_version", "newest_weight_version", "non_generation_time")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_SUM_FIELD_NUMBER: _ClassVar[int]
    REWARD_VALUE_FIELD_NUMBER: _ClassVar[int]
    REWARD_JSON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    OLDEST_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    NON_GENERATION_TIME_FIELD_NUMBER: _ClassVar[int]
    index: int
    group_index: int
    rollout_id: int
    total_length: int
    response_length: int
    loss_mask_sum: int
    reward_value: float
    reward_json: str
    status: _sample_pb2.SampleStatus
    remove_sample: bool
    metadata_json: str
    oldest_weight_version: int
    newest_weight_version: int
    non_generation_time: float
    def __init__(self, index: _Optional[int] = ..., group_index: _Optional[int] = ..., rollout_id: _Optional[int] = ..., total_length: _Optional[int] = ..., response_length: _Optional[int] = ..., loss_mask_sum: _Optional[int] = ..., reward_value: _Optional[float] = ..., reward_json: _Optional[str] = ..., status: _Optional[_Union[_sample_pb2.SampleStatus, str]] = ..., remove_sample: bool = ..., metadata_json: _Optional[str] = ..., oldest_weight_version: _Optional[int] = ..., newest_weight_version: _Optional[int] = ..., non_generation_time: _Optional[float] = ...) -> None: ...

class SealStepRequest(_message.Message):
    __slots__ = ("writer", "step", "num_groups", "wait_seconds", "metrics", "pace")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    step: int
    num_groups: int
    wait_seconds: float
    metrics: _containers.ScalarMap[str, float]
    pace: Pace
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., step: _Optional[int] = ..., num_groups: _Optional[int] = ..., wait_seconds: _Optional[float] = ..., metrics: _Optional[_Mapping[str, float]] = ..., pace: _Optional[_Union[Pace, _Mapping]] = ...) -> None: ...

class SealStepResponse(_message.Message):
    __slots__ = ("samples", "metrics", "rejected")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[SampleSummary]
    metrics: _containers.ScalarMap[str, float]
    rejected: _containers.ScalarMap[str, int]
    def __init__(self, samples: _Optional[_Iterable[_Union[SampleSummary, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., rejected: _Optional[_Mapping[str, int]] = ...) -> None: ...

class StorePlanRequest(_message.Message):
    __slots__ = ("writer", "step", "plan_json")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    step: int
    plan_json: str
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., step: _Optional[int] = ..., plan_json: _Optional[str] = ...) -> None: ...

class StorePlanResponse(_message.Message):
    __slots__ = ("plan_json",)
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    plan_json: str
    def __init__(self, plan_json: _Optional[str] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ("step", "wait_seconds")
    STEP_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    wait_seconds: float
    def __init__(self, step: _Optional[int] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("plan_json",)
    PLAN_JSON_FIELD_NUMBER: _ClassVar[int]
    plan_json: str
    def __init__(self, plan_json: _Optional[str] = ...) -> None: ...

class ReadStepRequest(_message.Message):
    __slots__ = ("step", "positions", "blob_store", "leave_damaged")
    STEP_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    BLOB_STORE_FIELD_NUMBER: _ClassVar[int]
    LEAVE_DAMAGED_FIELD_NUMBER: _ClassVar[int]
    step: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    blob_store: str
    leave_damaged: bool
    def __init__(self, step: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ..., blob_store: _Optional[str] = ..., leave_damaged: bool = ...) -> None: ...

class ReadStepResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Sample]
    def __init__(self, samples: _Optional[_Iterable[_Union[_sample_pb2.Sample, _Mapping]]] = ...) -> None: ...

class AcknowledgeStepRequest(_message.Message):
    __slots__ = ("writer", "step")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    step: int
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class AcknowledgeStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CommitStepsRequest(_message.Message):
    __slots__ = ("writer", "step")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    step: int
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., step: _Optional[int] = ...) -> None: ...

class CommitStepsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RewindStepsRequest(_message.Message):
    __slots__ = ("writer", "last_step")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    LAST_STEP_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    last_step: int
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., last_step: _Optional[int] = ...) -> None: ...

class RewindStepsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadGroupsRequest(_message.Message):
    __slots__ = ("states", "group_indexes", "limit", "after_group_index")
    STATES_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEXES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[GroupState]
    group_indexes: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    after_group_index: int
    def __init__(self, states: _Optional[_Iterable[_Union[GroupState, str]]] = ..., group_indexes: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., after_group_index: _Optional[int] = ...) -> None: ...

class ReadGroupsResponse(_message.Message):
    __slots__ = ("group", "state", "reject_reason", "step")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REJECT_REASON_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    group: _sample_pb2.SampleGroup
    state: GroupState
    reject_reason: str
    step: int
    def __init__(self, group: _Optional[_Union[_sample_pb2.SampleGroup, _Mapping]] = ..., state: _Optional[_Union[GroupState, str]] = ..., reject_reason: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class ListGroupsRequest(_message.Message):
    __slots__ = ("states", "group_indexes", "limit", "after_group_index")
    STATES_FIELD_NUMBER: _ClassVar[int]
    GROUP_INDEXES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    AFTER_GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[GroupState]
    group_indexes: _containers.RepeatedScalarFieldContainer[int]
    limit: int
    after_group_index: int
    def __init__(self, states: _Optional[_Iterable[_Union[GroupState, str]]] = ..., group_indexes: _Optional[_Iterable[int]] = ..., limit: _Optional[int] = ..., after_group_index: _Optional[int] = ...) -> None: ...

class ListGroupsResponse(_message.Message):
    __slots__ = ("group_index", "dataset", "state", "num_samples", "payload_bytes", "attempt", "worker_id", "step", "reason")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    dataset: str
    state: GroupState
    num_samples: int
    payload_bytes: int
    attempt: int
    worker_id: str
    step: int
    reason: str
    def __init__(self, group_index: _Optional[int] = ..., dataset: _Optional[str] = ..., state: _Optional[_Union[GroupState, str]] = ..., num_samples: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., attempt: _Optional[int] = ..., worker_id: _Optional[str] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class DropGroupsRequest(_message.Message):
    __slots__ = ("group_indexes", "reason", "quarantine")
    GROUP_INDEXES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    QUARANTINE_FIELD_NUMBER: _ClassVar[int]
    group_indexes: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    quarantine: bool
    def __init__(self, group_indexes: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., quarantine: bool = ...) -> None: ...

class DropGroupsResponse(_message.Message):
    __slots__ = ("unsealed_steps",)
    UNSEALED_STEPS_FIELD_NUMBER: _ClassVar[int]
    unsealed_steps: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, unsealed_steps: _Optional[_Iterable[int]] = ...) -> None: ...

class ReadEvaluationSetRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ReadEvaluationSetResponse(_message.Message):
    __slots__ = ("group",)
    GROUP_FIELD_NUMBER: _ClassVar[int]
    group: _sample_pb2.SampleGroup
    def __init__(self, group: _Optional[_Union[_sample_pb2.SampleGroup, _Mapping]] = ...) -> None: ...

class ReadPlaceRequest(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class ReadPlaceResponse(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: bytes
    def __init__(self, part: _Optional[bytes] = ...) -> None: ...

class GetStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatsResponse(_message.Message):
    __slots__ = ("writer", "groups", "rejected", "next_group_index", "next_sample_index", "prompts_in_dataset", "epoch", "next_step", "payload_bytes", "evaluation_sets", "expired_leases", "dataset", "damaged_payloads")
    class GroupsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class RejectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WRITER_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    NEXT_GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    NEXT_SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_IN_DATASET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_SETS_FIELD_NUMBER: _ClassVar[int]
    EXPIRED_LEASES_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_PAYLOADS_FIELD_NUMBER: _ClassVar[int]
    writer: Writer
    groups: _containers.ScalarMap[str, int]
    rejected: _containers.ScalarMap[str, int]
    next_group_index: int
    next_sample_index: int
    prompts_in_dataset: int
    epoch: int
    next_step: int
    payload_bytes: int
    evaluation_sets: _containers.RepeatedScalarFieldContainer[str]
    expired_leases: int
    dataset: str
    damaged_payloads: int
    def __init__(self, writer: _Optional[_Union[Writer, _Mapping]] = ..., groups: _Optional[_Mapping[str, int]] = ..., rejected: _Optional[_Mapping[str, int]] = ..., next_group_index: _Optional[int] = ..., next_sample_index: _Optional[int] = ..., prompts_in_dataset: _Optional[int] = ..., epoch: _Optional[int] = ..., next_step: _Optional[int] = ..., payload_bytes: _Optional[int] = ..., evaluation_sets: _Optional[_Iterable[str]] = ..., expired_leases: _Optional[int] = ..., dataset: _Optional[str] = ..., damaged_payloads: _Optional[int] = ...) -> None: ...
