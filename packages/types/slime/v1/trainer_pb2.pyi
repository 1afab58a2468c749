from slime.v1 import buffer_pb2 as _buffer_pb2
from slime.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetInfoResponse(_message.Message):
    __slots__ = ("rank", "world_size", "backend", "device", "num_parameters", "next_step", "weight_version")
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    rank: int
    world_size: int
    backend: str
    device: str
    num_parameters: int
    next_step: int
    weight_version: int
    def __init__(self, rank: _Optional[int] = ..., world_size: _Optional[int] = ..., backend: _Optional[str] = ..., device: _Optional[str] = ..., num_parameters: _Optional[int] = ..., next_step: _Optional[int] = ..., weight_version: _Optional[int] = ...) -> None: ...

class TrainStepRequest(_message.Message):
    __slots__ = ("writer", "step", "num_groups", "log_prob_positions")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    step: int
    num_groups: int
    log_prob_positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., step: _Optional[int] = ..., num_groups: _Optional[int] = ..., log_prob_positions: _Optional[_Iterable[int]] = ...) -> None: ...

class TrainStepResponse(_message.Message):
    __slots__ = ("metrics", "log_probs")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class LogProbsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: _tensor_pb2.Tensor
        def __init__(self, key: _Optional[int] = ..., value: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    log_probs: _containers.MessageMap[int, _tensor_pb2.Tensor]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ..., log_probs: _Optional[_Mapping[int, _tensor_pb2.Tensor]] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("writer", "weight_version", "joining")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    weight_version: int
    joining: bool
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., weight_version: _Optional[int] = ..., joining: bool = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("metrics",)
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    METRICS_FIELD_NUMBER: _ClassVar[int]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("writer", "step", "path", "for_restart")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FOR_RESTART_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    step: int
    path: str
    for_restart: bool
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., step: _Optional[int] = ..., path: _Optional[str] = ..., for_restart: bool = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("path",)
    PATH_FIELD_NUMBER: _ClassVar[int]
    path: str
    def __init__(self, path: _Optional[str] = ...) -> None: ...
