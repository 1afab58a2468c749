"""Every function of docs/plugins.md fits its contract and does its work, in a rollout or in a training step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pages import ROOT, blocks, content
from slime.types.errors import PluginError
from slime.types.plugin_contracts import CONTRACTS

NUM_GPUS = 0

PAGE = ROOT / "docs" / "plugins.md"
# The first line of each function: the flag, file and name that it is given by, and flags that it needs.
GIVEN = re.compile(r"^# (--[a-z-]+-path) (\w+\.py):(\w+)(.*)$", re.M)
SHOWN = [
    (block, *match.groups())
    for block in blocks(PAGE)
    if block.language == "python"
    for match in GIVEN.finditer(block.text)
]
CONTRACT_TESTS = {
    "test_plugin_rollout_contracts.py": {
        "--rollout-function-path", "--eval-function-path", "--data-source-path",
    },
    "test_plugin_generate_contracts.py": {"--custom-generate-function-path"},
    "test_plugin_runtime_hook_contracts.py": {
        "--custom-rm-path", "--dynamic-sampling-filter-path", "--rollout-sample-hook-path", "--buffer-filter-path",
        "--rollout-sample-filter-path", "--rollout-all-samples-process-path", "--custom-rollout-log-function-path",
        "--custom-eval-rollout-log-function-path", "--custom-reward-post-process-path",
    },
}  # fmt: skip
# packages/rollout/tests/agents/test_rollout_agents_in_process.py plays such agents.
PLAYED = {"--custom-agent-path"}
# packages/trainer/tests/weight_sync/test_trainer_weight_sync.py publishes weights with such a function.
PUBLISHED = {"--custom-update-weight-post-write-path"}
# Settings that a function is used with, in a training step on a tiny model.
TRAINED: dict[str, dict[str, Any]] = {
    "--custom-reward-post-process-path": {},
    "--custom-convert-samples-to-train-data-path": {"rewards_normalization": False},
    "--custom-advantage-function-path": {},
    "--rollout-data-postprocess-path": {},
    "--custom-tis-function-path": {"use_tis": True},
    "--custom-pg-loss-reducer-function-path": {},
    "--custom-loss-function-path": {"loss_type": "custom_loss"},
    "--custom-megatron-init-path": {"train_backend": "megatron"},
    "--custom-megatron-before-log-prob-hook-path": {"train_backend": "megatron", "use_kl_loss": True},
    "--custom-megatron-before-train-step-hook-path": {"train_backend": "megatron"},
    "--custom-model-provider-path": {"train_backend": "megatron"},
}


@pytest.mark.parametrize("flag", CONTRACTS)
def test_the_page_shows_the_arguments_of_each_contract(flag: str) -> None:
    text, contract = content(PAGE), CONTRACTS[flag]
    assert flag in text
    for parameters in (contract.parameters, *contract.alternatives):
        assert ", ".join(parameters) in text
    for name in (*contract.keywords, *contract.optional):
        assert name in text


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The blocks of the page as files; blocks of one name follow each other."""
    directory = tmp_path_factory.mktemp("page_plugins")
    texts: dict[str, list[str]] = {}
    for block in dict.fromkeys(shown[0] for shown in SHOWN):
        match = GIVEN.search(block.text)
        assert match is not None
        texts.setdefault(match[2], []).append(block.text)
    for name, parts in texts.items():
        (directory / name).write_text("\n\n".join(parts), encoding="utf-8")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from trainer_tiny import write_model

    return write_model(tmp_path_factory.mktemp("model"))


def test_the_page_shows_every_plugin_of_the_command_line() -> None:
    """docs/flags.md is held to the parsers."""
    not_functions = {"--custom-config-path", "--megatron-config-path"}
    flags = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    available = {
        line.split("`")[1] for line in flags.splitlines() if re.match(r"\| `--[a-z-]+-path` .*available", line)
    }
    shown = {flag for _, flag, *_ in SHOWN}
    assert available - not_functions - shown == set()
    assert all(flag in content(PAGE) for flag in available - {"--custom-config-path", "--megatron-config-path"})
    assert shown == set().union(*CONTRACT_TESTS.values()) | set(TRAINED) | PLAYED | PUBLISHED


@pytest.mark.parametrize(("flag", "file", "name"), [shown[1:4] for shown in SHOWN])
def test_a_function_fits_its_contract(files: Path, flag: str, file: str, name: str) -> None:
    from slime.launcher.config.catalogue import declared
    from slime.launcher.config.checks.plugins import check_plugins

    setting = flag.removeprefix("--").replace("-", "_")
    defaults = {name: given.default for name, given in declared().items()} | {"sglang_args": {}}

    def value(path: str) -> Any:
        return [path] if isinstance(defaults[setting], list) else path

    defaults["eval_overrides"] = {}
    check_plugins(defaults | {setting: value(f"{files / file}:{name}")})
    with pytest.raises(PluginError, match=flag):
        check_plugins(defaults | {setting: value(f"{files / file}:not_there")})


@pytest.mark.parametrize("program", CONTRACT_TESTS)
def test_functions_work_in_a_rollout(files: Path, program: str) -> None:
    first: dict[str, str] = {}
    for _, flag, file, name, more in SHOWN:
        # A function for groups is called in another way: its own run would need another flag.
        if flag in CONTRACT_TESTS[program] and not more.strip():
            first.setdefault(flag, f"{files / file}:{name}")
    words = [word for flag, path in first.items() for word in (flag, path)]
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "plugin_contracts" / program, *words, "-k", "page_plugins"],
        capture_output=True, text=True, timeout=280, cwd=files,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"\b{len(first)} passed", done.stdout) or len(first) < int(
        re.findall(r"(\d+) passed", done.stdout)[0]
    ), done.stdout


@pytest.mark.parametrize(
    ("flag", "file", "name"), [shown[1:4] for shown in SHOWN if shown[1] in TRAINED], ids=lambda value: value
)
def test_functions_work_in_a_training_step(files: Path, model: str, flag: str, file: str, name: str) -> None:
    from trainer_tiny import Runner, make_settings

    setting = flag.removeprefix("--").replace("-", "_")
    values = TRAINED[flag] | {setting: f"{files / file}:{name}"}
    metrics = Runner(make_settings(model, **values)).run(0)
    assert metrics["train/grad_norm"] > 0
