"""`Sample`: one response to one prompt, from the prompt alone to the scored, masked tokens that a trainer reads.

Shapes: L is the number of tokens of prompt and response together, R = `response_length` that of the response, whose
tokens are `tokens[L - R:]`.

Per-token fields are kept as typed arrays and read as lists of Python numbers. `sample.array(name)` gives the array, at
no cost while nobody has read or set the list: that is what the code of slime uses. `sample.name` gives a list, made the
first time that it is read; from then on the list is the field's value, so changing it in place changes the sample.
Lists, arrays and CPU tensors can be set; what is no array of the field is refused at once. A list that is changed in
place later is checked when it becomes an array again: by `array`, `validate` and the codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Literal, TypeVar, overload

import numpy as np

from slime.types import arrays
from slime.types.errors import InvalidField
from slime.types.status import SampleStatus

Value = TypeVar("Value")


@dataclass
class SpecInfo:
    """Speculative decoding: counts over the whole response."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Adds what the engine counted for one request, under the names of SGLang 0.5.17 or those before."""
        accepted = meta_info.get("spec_num_correct_drafts", meta_info.get("spec_accept_token_num", 0))
        drafted = meta_info.get("spec_num_proposed_drafts", meta_info.get("spec_draft_token_num", 0))
        self.spec_accept_token_num += accepted
        self.spec_draft_token_num += drafted
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> SpecInfo:
        return cls(**{f.name: data.get(f.name, 0) for f in dataclasses.fields(cls)})


@dataclass
class PrefixCacheInfo:
    """The engine's prefix cache: counts over every request of the sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> PrefixCacheInfo:
        return cls(**{f.name: data.get(f.name, 0) for f in dataclasses.fields(cls)})


@dataclass
class TokenSpan:
    """Response tokens [start, end) were made by `model` at `weight_version`."""

    start: int
    end: int
    model: str = ""
    weight_version: str = ""


def _array_or_none(dtype: Any) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else arrays.convert(name, value, dtype)


CONVERTERS: dict[str, Callable[[str, Any], Any]] = {
    "tokens": lambda name, value: arrays.convert(name, value, np.int32),
    "loss_mask": _array_or_none(np.uint8),
    "rollout_log_probs": _array_or_none(np.float32),
    "teacher_log_probs": _array_or_none(np.float32),
    "rollout_top_p_token_ids": _array_or_none(np.int32),
    "rollout_top_p_token_offsets": _array_or_none(np.int64),
    "rollout_routed_experts": lambda name, value: None if value is None else arrays.convert_integers(name, value),
}
# Routed experts are an array of three dimensions, also where they are read.
LISTS = tuple(name for name in CONVERTERS if name != "rollout_routed_experts")


class PerToken(Generic[Value]):
    """A per-token field: arrays and sequences are set, a list of numbers (or None) is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, sample: Sample | None, owner: type) -> Value:
        if sample is None:
            return self  # type: ignore[return-value]
        try:
            value = sample.__dict__[self.name]
        except KeyError:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self.name!r}") from None
        if isinstance(value, np.ndarray):
            value = sample.__dict__[self.name] = value.tolist()
        return value

    def __set__(self, sample: Sample, value: Value | Sequence[float] | np.ndarray) -> None:
        # Sample.__setattr__ writes past this; it makes the field one that an instance's dictionary does not hide.
        sample.__dict__[self.name] = value


@dataclass(eq=False)
class Sample:
    """See the module's docstring for L and R. Unknown attributes are kept, and travel as JSON."""

    group_index: int | None = None
    index: int | None = None
    # Samples that one rollout fanned out into share it; None: every sample is a rollout of its own.
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    # int32 [L]
    tokens: PerToken[list[int]] = field(default_factory=list)  # type: ignore[assignment, arg-type]
    # Trees of dicts, lists, text, bytes, numbers and arrays: raw inputs, and what the processor made of them.
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    # uint8 [R]: 1 where the token is trained on. None: all of them.
    loss_mask: PerToken[list[int] | None] = None  # type: ignore[assignment]
    # One for each request that the response took.
    weight_versions: list[str] = field(default_factory=list)
    # float32 [R]
    rollout_log_probs: PerToken[list[float] | None] = None  # type: ignore[assignment]
    # Nucleus of response token i: ids[offsets[i]:offsets[i + 1]]; int32 [offsets[R]] and int64 [R + 1].
    rollout_top_p_token_ids: PerToken[list[int] | None] = None  # type: ignore[assignment]
    rollout_top_p_token_offsets: PerToken[list[int] | None] = None  # type: ignore[assignment]
    # Integer [L - 1, layers, top_k]
    rollout_routed_experts: np.ndarray | None = None
    remove_sample: bool = False
    # float32 [R]
    teacher_log_probs: PerToken[list[float] | None] = None  # type: ignore[assignment]
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    # Requests of one session go to one engine.
    session_id: str | None = None
    # Seconds spent on tools and environments.
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    # Which model and weight version made which response tokens, in order.
    spans: list[TokenSpan] = field(default_factory=list)

    Status: ClassVar[type[SampleStatus]] = SampleStatus

    def __setattr__(self, name: str, value: Any) -> None:
        convert = CONVERTERS.get(name)
        if convert is None:
            object.__setattr__(self, name, value)
            return
        array = convert(name, value)
        # A list stays the object that was given, as with any attribute, once it is known to be one of the field.
        self.__dict__[name] = value if isinstance(value, list) and name in LISTS else array

    @overload
    def array(self, name: Literal["tokens"]) -> np.ndarray: ...

    @overload
    def array(self, name: str) -> np.ndarray | None: ...

    def array(self, name: str) -> np.ndarray | None:
        """The array of a per-token field, in the field's dtype; not to be written to. Raises InvalidField where a list
        that was changed in place is none."""
        value = self.__dict__[name]
        return CONVERTERS[name](name, value) if isinstance(value, list) else value

    def __eq__(self, other: object) -> bool:
        """Field by field; arrays by dtype, shape and value; NaN equals NaN."""
        return isinstance(other, Sample) and _same(_with_arrays(self), _with_arrays(other))

    __hash__ = None  # type: ignore[assignment]

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        mask = self.array("loss_mask")
        return self.response_length if mask is None else int(mask.sum(dtype=np.int64))

    def get_reward_value(self, args: Any) -> float:
        """`reward`, or its entry `args.reward_key` where that is set."""
        key = getattr(args, "reward_key", None)
        return self.reward[key] if key else self.reward  # type: ignore[index, return-value]

    def to_dict(self) -> dict[str, Any]:
        """Every attribute by name, the status as its text, nested infos and spans as dicts; nothing else is copied."""
        return (
            self.__dict__
            | {name: getattr(self, name) for name in LISTS}
            | {
                "status": self.status.value,
                "spec_info": self.spec_info.to_dict(),
                "prefix_cache_info": self.prefix_cache_info.to_dict(),
                "spans": [dataclasses.asdict(span) for span in self.spans],
            }
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The inverse of `to_dict`; keys that are no fields become attributes."""
        values = dict(data)
        status = values.get("status", SampleStatus.PENDING)
        try:
            values["status"] = SampleStatus(status)
        except ValueError:
            raise InvalidField("status", status, "one of " + ", ".join(s.value for s in SampleStatus)) from None
        for name, nested in (("spec_info", SpecInfo), ("prefix_cache_info", PrefixCacheInfo)):
            if isinstance(values.get(name, {}), Mapping):
                values[name] = nested.from_dict(values.get(name, {}))
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

        tokens: n ids. trainable: made by the policy, and then `log_probs` (n) are required; tokens of a tool or an
        environment are not, must not bring any, and get log-prob 0 and loss mask 0.
        A missing loss mask is filled with ones for what was there before.
        meta_info: what the engine said of this request (weight version, cache, finish reason, nucleus, experts);
        its finish reason sets `status` unless `update_terminal_info` is False.

        Raises InvalidField, and then the sample is unchanged.
        """
        from slime.types.append import append_response_tokens

        append_response_tokens(
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
        """Takes weight version, counts and finish reason of one request, without tokens."""
        from slime.types.append import apply_request_info

        apply_request_info(self, args, meta_info, update_terminal_info=True)

    def validate(self) -> None:
        """Raises InvalidField where per-token fields disagree; it names the field and both lengths."""
        from slime.types.validate import validate_sample

        validate_sample(self)


# The names that they go by where `Sample` was one class with others inside.
Sample.SpecInfo = SpecInfo  # type: ignore[attr-defined]
Sample.PrefixCacheInfo = PrefixCacheInfo  # type: ignore[attr-defined]

FIELD_NAMES: tuple[str, ...] = tuple(f.name for f in dataclasses.fields(Sample))


for _name in LISTS:
    setattr(Sample, _name, PerToken[Any](_name))


@dataclass
class SampleGroup:
    """The samples of one prompt. `dataset` is "train", or the name of an evaluation set."""

    group_index: int
    dataset: str = "train"
    samples: list[Sample] = field(default_factory=list)


def _with_arrays(sample: Sample) -> dict[str, Any]:
    return sample.__dict__ | {name: sample.array(name) for name in LISTS}


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
