from slime.v1 import sample_pb2 as _sample_pb2
from slime.v1 import buffer_pb2 as _buffer_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Engine(_message.Message):
    __slots__ = ("name", "url", "kind", "healthy", "weight_version", "tp_size", "api_key", "weight_transports", "awaits_weights", "in_flight", "delta_carriers", "model", "keeps_weights", "first_rank")
    NAME_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    API_KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    AWAITS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DELTA_CARRIERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEPS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_RANK_FIELD_NUMBER: _ClassVar[int]
    name: str
    url: str
    kind: str
    healthy: bool
    weight_version: int
    tp_size: int
    api_key: str
    weight_transports: _containers.RepeatedScalarFieldContainer[str]
    awaits_weights: bool
    in_flight: int
    delta_carriers: _containers.RepeatedScalarFieldContainer[str]
    model: str
    keeps_weights: bool
    first_rank: int
    def __init__(self, name: _Optional[str] = ..., url: _Optional[str] = ..., kind: _Optional[str] = ..., healthy: bool = ..., weight_version: _Optional[int] = ..., tp_size: _Optional[int] = ..., api_key: _Optional[str] = ..., weight_transports: _Optional[_Iterable[str]] = ..., awaits_weights: bool = ..., in_flight: _Optional[int] = ..., delta_carriers: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ..., keeps_weights: bool = ..., first_rank: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("engines", "weight_version", "running_rollouts", "engine_restarts", "restarts_engines", "trained_engine_restarts")
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_ENGINES_FIELD_NUMBER: _ClassVar[int]
    TRAINED_ENGINE_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    weight_version: int
    running_rollouts: int
    engine_restarts: int
    restarts_engines: bool
    trained_engine_restarts: int
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ..., weight_version: _Optional[int] = ..., running_rollouts: _Optional[int] = ..., engine_restarts: _Optional[int] = ..., restarts_engines: bool = ..., trained_engine_restarts: _Optional[int] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("writer", "rollout_id", "num_groups", "pace", "without_summary_metrics")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_SUMMARY_METRICS_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    rollout_id: int
    num_groups: int
    pace: _buffer_pb2.Pace
    without_summary_metrics: bool
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., rollout_id: _Optional[int] = ..., num_groups: _Optional[int] = ..., pace: _Optional[_Union[_buffer_pb2.Pace, _Mapping]] = ..., without_summary_metrics: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("completed_groups", "num_groups", "metrics", "examples", "done")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COMPLETED_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    completed_groups: int
    num_groups: int
    metrics: _containers.ScalarMap[str, float]
    examples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Sample]
    done: bool
    def __init__(self, completed_groups: _Optional[int] = ..., num_groups: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., examples: _Optional[_Iterable[_Union[_sample_pb2.Sample, _Mapping]]] = ..., done: bool = ...) -> None: ...

class EvaluateRequest(_message.Message):
    __slots__ = ("rollout_id", "names")
    ROLLOUT_ID_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    rollout_id: int
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, rollout_id: _Optional[int] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class EvaluateResponse(_message.Message):
    __slots__ = ("completed_samples", "num_samples", "metrics", "examples", "done")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    COMPLETED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    EXAMPLES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    completed_samples: int
    num_samples: int
    metrics: _containers.ScalarMap[str, float]
    examples: _containers.RepeatedCompositeFieldContainer[_sample_pb2.Sample]
    done: bool
    def __init__(self, completed_samples: _Optional[int] = ..., num_samples: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ..., examples: _Optional[_Iterable[_Union[_sample_pb2.Sample, _Mapping]]] = ..., done: bool = ...) -> None: ...

class BeginWeightUpdateRequest(_message.Message):
    __slots__ = ("writer", "weight_version", "joining")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    JOINING_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    weight_version: int
    joining: bool
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., weight_version: _Optional[int] = ..., joining: bool = ...) -> None: ...

class BeginWeightUpdateResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    def __init__(self, engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ...) -> None: ...

class CommitWeightUpdateRequest(_message.Message):
    __slots__ = ("writer", "weight_version")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    weight_version: int
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., weight_version: _Optional[int] = ...) -> None: ...

class CommitWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortWeightUpdateRequest(_message.Message):
    __slots__ = ("writer", "weight_version", "reason")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    weight_version: int
    reason: str
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., weight_version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortWeightUpdateResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OffloadRequest(_message.Message):
    __slots__ = ("writer", "parts")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class OffloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OnloadRequest(_message.Message):
    __slots__ = ("writer", "parts")
    WRITER_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    writer: _buffer_pb2.Writer
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, writer: _Optional[_Union[_buffer_pb2.Writer, _Mapping]] = ..., parts: _Optional[_Iterable[str]] = ...) -> None: ...

class OnloadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AddEngineRequest(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class AddEngineResponse(_message.Message):
    __slots__ = ("engine",)
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    engine: Engine
    def __init__(self, engine: _Optional[_Union[Engine, _Mapping]] = ...) -> None: ...

class RemoveEngineRequest(_message.Message):
    __slots__ = ("url",)
    URL_FIELD_NUMBER: _ClassVar[int]
    url: str
    def __init__(self, url: _Optional[str] = ...) -> None: ...

class RemoveEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
