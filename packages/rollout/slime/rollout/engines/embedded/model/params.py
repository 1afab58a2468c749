"""Sampling parameters under SGLang's names, and their checks."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.rollout.chat.template import check_text
from slime.types.errors import InvalidField
from slime.types.shared_settings import LOWEST_TEMPERATURE

# SGLang's fields that this engine does not support, each with the values that mean "off"; other values are refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "spaces_between_special_tokens": (True, False, None),  # changes only how special tokens look in the text
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, [], ""),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "n": (1, None),
}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one response; names, defaults and meanings are SGLang's.

    temperature: 0 is greedy. top_k: -1 is off. sampling_seed: if set, tokens depend on (seed, position, logits) only.
    stream_interval: tokens between two pieces of a streamed response.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_new_tokens: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    stream_interval: int = 1


def parse_sampling_params(values: Any, field: str = "sampling_params") -> SamplingParams:
    """Returns the checked parameters. Raises InvalidField naming the parameter, its value and what was expected; for an
    unknown parameter with the nearest name."""
    if values is None:
        return SamplingParams()
    if not isinstance(values, Mapping):
        raise InvalidField(field, values, "an object of sampling parameters")
    known = set(SamplingParams.__dataclass_fields__)
    for name, value in values.items():
        if name in NEUTRAL:
            if not any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in NEUTRAL[name]):
                raise InvalidField(
                    f"{field}.{name}", value, f"{NEUTRAL[name][0]!r}: the embedded engine does not offer it"
                )
        elif name not in known:
            near = difflib.get_close_matches(name, sorted(known | set(NEUTRAL)), n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(known))}"
            raise InvalidField(f"{field}.{name}", value, hint, f"{field}: unknown sampling parameter {name!r}; {hint}")
    explicit = {name: value for name, value in values.items() if name in known and value is not None}
    checked: dict[str, Any] = {name: _READERS[name](f"{field}.{name}", value) for name, value in explicit.items()}
    params = SamplingParams(**checked)
    if params.min_new_tokens > params.max_new_tokens:
        raise InvalidField(
            f"{field}.min_new_tokens", params.min_new_tokens, f"at most max_new_tokens {params.max_new_tokens}"
        )
    return params


def _number(low: float, high: float, expected: str, *, above: bool = False) -> Callable[[str, Any], float]:
    def read(field: str, value: Any) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or (above and value == low):
            raise InvalidField(field, value, expected)
        return float(value)

    return read


def _temperature(field: str, value: Any) -> float:
    temperature = _number(0, 1e6, "a number from 0 to 1000000")(field, value)
    return temperature if temperature >= LOWEST_TEMPERATURE else 0.0


def _integer(low: int, expected: str, *, also: tuple[int, ...] = ()) -> Callable[[str, Any], int]:
    def read(field: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or (value < low and value not in also):
            raise InvalidField(field, value, expected)
        return value

    return read


def _flag(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidField(field, value, "true or false")
    return value


def _texts(field: str, value: Any) -> tuple[str, ...]:
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(t, str) for t in texts):
        raise InvalidField(field, value, "a text or a list of texts")
    for text in texts:
        check_text(text, field)
    return tuple(t for t in texts if t)


def _tokens(field: str, value: Any) -> frozenset[int]:
    tokens = () if value is None else value
    if not isinstance(tokens, (list, tuple)) or not all(isinstance(t, int) and not isinstance(t, bool) for t in tokens):
        raise InvalidField(field, value, "a list of token ids")
    return frozenset(tokens)


def _seed(field: str, value: Any) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise InvalidField(field, value, "an integer of 64 bits")
    return value


_READERS = {
    "temperature": _temperature,
    "top_p": _number(0, 1, "a number above 0, at most 1", above=True),
    "top_k": _integer(1, "an integer, at least 1, or -1 for all", also=(-1,)),
    "min_new_tokens": _integer(0, "an integer, at least 0"),
    "max_new_tokens": _integer(1, "an integer, at least 1"),
    "stop": _texts,
    "stop_token_ids": _tokens,
    "ignore_eos": _flag,
    "skip_special_tokens": _flag,
    "no_stop_trim": _flag,
    "sampling_seed": _seed,
    "stream_interval": _integer(1, "an integer, at least 1"),
}
