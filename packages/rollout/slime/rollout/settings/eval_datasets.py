"""Evaluation sets of a run, as `args.eval_datasets` has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from slime.rollout.settings.eval_overrides import KEYS, check_overrides

__all__ = ["EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list"]


@dataclass
class EvalDatasetConfig:
    """One evaluation set; its fields are the keys of a set in an --eval-config file. None: the value of the flag."""

    name: str
    path: str
    input_key: str | None = None
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str | None = None
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool | None = None
    apply_chat_template_kwargs: dict[str, Any] | None = None
    n_samples_per_eval_prompt: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_response_len: int | None = None
    max_prompt_len: int | None = None
    min_new_tokens: int | None = None
    min_eval_samples: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    reward_key: str | None = None
    rm_type: str | None = None
    custom_rm_path: str | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises InvalidSetting, a ValueError, for an invalid value."""
        if self.metadata_overrides is None:
            self.metadata_overrides = {}
        values = {name: getattr(self, name) for name in KEYS if getattr(self, name) is not None}
        check_overrides({self.name: values})

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """A key that is equal for sets with the same prompts."""
        columns = tuple(sorted((self.multimodal_keys or {}).items()))
        keys = (self.input_key, self.label_key, self.tool_key, self.metadata_key)
        return (self.name, self.path, *keys, columns, self.apply_chat_template, repr(self.apply_chat_template_kwargs))

    def inject_metadata(self, sample_metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """Returns the metadata of a sample with the overrides of its set, and the reward that its set names."""
        named = {} if self.rm_type is None else {"rm_type": self.rm_type}
        return {**(sample_metadata or {}), **named, **self.metadata_overrides}


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Returns `eval.datasets` as a list of mappings with a name; it may be a mapping by name. Raises TypeError."""
    if config is None:
        return []
    if isinstance(config, Mapping):
        config = [{"name": name, **(_of_path(entry))} for name, entry in config.items()]
    if not isinstance(config, list) or not all(isinstance(entry, Mapping) for entry in config):
        raise TypeError(f"eval.datasets: got {type(config).__name__}, expected a list, or a mapping by name")
    return [dict(entry) for entry in config]


def build_eval_dataset_configs(
    args: object, raw_config_list: Any = None, defaults: Mapping[str, Any] | None = None
) -> list[EvalDatasetConfig]:
    """Returns the sets of `raw_config_list`, completed from `defaults`; without that list, the sets of the run.

    Raises ValueError for a key that no set has.
    """
    if raw_config_list is None:
        raw_config_list = _of_run(args)
    known = {each.name for each in fields(EvalDatasetConfig)}
    configs = []
    for entry in ensure_dataset_list(raw_config_list):
        merged = {**(defaults or {}), **entry}
        if unknown := sorted(set(merged) - known):
            raise ValueError(f"eval.datasets {entry.get('name')!r}: unknown keys {', '.join(unknown)}")
        configs.append(EvalDatasetConfig(**merged))
    return configs


def _of_path(entry: Any) -> Mapping[str, Any]:
    return {"path": entry} if isinstance(entry, str) else entry


def _of_run(args: object) -> list[dict[str, Any]]:
    columns, overrides = getattr(args, "eval_columns", None) or {}, getattr(args, "eval_overrides", None) or {}
    return [
        {"name": name, "path": path, **columns.get(name, {}), **overrides.get(name, {})}
        for name, path in getattr(args, "eval_prompt_data", None) or ()
    ]
