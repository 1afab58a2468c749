from slime.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SampleStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_STATUS_UNSPECIFIED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_PENDING: _ClassVar[SampleStatus]
    SAMPLE_STATUS_COMPLETED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_TRUNCATED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_ABORTED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_FAILED: _ClassVar[SampleStatus]
SAMPLE_STATUS_UNSPECIFIED: SampleStatus
SAMPLE_STATUS_PENDING: SampleStatus
SAMPLE_STATUS_COMPLETED: SampleStatus
SAMPLE_STATUS_TRUNCATED: SampleStatus
SAMPLE_STATUS_ABORTED: SampleStatus
SAMPLE_STATUS_FAILED: SampleStatus

class SpecInfo(_message.Message):
    __slots__ = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct", "completion_token_num")
    SPEC_ACCEPT_TOKEN_NUM_FIELD_NUMBER: _ClassVar[int]
    SPEC_DRAFT_TOKEN_NUM_FIELD_NUMBER: _ClassVar[int]
    SPEC_VERIFY_CT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKEN_NUM_FIELD_NUMBER: _ClassVar[int]
    spec_accept_token_num: int
    spec_draft_token_num: int
    spec_verify_ct: int
    completion_token_num: int
    def __init__(self, spec_accept_token_num: _Optional[int] = ..., spec_draft_token_num: _Optional[int] = ..., spec_verify_ct: _Optional[int] = ..., completion_token_num: _Optional[int] = ...) -> None: ...

class PrefixCacheInfo(_message.Message):
    __slots__ = ("cached_tokens", "total_prompt_tokens")
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    total_prompt_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ..., total_prompt_tokens: _Optional[int] = ...) -> None: ...

class TokenSpan(_message.Message):
    __slots__ = ("start", "end", "model", "weight_version")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    model: str
    weight_version: str
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., model: _Optional[str] = ..., weight_version: _Optional[str] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("group_index", "index", "rollout_id", "session_id", "prompt_text", "prompt_messages_json", "apply_chat_template_kwargs_json", "multimodal_inputs", "multimodal_train_inputs", "multimodal_train_input_id", "tokens", "response", "response_length", "loss_mask", "rollout_log_probs", "teacher_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts", "label_text", "label_json", "reward_value", "reward_json", "status", "remove_sample", "weight_versions", "spans", "metadata_json", "train_metadata_json", "generate_function_path", "custom_rm_path", "non_generation_time", "spec_info", "prefix_cache_info", "extra_json")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_MESSAGES_JSON_FIELD_NUMBER: _ClassVar[int]
    APPLY_CHAT_TEMPLATE_KWARGS_JSON_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_TRAIN_INPUTS_FIELD_NUMBER: _ClassVar[int]
    MULTIMODAL_TRAIN_INPUT_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LOSS_MASK_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TEACHER_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_TOP_P_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_TOP_P_TOKEN_OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    LABEL_TEXT_FIELD_NUMBER: _ClassVar[int]
    LABEL_JSON_FIELD_NUMBER: _ClassVar[int]
    REWARD_VALUE_FIELD_NUMBER: _ClassVar[int]
    REWARD_JSON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REMOVE_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    TRAIN_METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    GENERATE_FUNCTION_PATH_FIELD_NUMBER: _ClassVar[int]
    CUSTOM_RM_PATH_FIELD_NUMBER: _ClassVar[int]
    NON_GENERATION_TIME_FIELD_NUMBER: _ClassVar[int]
    SPEC_INFO_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_INFO_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    index: int
    rollout_id: int
    session_id: str
    prompt_text: str
    prompt_messages_json: str
    apply_chat_template_kwargs_json: str
    multimodal_inputs: _tensor_pb2.Value
    multimodal_train_inputs: _tensor_pb2.Value
    multimodal_train_input_id: str
    tokens: _tensor_pb2.Tensor
    response: str
    response_length: int
    loss_mask: _tensor_pb2.Tensor
    rollout_log_probs: _tensor_pb2.Tensor
    teacher_log_probs: _tensor_pb2.Tensor
    rollout_top_p_token_ids: _tensor_pb2.Tensor
    rollout_top_p_token_offsets: _tensor_pb2.Tensor
    rollout_routed_experts: _tensor_pb2.Tensor
    label_text: str
    label_json: str
    reward_value: float
    reward_json: str
    status: SampleStatus
    remove_sample: bool
    weight_versions: _containers.RepeatedScalarFieldContainer[str]
    spans: _containers.RepeatedCompositeFieldContainer[TokenSpan]
    metadata_json: str
    train_metadata_json: str
    generate_function_path: str
    custom_rm_path: str
    non_generation_time: float
    spec_info: SpecInfo
    prefix_cache_info: PrefixCacheInfo
    extra_json: str
    def __init__(self, group_index: _Optional[int] = ..., index: _Optional[int] = ..., rollout_id: _Optional[int] = ..., session_id: _Optional[str] = ..., prompt_text: _Optional[str] = ..., prompt_messages_json: _Optional[str] = ..., apply_chat_template_kwargs_json: _Optional[str] = ..., multimodal_inputs: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., multimodal_train_inputs: _Optional[_Union[_tensor_pb2.Value, _Mapping]] = ..., multimodal_train_input_id: _Optional[str] = ..., tokens: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., response: _Optional[str] = ..., response_length: _Optional[int] = ..., loss_mask: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rollout_log_probs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., teacher_log_probs: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rollout_top_p_token_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rollout_top_p_token_offsets: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., rollout_routed_experts: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., label_text: _Optional[str] = ..., label_json: _Optional[str] = ..., reward_value: _Optional[float] = ..., reward_json: _Optional[str] = ..., status: _Optional[_Union[SampleStatus, str]] = ..., remove_sample: bool = ..., weight_versions: _Optional[_Iterable[str]] = ..., spans: _Optional[_Iterable[_Union[TokenSpan, _Mapping]]] = ..., metadata_json: _Optional[str] = ..., train_metadata_json: _Optional[str] = ..., generate_function_path: _Optional[str] = ..., custom_rm_path: _Optional[str] = ..., non_generation_time: _Optional[float] = ..., spec_info: _Optional[_Union[SpecInfo, _Mapping]] = ..., prefix_cache_info: _Optional[_Union[PrefixCacheInfo, _Mapping]] = ..., extra_json: _Optional[str] = ...) -> None: ...

class SampleGroup(_message.Message):
    __slots__ = ("group_index", "dataset", "samples")
    GROUP_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATASET_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    group_index: int
    dataset: str
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    def __init__(self, group_index: _Optional[int] = ..., dataset: _Optional[str] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ...) -> None: ...
