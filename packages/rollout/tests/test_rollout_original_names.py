"""Small names that rollout plug-ins written for slime import: hooks, filters, evaluation sets, HTTP, GenerateState."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from slime.rollout import sample_hooks
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.filter_hub.base_types import (
    DynamicFilterOutput,
    MetricGatherer,
    call_dynamic_filter,
    should_drop_dynamic_filter_output,
)
from slime.rollout.generate.sample import generate
from slime.rollout.settings.eval_overrides import KEYS
from slime.rollout.sglang_streaming_rollout import generate_streaming
from slime.rollout.sleep_rollout import sleep
from slime.types import Sample
from slime.types.errors import DeadlineExceeded
from slime.utils import http_utils
from slime.utils.eval_config import EvalDatasetConfig, build_eval_dataset_configs, ensure_dataset_list

NUM_GPUS = 0

HERE = __file__


def test_answers_of_older_rollout_functions_become_outputs() -> None:
    groups = [[Sample(index=0)]]
    assert call_rollout_fn(lambda *a, evaluation: groups, "args", 3, evaluation=False) == RolloutFnTrainOutput(groups)
    data: dict[str, Any] = {"set": {"rewards": [1.0]}}
    assert call_rollout_fn(lambda *a, evaluation: data, "args", 3, evaluation=True) == RolloutFnEvalOutput(data)
    output = RolloutFnTrainOutput(groups, {"mine": 1})
    assert call_rollout_fn(lambda *a, evaluation: output, "args", 3, evaluation=False) is output


def test_a_filter_may_be_missing_or_answer_a_truth_value() -> None:
    assert call_dynamic_filter(None, "args", []).keep
    assert not call_dynamic_filter(lambda args, group: False, "args", []).keep


@pytest.mark.parametrize(
    ("output", "remaining", "dropped"),
    [
        (DynamicFilterOutput(keep=True), 1, False),
        (DynamicFilterOutput(keep=False), 1, True),
        (DynamicFilterOutput(keep=False, keep_when_insufficient=True), 4, False),
        (DynamicFilterOutput(keep=False, keep_when_insufficient=True), 5, True),
    ],
)
def test_a_rejected_group_is_kept_where_groups_are_short(
    output: DynamicFilterOutput, remaining: int, dropped: bool
) -> None:
    assert should_drop_dynamic_filter_output(output, remaining_batch_size=remaining, target_data_size=4) is dropped


def test_drops_are_counted_by_reason() -> None:
    gatherer = MetricGatherer()
    for reason in ("zero", None, "zero", "long"):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {"rollout/dynamic_filter/drop_zero": 2, "rollout/dynamic_filter/drop_long": 1}


def note_hook(args: Any, sample: Sample, *, rollout_id: Any = None) -> None:
    sample.metadata["note"] = (args.word, rollout_id)


async def replacing_hook(args: Any, sample: Sample, *, evaluation: bool = False) -> Sample:
    return Sample(index=sample.index, metadata={**sample.metadata, "evaluation": evaluation})


def wrong_hook(args: Any, sample: Sample) -> str:
    return "sample"


def test_hooks_keep_the_shape_and_get_the_keywords_that_they_take() -> None:
    paths = [f"{HERE}:note_hook", f"{HERE}:replacing_hook"]
    args = SimpleNamespace(word="seen", rollout_sample_hook_path=paths)
    sample_hooks.set_current_rollout_id(7)
    groups = [[Sample(index=0)], [Sample(index=1)]]
    result = asyncio.run(sample_hooks.apply_rollout_sample_hooks(args, groups, evaluation=True, other=1))
    assert [[sample.index for sample in group] for group in result] == [[0], [1]]
    assert result[1][0].metadata == {"note": ("seen", 7), "evaluation": True}


def test_hooks_are_checked_and_may_be_none() -> None:
    args = SimpleNamespace(rollout_sample_hook_path=[f"{HERE}:wrong_hook"])
    with pytest.raises(TypeError, match="the hook answered str, expected Sample or None"):
        asyncio.run(sample_hooks.apply_rollout_sample_hooks(args, Sample(index=0)))
    with pytest.raises(TypeError, match="got int, expected a Sample or a list"):
        asyncio.run(sample_hooks.apply_rollout_sample_hooks(args, 3))
    value = [Sample(index=0)]
    assert asyncio.run(sample_hooks.apply_rollout_sample_hooks(SimpleNamespace(), value)) is value


def test_sleeping_ends_with_the_call() -> None:
    call = RolloutCall(3, 1)
    ended: list[BaseException] = []

    def run() -> None:
        CALL.set(call)
        try:
            sleep(None, 3, None)
        except DeadlineExceeded as error:
            ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    call.cancel()
    thread.join(10)
    assert len(ended) == 1


def test_the_streaming_generation_is_the_default_one() -> None:
    assert generate_streaming is generate


def test_evaluation_sets_are_listed_as_args_have_them() -> None:
    args = SimpleNamespace(
        eval_prompt_data=[["a", "a.jsonl"], ["b", "b.jsonl"]],
        eval_columns={"b": {"label_key": "answer"}},
        eval_overrides={"b": {"temperature": 0.0, "rm_type": "math", "metadata_overrides": {"x": 1}}},
    )
    first, second = build_eval_dataset_configs(args)
    assert (first.name, first.path, first.temperature) == ("a", "a.jsonl", None)
    assert (second.label_key, second.temperature) == ("answer", 0.0)
    assert second.inject_metadata({"x": 0, "y": 2}) == {"x": 1, "y": 2, "rm_type": "math"}
    assert first.cache_key != second.cache_key


def test_evaluation_sets_of_a_file_take_what_they_lack_from_the_defaults() -> None:
    raw = {"a": {"path": "a.jsonl", "top_k": 5}, "b": "b.jsonl"}
    assert ensure_dataset_list(raw)[1] == {"name": "b", "path": "b.jsonl"}
    first, second = build_eval_dataset_configs(SimpleNamespace(), raw, {"top_k": 1, "n_samples_per_eval_prompt": 4})
    assert (first.top_k, second.top_k, first.n_samples_per_eval_prompt) == (5, 1, 4)
    with pytest.raises(ValueError, match="'a': unknown keys topk"):
        build_eval_dataset_configs(SimpleNamespace(), [{"name": "a", "path": "p", "topk": 3}])
    with pytest.raises(ValueError, match="min_eval_samples must be an integer, at least 1"):
        EvalDatasetConfig(name="a", path="p", min_eval_samples=0)


def test_a_set_in_args_has_every_key_of_a_file() -> None:
    assert set(KEYS) <= {each.name for each in dataclasses.fields(EvalDatasetConfig)}


def test_ports_hosts_and_engines() -> None:
    port = http_utils.find_available_port(20000)
    assert port >= 20000 and http_utils.is_port_available(port)
    name, address = http_utils.get_host_info()
    assert name and address.count(".") == 3
    http_utils.init_http_client(SimpleNamespace())
    assert http_utils.get_rollout_num_engines(SimpleNamespace(rollout_engine_urls=["a", "b"])) == 2
    assert http_utils.get_rollout_num_engines(SimpleNamespace(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)) == 4
