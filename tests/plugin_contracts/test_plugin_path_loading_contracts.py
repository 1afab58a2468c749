"""Paths of plug-ins: what they look like, what is found at them, and what is said where nothing fits.

python tests/plugin_contracts/test_plugin_path_loading_contracts.py [any flag of a plug-in, with its PATH]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

import seed_plugins
from contract_runs import FLAGS, main, users
from slime.rollout.generate.group import load_generate_once
from slime.types.errors import PluginError
from slime.types.plugin_contracts import CONTRACTS
from slime.types.plugins import find_function, load_plugin

NUM_GPUS = 0

# Names that code written for slime passes as paths, or imports.
SHIPPED = [
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.sglang_rollout.eval_rollout",
    "slime.rollout.sglang_rollout.generate",
    "slime.rollout.sglang_rollout.generate_and_rm",
    "slime.rollout.sglang_rollout.generate_and_rm_group",
    "slime.rollout.sglang_rollout.get_model_url",
    "slime.rollout.sglang_rollout.GenerateState",
    "slime.rollout.data_source.DataSource",
    "slime.rollout.data_source.RolloutDataSource",
    "slime.rollout.data_source.RolloutDataSourceWithBuffer",
    "slime.rollout.data_source.pop_first",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
    "slime.rollout.filter_hub.base_types.DynamicFilterOutput",
    "slime.rollout.rm_hub.async_rm",
    "slime.rollout.rm_hub.batched_async_rm",
    "slime.rollout.rm_hub.remote_rm",
    "slime.rollout.base_types.RolloutFnTrainOutput",
    "slime.rollout.base_types.RolloutFnEvalOutput",
    "slime.utils.http_utils.post",
    "slime.utils.types.Sample",
    "slime.data.Sample",
    "slime.data.RolloutDataSource",
    "slime.data.RolloutDataSourceWithBuffer",
]
# Such functions as slime's own documents write them down.
DOCUMENTED = {
    "rollout_function_path": "args, rollout_id, data_source, evaluation=False",
    "eval_function_path": "args, rollout_id, data_source, evaluation=False",
    "custom_rm_path": "args, sample, **kwargs",
    "dynamic_sampling_filter_path": "args, samples, **kwargs",
    "rollout_sample_filter_path": "args, samples",
    "rollout_all_samples_process_path": "args, all_samples, get_samples",
    "custom_rollout_log_function_path": "rollout_id, args, samples, rollout_extra_metrics, rollout_time",
    "custom_eval_rollout_log_function_path": "rollout_id, args, data, extra_metrics",
    "custom_reward_post_process_path": "args, samples",
    "custom_convert_samples_to_train_data_path": "args, samples",
    "rollout_data_postprocess_path": "args, rollout_id, rollout_data",
    "custom_advantage_function_path": "args, rollout_data",
    "custom_loss_function_path": "args, batch, logits, sum_of_sample_mean",
    "custom_pg_loss_reducer_function_path": "total_lengths, response_lengths, loss_masks, calculate_per_token_loss",
    "custom_update_weight_post_write_path": "args, version_dir, rollout_engines",
    "custom_megatron_init_path": "args",
    "custom_megatron_before_log_prob_hook_path": "args, model, store_prefix",
    "custom_megatron_before_train_step_hook_path": "args, rollout_id, step_id, model, optimizer, opt_param_scheduler",
}


def users_of(flag: str) -> list[Any]:
    return [pytest.param(flag, *each.values, id=f"{flag}-{each.id}", marks=each.marks) for each in users(flag)]


@pytest.mark.parametrize("path", SHIPPED)
def test_names_that_plug_ins_are_written_with(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert find_function(path) is getattr(importlib.import_module(module), name)


@pytest.mark.parametrize(("flag", "path"), [parameter for flag in FLAGS for parameter in users_of(flag)])
def test_a_users_plug_in_is_found_and_takes_what_it_is_given(flag: str, path: str) -> None:
    assert callable(load_plugin(path, flag=flag))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_run_takes_functions_of_the_documented_form_and_no_shorter_ones(tmp_path: Path, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    (tmp_path / "fits.py").write_text(f"def function({DOCUMENTED[name]}): ...\n")
    assert callable(load_plugin(str(tmp_path / "fits.py"), flag=flag))
    (tmp_path / "short.py").write_text("def function(): ...\n")
    with pytest.raises(PluginError, match=flag):
        load_plugin(str(tmp_path / "short.py"), flag=flag)


def test_a_module_is_imported_once() -> None:
    assert find_function("seed_plugins.reward_func") is seed_plugins.reward_func
    assert find_function("seed_plugins.reward_func") is find_function("seed_plugins.reward_func")


def test_a_file_is_loaded_once_whatever_its_path_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def one(args, sample):\n    return 1\ndef two(args, sample):\n    return 2\n")
    monkeypatch.chdir(tmp_path)
    assert find_function("mine.py:one") is find_function(f"{file}:one") is find_function("./mine.py:one")
    assert find_function("mine.py:two")(None, None) == 2


@pytest.mark.parametrize(
    ("flag", "source", "found"),
    [
        ("--custom-rm-path", "def score(a, b): ...", "score"),
        ("--custom-rm-path", "def reward_func(a, b): ...\ndef batched_custom_rm(a, b): ...", "reward_func"),
        ("--custom-rm-path", "def help_it(): ...\ndef mine(a, b): ...", "mine"),
        ("--custom-generate-function-path", "def mine(a, b): ...\ndef custom_generate(a, b): ...", "mine"),
        ("--custom-generate-function-path", "def help_it(): ...\ndef custom_generate(a, b): ...", "custom_generate"),
        ("--rollout-function-path", "def help_it(): ...\ndef generate_rollout(a, b): ...", "generate_rollout"),
        ("--rollout-function-path", "import os\nfrom os.path import join\ndef it(a): ...\ndef _no(a): ...", "it"),
    ],
)
def test_which_function_a_file_without_a_name_means(tmp_path: Path, flag: str, source: str, found: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    assert find_function(str(file), flag=flag, usual=CONTRACTS[flag].names).__name__ == found


def test_a_sample_may_name_a_function_that_is_loaded_once() -> None:
    path = "seed_plugins.generate_over_http"
    assert load_generate_once(path) is load_generate_once(path)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("seed_plugins.no_such", "has no 'no_such'"),
        ("no_such_package.function", "no module named 'no_such_package'"),
        ("no_such_file.py:function", "no such file no_such_file.py"),
        ("function", "it is not of the form package.module.name or path/to/file.py:name"),
        ("two words.here", "it is not of the form package.module.name or path/to/file.py:name"),
        ("{broken}", "raised ZeroDivisionError"),
        ("{several}", "the file defines 2 public functions (a, b)"),
        ("seed_plugins.CALLS", "CALLS is a value of type list, not a function"),
        ("seed_plugins.rollout_without_evaluation", "it takes (args, rollout_id, data_source)"),
    ],
)
def test_what_is_wrong_with_a_path(tmp_path: Path, path: str, said: str) -> None:
    files = {"broken": "1 / 0\n", "several": "def a(): ...\ndef b(): ...\n"}
    for name, source in files.items():
        (tmp_path / f"{name}.py").write_text(source)
    path = path.format(**{name: tmp_path / f"{name}.py" for name in files})
    with pytest.raises(PluginError) as caught:
        load_plugin(path, flag="--rollout-function-path")
    assert said in caught.value.message and caught.value.message.startswith(f"--rollout-function-path {path}: ")
    assert caught.value.field == "--rollout-function-path" and caught.value.value == path and caught.value.expected


if __name__ == "__main__":
    sys.exit(main(__file__, sys.argv[1:]))
