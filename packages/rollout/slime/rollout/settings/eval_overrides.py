"""Settings of single evaluation sets: `{"greedy": {"temperature": 0}, "sampled": {"top_k": 5}}`.

A key replaces a setting of `RolloutSettings` for its set alone, or is a setting that only single sets have.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from slime.types.errors import InvalidSetting

Args = TypeVar("Args")

# Key -> (the setting that it replaces, its type, the expected value in words, the check of a value).
KEYS: dict[str, tuple[str, type, str, Any]] = {
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt", int, "at least 1", lambda v: v >= 1),
    "temperature": ("eval_temperature", float, "at least 0", lambda v: v >= 0),
    "top_p": ("eval_top_p", float, "more than 0, at most 1", lambda v: 0 < v <= 1),
    "top_k": ("eval_top_k", int, "-1 (off) or more than 0", lambda v: v == -1 or v > 0),
    "max_response_len": ("eval_max_response_len", int, "at least 1", lambda v: v >= 1),
    "min_new_tokens": ("eval_min_new_tokens", int, "at least 0", lambda v: v >= 0),
    "max_prompt_len": ("eval_max_prompt_len", int, "at least 1", lambda v: v >= 1),
    "stop": ("rollout_stop", list, "a list of texts", lambda v: all(item and isinstance(item, str) for item in v)),
    "stop_token_ids": ("rollout_stop_token_ids", list, "a list of token ids", lambda v: all(map(_is_token, v))),
    "repetition_penalty": ("eval_repetition_penalty", float, "more than 0", lambda v: v > 0),
    "skip_special_tokens": ("rollout_skip_special_tokens", bool, "true or false", lambda v: True),
    "apply_chat_template": ("apply_chat_template", bool, "true or false", lambda v: True),
    "apply_chat_template_kwargs": (
        "apply_chat_template_kwargs",
        dict,
        "a mapping of arguments by name",
        lambda v: all(isinstance(key, str) for key in v),
    ),
    "metadata_overrides": ("eval_metadata_overrides", dict, "a mapping of metadata", lambda v: True),
    "min_eval_samples": ("eval_min_samples", int, "at least 1", lambda v: v >= 1),
    "reward_key": ("eval_reward_key", str, "a key of the reward", bool),
    "rm_type": ("rm_type", str, "the name of a built-in reward", bool),
    "custom_rm_path": ("custom_rm_path", str, "the path of a reward function", bool),
    "custom_generate_function_path": ("custom_generate_function_path", str, "the path of a function", bool),
}
KINDS = {int: "an integer, ", float: "a number, "}


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def check_overrides(overrides: Mapping[str, Any], where: str = "eval_overrides.") -> dict[str, dict[str, Any]]:
    """Returns `overrides` with numbers of the right types. Raises InvalidSetting naming set, key and value.

    where: the text before the set's name in an error.
    """
    checked: dict[str, dict[str, Any]] = {}
    for name, values in overrides.items():
        if not isinstance(values, Mapping):
            raise InvalidSetting.must_be(f"{where}{name}", "a mapping of settings", got=values)
        checked[str(name)] = {str(key): _value(f"{where}{name}", str(key), value) for key, value in values.items()}
    return checked


def set_args(args: Args, name: str) -> Args:
    """Returns a copy of `args` with the settings of the evaluation set `name`."""
    set_values: Any = copy.copy(args)
    values = (getattr(args, "eval_overrides", None) or {}).get(name, {})
    if "rm_type" in values:
        # The reward function of the other sets would take precedence.
        set_values.custom_rm_path = None
    for key, value in values.items():
        setattr(set_values, KEYS[key][0], value)
    return cast(Args, set_values)


def _value(where: str, key: str, value: Any) -> Any:
    if key not in KEYS:
        raise InvalidSetting.unknown("key", key, KEYS, field=where)
    _, kind, expected, is_right = KEYS[key]
    wanted: Any = (int, float) if kind in KINDS else kind
    fitting = isinstance(value, wanted) and (kind is bool or not isinstance(value, bool))
    if fitting and kind in KINDS:
        # The limits of flags hold here too: 64 bits, and finite.
        fitting = math.isfinite(value) and abs(value) < 2**63 if isinstance(value, float) else abs(value) < 2**63
    if not fitting or (kind is int and int(value) != value) or not is_right(value):
        raise InvalidSetting.must_be(f"{where}.{key}", KINDS.get(kind, "") + expected, got=value)
    return kind(value)
