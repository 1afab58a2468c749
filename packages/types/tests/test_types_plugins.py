"""Plug-in paths: forms that lead to a callable, and the errors for those that do not."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.types.errors import PluginError
from slime.types.plugins import find_function, load_plugin, load_setting

SOURCE = """
import dataclasses

@dataclasses.dataclass
class State:
    count: int = 0

STATE = State()
NUMBER = 3

def exact(args, sample, *, strict=False):
    return STATE

async def later(args, *samples):
    return None

def alone(args):
    return None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_rewards.py"
    path.write_text(SOURCE)
    return path


def test_a_module_path_and_a_file_path_lead_to_a_callable(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_function("os.path.join") is __import__("os").path.join
    exact = load_plugin(f"{file}:exact", flag="--custom-rm-path")
    assert find_function(f"{file}:exact")(None, None) is exact(None, None)
    assert load_plugin(f"{file}:later", flag="--custom-rm-path")
    monkeypatch.chdir(file.parent)
    assert find_function("my_rewards.py:exact") is exact
    monkeypatch.syspath_prepend(str(file.parent))
    assert find_function("my_rewards.exact")(None, None).count == 0


def test_files_of_one_name_do_not_replace_each_other(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plugin.py").write_text(f"def only(): return {name!r}\ndef _hidden(): pass\n")
    assert [find_function(str(tmp_path / name / "plugin.py"))() for name in ("a", "b", "a")] == ["a", "b", "a"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("{file}:missing", ["has no 'missing'", "exact"]),
        ("{file}:NUMBER", ["NUMBER is a value of type int, not a function"]),
        ("{file}:alone", ["it takes (args), but is called with (args, sample) to return a number"]),
        ("{file}", ["defines 3 public functions (exact, later, alone)"]),
        ("{dir}/nowhere.py:f", ["no such file"]),
        ("{dir}/broken.py:f", ["SyntaxError"]),
        ("{dir}/raises.py:f", ["ZeroDivisionError"]),
        ("{dir}/exits.py:f", ["loading it raised SystemExit: 3"]),
        ("no_such_package_of_ours.f", ["no module named 'no_such_package_of_ours'"]),
        ("os.path.no_such_function", ["has no 'no_such_function'"]),
        ("plain", ["it is not of the form package.module.name or path/to/file.py:name"]),
        ("", ["it is not of the form"]),
        ("{file}:exat", ["has no 'exat'; did you mean exact?"]),
    ],
)
def test_what_is_wrong_with_a_path_is_said(file: Path, path: str, words: list[str]) -> None:
    (file.parent / "broken.py").write_text("def f(:\n")
    (file.parent / "raises.py").write_text("1 / 0\n")
    (file.parent / "exits.py").write_text("import sys\nsys.exit(3)\n")
    given = path.format(file=file, dir=file.parent)
    for _ in range(2):
        with pytest.raises(PluginError) as caught:
            load_plugin(given, flag="--custom-rm-path")
        assert caught.value.field == "--custom-rm-path" and caught.value.value.startswith(given[:100])
        for word in ["--custom-rm-path", *words]:
            assert word in str(caught.value)


@pytest.mark.parametrize(
    ("name", "flag", "names", "found"),
    [
        ("custom_rm", "--custom-rm-path", (), "reward_func"),
        ("custom_rm", "--custom-rm-path", ("batched_custom_rm",), "batched_custom_rm"),
        ("parse", "--custom-rm-path", (), "parse"),
    ],
)
def test_of_several_functions_of_a_file_the_usual_one_is_meant(
    tmp_path: Path, name: str, flag: str, names: tuple[str, ...], found: str
) -> None:
    file = tmp_path / f"{name}.py"
    file.write_text(
        "".join(f"def {each}(args, sample): ...\n" for each in ("parse", "reward_func", "batched_custom_rm"))
    )
    assert load_plugin(str(file), flag=flag, names=names).__name__ == found


def test_a_setting_that_is_not_set_has_no_function(file: Path) -> None:
    settings = SimpleNamespace(custom_rm_path=f"{file}:exact", eval_function_path=None)
    assert load_setting(settings, "custom_rm_path") is find_function(f"{file}:exact")
    assert load_setting(settings, "eval_function_path") is load_setting(settings, "buffer_filter_path") is None
    settings.custom_rm_path = f"{file}:alone"
    with pytest.raises(PluginError, match=r"--custom-rm-path .*: it takes \(args\)"):
        load_setting(settings, "custom_rm_path")
    with pytest.raises(PluginError, match=r"^--eval-config: math "):
        load_plugin(f"{file}:alone", flag="--custom-rm-path", label="--eval-config: math")
