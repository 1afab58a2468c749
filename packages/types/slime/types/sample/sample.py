"""`Sample`: one response to one prompt, from the bare prompt to the scored and masked tokens of a trainer.

Shapes: L is the number of tokens of prompt and response together, R = `response_length` that of the response, whose
tokens are `tokens[L - R:]`.

Per-token fields are kept as typed arrays and read as lists of Python numbers. `sample.array(name)` returns the array,
without a conversion as long as nobody has read or set the list; slime itself uses only that. `sample.name` returns a
list, created when it is first read; from then on the list is the field's value, so changing it in place changes the
sample. Lists, arrays and CPU tensors can be set; values that the field cannot hold are refused at once. A list that is
changed in place is checked when it becomes an array again: by `array`, `validate` and the codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, overload

import numpy as np

from slime.types.errors import InvalidField
from slime.types.sample import append, validate
from slime.types.sample.fields import ArrayField, PerToken, RowCount, array_field
from slime.types.sample.parts import PrefixCacheInfo, SpecInfo, TokenSpan
from slime.types.sample.status import SampleStatus


@dataclass(eq=False)
class Sample:
    """One response to one prompt; the module explains L and R. Unknown attributes are kept, and travel as JSON.

    A field is declared here and in proto/slime/v1/sample.proto; codec, validation, appending, JSON and defaults follow.
    """

    group_index: int | None = None
    index: int | None = None
    # Shared by the samples of one trajectory; None: the sample is a trajectory of its own.
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    # int32 [L]
    tokens: PerToken[list[int]] = array_field(np.int32, RowCount.ANY, check=validate.check_token_ids, required=True)
    # Trees of dicts, lists, text, bytes, numbers and arrays: raw inputs, and the processor's output for them.
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    # uint8 [R]: 1 where the token is trained on. None: all of them.
    loss_mask: PerToken[list[int] | None] = array_field(np.uint8, RowCount.RESPONSE, check=validate.check_mask)
    # One per request of the response.
    weight_versions: list[str] = field(default_factory=list)
    # float32 [R]
    rollout_log_probs: PerToken[list[float] | None] = array_field(
        np.float32, RowCount.RESPONSE, check=validate.check_log_probs
    )
    # Nucleus of response token i: ids[offsets[i]:offsets[i + 1]]; int32 [offsets[R]] and int64 [R + 1].
    rollout_top_p_token_ids: PerToken[list[int] | None] = array_field(
        np.int32, RowCount.ANY, check=validate.check_token_ids
    )
    rollout_top_p_token_offsets: PerToken[list[int] | None] = array_field(np.int64, RowCount.BOUNDS)
    # Integer [L - 1, layers, top_k]
    rollout_routed_experts: np.ndarray | None = array_field(np.int32, RowCount.PAIRS, ndim=3)
    remove_sample: bool = False
    # float32 [R], of another model, for distillation
    teacher_log_probs: PerToken[list[float] | None] = array_field(
        np.float32, RowCount.RESPONSE, check=validate.check_log_probs
    )
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    # Requests of one session go to the same engine.
    session_id: str | None = None
    # Seconds spent on tools and environments.
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    # The model and weight version of each response token, as ranges in order.
    spans: list[TokenSpan] = field(default_factory=list)

    Status: ClassVar[type[SampleStatus]] = SampleStatus
    SpecInfo: ClassVar[type[SpecInfo]] = SpecInfo
    PrefixCacheInfo: ClassVar[type[PrefixCacheInfo]] = PrefixCacheInfo
    array_fields: ClassVar[dict[str, ArrayField]]

    def __setattr__(self, name: str, value: Any) -> None:
        declared = _ARRAYS.get(name)
        if declared is None:
            object.__setattr__(self, name, value)
            return
        array = declared.convert(name, value)
        # A valid list stays the same object, as with any attribute.
        self.__dict__[name] = value if isinstance(value, list) and declared.ndim == 1 else array

    @overload
    def array(self, name: Literal["tokens"]) -> np.ndarray: ...

    @overload
    def array(self, name: str) -> np.ndarray | None: ...

    def array(self, name: str) -> np.ndarray | None:
        """Returns the array of a per-token field, in the field's dtype; not to be written to.

        Raises InvalidField if a list that was changed in place no longer fits the field.
        """
        value = self.__dict__[name]
        return _ARRAYS[name].convert(name, value) if isinstance(value, list) else value

    def __eq__(self, other: object) -> bool:
        """Compares field by field, arrays by dtype, shape and value; NaN equals NaN."""
        return isinstance(other, Sample) and _same(_with_arrays(self), _with_arrays(other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        mask = self.array("loss_mask")
        return self.response_length if mask is None else int(np.count_nonzero(mask))

    def get_reward_value(self, args: Any) -> float:
        """Returns `reward`, or its entry `args.reward_key` if that is set."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward  # type: ignore[index, return-value]

    def to_dict(self) -> dict[str, Any]:
        """Returns all attributes by name: the status as text, infos and spans as dicts, the others as they are."""
        return (
            self.__dict__
            | {name: getattr(self, name) for name in _LISTS}
            | {name: getattr(self, name).to_dict() for name in _INFOS}
            | {"status": self.status.value, "spans": [dataclasses.asdict(span) for span in self.spans]}
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Inverts `to_dict`; keys that are not fields become attributes. Raises InvalidField for an unknown status."""
        values = dict(data)
        status = values.get("status", SampleStatus.PENDING)
        try:
            values["status"] = SampleStatus(status)
        except ValueError:
            raise InvalidField("status", status, "one of " + ", ".join(s.value for s in SampleStatus)) from None
        for name, info in _INFOS.items():
            if isinstance(values.get(name, {}), Mapping):
                values[name] = info.from_dict(values.get(name, {}))
        values["spans"] = [
            span if isinstance(span, TokenSpan) else TokenSpan(**span) for span in values.get("spans", ())
        ]
        sample = cls(**{name: values.pop(name) for name in FIELD_NAMES if name in values})
        for name, value in values.items():
            setattr(sample, name, value)
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends n response tokens and keeps every per-token field aligned.

        tokens: n ids. trainable: whether the policy generated them; then `log_probs` (n) are required. Tokens of a tool
        or an environment have no log-probs; they get log-prob 0 and loss mask 0.
        A loss mask that was missing becomes 1 for all earlier tokens.
        meta_info: the engine's information about this request (weight version, cache, finish reason, nucleus, experts);
        its finish reason sets `status` unless `update_terminal_info` is False.

        Raises InvalidField, and then the sample is unchanged.
        """
        append.append_response_tokens(
            self,
            args,
            tokens,
            log_probs,
            trainable=trainable,
            meta_info=meta_info,
            text=text,
            update_terminal_info=update_terminal_info,
        )

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Adds weight version, counts and finish reason of one request, without tokens."""
        append.apply_request_info(self, args, meta_info, update_terminal_info=True)

    def validate(self) -> None:
        """Raises InvalidField if fields disagree; it names the field and both lengths."""
        validate.validate_sample(self)


_FIELDS = dataclasses.fields(Sample)
FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in _FIELDS)
_ARRAYS = Sample.array_fields = {f.name: f.metadata["array"] for f in _FIELDS if "array" in f.metadata}
_LISTS = tuple(name for name, declared in _ARRAYS.items() if declared.ndim == 1)
_INFOS: dict[str, Any] = {f.name: f.default_factory for f in _FIELDS if hasattr(f.default_factory, "from_dict")}

for _name in _LISTS:
    setattr(Sample, _name, PerToken[Any](_name))


@dataclass
class SampleGroup:
    """The samples of one prompt. `dataset` is "train", or the name of an evaluation set."""

    group_index: int
    dataset: str = "train"
    samples: list[Sample] = field(default_factory=list)


def _with_arrays(sample: Sample) -> dict[str, Any]:
    return sample.__dict__ | {name: sample.array(name) for name in _LISTS}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)) or a.dtype != b.dtype:
            return False
        return np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b) or (a != a and b != b)
