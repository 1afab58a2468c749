"""The table of CONTRIBUTING.md, "Files to touch": each row is done by hand in a copy of the tree, or has its test."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from house_tree import MAX_MODULES, MODULES, ROOT, modules_by_folder

NUM_GPUS = 0
HERE = "tests/packaging/test_files_to_touch.py"
# Row of the table -> the test that shows it.
SHOWN = {
    "a flag": f"{HERE}::test_a_flag_is_a_line_of_settings",
    "a reward": f"{HERE}::test_a_reward_is_a_module_and_a_row",
    "an estimator": "packages/trainer/tests/algorithms/test_trainer_estimators.py::"
    "test_a_new_entry_of_the_table_trains",
    "a model family": f"{HERE}::test_a_model_family_is_a_module_an_entry_and_a_config",
    "a kind of engine": "tests/integration/test_new_engine_kind.py::test_a_new_kind_of_engine_is_a_class_and_a_row",
    "a field of `Sample`": "tests/packaging/test_new_sample_field.py::"
    "test_a_new_field_takes_one_line_in_the_proto_and_one_in_the_declaration",
    "a setting of several packages": f"{HERE}::test_a_setting_of_several_packages_is_one_line",
    "a plug-in": f"{HERE}::test_a_plug_in_is_a_setting_and_a_contract",
}
PARSE = """
import pytest
from slime.launcher.config import known_flags, run_config
from slime.types.errors import ConfigError

def parse(*words, **environment):
    base = ["--hf-checkpoint", "m", "--prompt-data", "p", "--num-rollout", "1", "--rm-type", "math"]
    return run_config.parse([*base, *words], check=False, environment=environment)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the code of all packages."""
    ignored = shutil.ignore_patterns("__pycache__")
    for package in sorted((ROOT / "packages").iterdir()):
        if (package / "slime").is_dir():
            shutil.copytree(package / "slime", tmp_path / "packages" / package.name / "slime", ignore=ignored)
    return tmp_path


def insert(file: Path, before: str, line: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.count(before) == 1, f"{before!r} in {file}"
    file.write_text(text.replace(before, line + before), encoding="utf-8")


def run(tree: Path, script: str) -> None:
    """Runs `script` with the packages of `tree` before those of this environment."""
    paths = [*(str(package) for package in sorted((tree / "packages").iterdir())), *filter(None, sys.path)]
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tree, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def assert_there(place: str) -> None:
    """place: path::test."""
    path, name = place.split("::")
    assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), place


def test_every_row_of_the_table_is_shown() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Files to touch\n")[2]
    rows = re.findall(r"^\| (an? [^|]+?) \|", section.partition("\n## ")[0], re.M)
    assert rows == list(SHOWN)
    for place in SHOWN.values():
        assert_there(place)


def test_a_folder_that_the_table_adds_a_module_to_has_room_for_one() -> None:
    section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Files to touch\n")[2]
    named = set(re.findall(r"\ba (?:module|folder) in `([^`]+)`", section.partition("\n## ")[0]))
    sizes = modules_by_folder(MODULES.values())
    assert {Path(folder).name for folder in named} == {"built_in", "families", "engines"}
    assert {folder: sizes[ROOT / folder] for folder in named if not 0 < sizes[ROOT / folder] < MAX_MODULES} == {}


def test_the_tests_that_show_a_stated_default_are_there() -> None:
    """Defaults that only a trainer or a rollout service shows have their test by name in the table of the others."""
    defaults = ROOT / "packages/launcher/tests/config/test_launcher_stated_defaults.py"
    tree = ast.parse(defaults.read_text(encoding="utf-8"))
    (table,) = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.target.id == "SHOWN_BY"]
    for place in ast.literal_eval(table).values():
        (file,) = ROOT.glob(f"packages/*/tests/**/{place.partition('::')[0]}")
        assert_there(f"{file.parent}/{place}")


def test_a_flag_is_a_line_of_settings(tree: Path) -> None:
    settings = tree / "packages/trainer/slime/trainer/settings/trainer.py"
    insert(settings, "    no_save_optim: bool", '    num_owls: int = setting(3, "Owls in the wood", minimum=1)\n')
    script = """
assert parse().trainer.num_owls == 3 and parse("--num-owls", "4").flat["num_owls"] == 4
assert parse(SLIME_NUM_OWLS="5").trainer.num_owls == 5
with pytest.raises(ConfigError, match="--num-owls must be at least 1, got 0"):
    parse("--num-owls", "0")
with pytest.raises(ConfigError, match="unknown option --num-owl; did you mean --num-owls?"):
    parse("--num-owl", "2")
assert "| `--num-owls` | trainer | int | `3` |" in known_flags.page()
"""
    run(tree, PARSE + script)


def test_a_setting_of_several_packages_is_one_line(tree: Path) -> None:
    shared = tree / "packages/types/slime/types/shared_settings.py"
    insert(shared, "    n_samples_per_eval_prompt: int", '    owl_seed: int = setting(7, "Seed of the owls")\n')
    script = """
config = parse("--owl-seed", "8")
assert config.buffer.owl_seed == config.rollout.owl_seed == config.flat["owl_seed"] == 8
assert "| `--owl-seed` |" in known_flags.page()
"""
    run(tree, PARSE + script)


def test_a_reward_is_a_module_and_a_row(tree: Path) -> None:
    rewards = tree / "packages/rollout/slime/rollout/rewards"
    (rewards / "built_in" / "vowels.py").write_text(
        '"""Vowels of the response."""\n\n'
        'def reward(args, sample):\n    return sum(map(sample.response.count, "aeiou"))\n'
    )
    insert(rewards / "registry.py", '    "gpqa": ', '    "vowels": "slime.rollout.rewards.built_in.vowels:reward",\n')
    script = """
import asyncio
from slime.rollout.rewards.registry import check_name, reward_function
from slime.types import Sample
assert asyncio.run(reward_function("vowels")(None, Sample(response="an owl"))) == 2
assert asyncio.run(reward_function("boxed_vowels")(None, Sample(response=r"an owl: \\\\boxed{hoo}"))) == 2
assert parse("--rm-type", "vowels").rollout.rm_type == "vowels"
with pytest.raises(ConfigError, match="--rm-type: unknown reward function 'vowel'; did you mean vowels?"):
    check_name("vowel")
"""
    run(tree, PARSE + script)


def test_a_model_family_is_a_module_an_entry_and_a_config(tree: Path) -> None:
    converters = tree / "packages/converters/slime/converters"
    (converters / "families" / "owl.py").write_text(
        '"""Owl: the layers of Llama."""\n\nimport dataclasses\n\nfrom slime.converters.families.llama import LLAMA\n\n'
        'OWL = dataclasses.replace(LLAMA, name="Owl", model_types=("owl",))\n'
    )
    families = converters / "families" / "__init__.py"
    insert(families, "FAMILIES = (", "from slime.converters.families.owl import OWL\n\n")
    families.write_text(families.read_text().replace("FAMILIES = (", "FAMILIES = (OWL, "))
    config = json.loads((converters / "models" / "llama3.2-1B.json").read_text())
    (converters / "models" / "owl-1B.json").write_text(json.dumps(config | {"model_type": "owl"}))
    script = """
from slime.converters.families import find_family
from slime.converters.megatron.model_scripts import known_script, model_config
config = model_config("owl-1B")
family = find_family(config)
assert family.name == "Owl" and family.arguments(config)["num_layers"] == 16
assert len(list(family.parameters(config))) > 16 * 5
assert "--num-layers 16" in known_script("owl-1B")
"""
    run(tree, script)


def test_a_plug_in_is_a_setting_and_a_contract(tree: Path) -> None:
    settings = tree / "packages/rollout/slime/rollout/settings/rollout.py"
    line = '    owl_path: str | None = setting(None, "Function that wakes the owls", metavar="PATH")\n'
    insert(settings, "    rollout_sample_filter_path: str | None", line)
    contracts = tree / "packages/types/slime/types/plugin_contracts.py"
    insert(contracts, '    "--custom-rm-path": ', '    "--owl-path": Contract(("args", "hour"), "how many woke"),\n')
    (tree / "owls.py").write_text("def wake(args, hour):\n    return hour\n\n\ndef sleep(args):\n    pass\n")
    script = """
from slime.launcher.config.checks.plugins import check_plugins
from slime.types.plugins import load_setting
config = parse("--owl-path", "owls.py:wake")
check_plugins(config.flat)
assert load_setting(config.rollout, "owl_path")(None, 3) == 3
with pytest.raises(ConfigError, match="--owl-path .*args, hour"):
    check_plugins(parse("--owl-path", "owls.py:sleep").flat)
"""
    run(tree, PARSE + script)
