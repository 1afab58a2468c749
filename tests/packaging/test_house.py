"""Holds the order of the source tree: sizes of folders and files, first words of docstrings, words of errors."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_tree import MAX_MODULES, MODULES, OTHER_CODE, ROOT, modules_by_folder, parsed, scripts

NUM_GPUS = 0
MAX_LINES = 400
MAX_FUNCTION_LINES = 99
DATA = {"packages/converters/tests/support/converters_published.py"}
# A docstring names the thing or says what it does; these words begin half a sentence.
BANNED = (
    *("What", "Who", "Whom", "Whose", "How", "Of", "Those", "Where", "Which", "Whether", "The same", "As"),
    *("Under which", "On which"),
)


def first_words(path: Path) -> Iterator[tuple[int, str]]:
    """Yields (line, docstring) of a module and of all its classes, functions and attributes."""
    tree = parsed(path)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text
        if isinstance(node, ast.ClassDef):
            for part in node.body[1:]:
                if isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant):
                    yield part.lineno, str(part.value.value)


def test_the_tree_is_there() -> None:
    assert len(MODULES) > 300 and "slime.types.sample" in MODULES


def test_no_folder_holds_more_than_fifteen_modules() -> None:
    """Nor of tests and what these share."""
    sizes = modules_by_folder([*MODULES.values(), *OTHER_CODE])
    assert {str(folder.relative_to(ROOT)): n for folder, n in sizes.items() if n > MAX_MODULES} == {}


def test_no_file_has_more_than_four_hundred_lines() -> None:
    """Tables of data and generated code aside."""
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in [*MODULES.values(), *OTHER_CODE]}
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > MAX_LINES}
    assert {name: lines for name, lines in long.items() if name not in DATA} == {}
    assert long.keys() >= DATA, "a table that has become shorter needs no exception"


def test_no_function_has_more_than_ninety_nine_lines() -> None:
    long = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}": lines
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert long == {}


# A field, `path: of the model`, before the sentence that says what the thing is.
FIELD_FIRST = re.compile(r"`?[a-z_]+`?(\([a-z]*\))?(, `?[a-z_]+`?)*: ")
NO_VERBS = re.compile(
    r"(?!(Called|Never) )[A-Z][A-Za-z'-]*[^\Ws_][,;:]? |(Parts|Parameters|Tensors|Indexes|Means|Rewards|Flags|Headers"
    r"|Arguments|Fields|Gradients|Bins|Norms|Entries|Functions|Requests|Metrics|Losses|Rows|Weights|Positions|Lengths"
    r"|Options|Lines|Seconds|Settings|Texts|Results|Messages|Tools|Properties|Versions|\w+'s)\b"
)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """In the third person; properties, shapes (`[T, h, d]`) and formulas are named."""
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "__init__"
        if not any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if (text := ast.get_docstring(node)) and (FIELD_FIRST.match(text) or NO_VERBS.match(text))
    ]
    assert wrong == []


def test_docstrings_of_classes_name_the_class_before_its_fields() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {text.splitlines()[0]}"
        for path in MODULES.values()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef) and (text := ast.get_docstring(node)) and FIELD_FIRST.match(text)
    ]
    assert wrong == []


def test_the_help_of_an_option_begins_with_a_capital() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{keyword.value.lineno}: {text}"
        for path in [*MODULES.values(), *OTHER_CODE]
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        for keyword in node.keywords
        if keyword.arg == "help" and (text := ast.unparse(keyword.value).removeprefix("f").strip("'\""))
        if isinstance(keyword.value, ast.Constant | ast.JoinedStr) and not re.match("[A-Z{]", text)
    ]
    assert wrong == []


def test_tests_of_a_package_lie_in_its_folders_and_have_its_name() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for package in sorted((ROOT / "packages").iterdir())
        for path in sorted((package / "tests").rglob("test_*.py"))
        if not path.name.startswith(f"test_{package.name}_")
        or not (package / "slime" / package.name / path.parent.relative_to(package / "tests")).is_dir()
    ]
    assert wrong == [], "packages/NAME/tests has the folders of packages/NAME/slime/NAME"


def test_test_files_have_names_of_their_own() -> None:
    names = Counter(path.name for path in OTHER_CODE if path.name.startswith("test_"))
    assert [name for name, times in names.items() if times > 1] == []


@pytest.mark.parametrize("where", ["packages", "benchmarks", "scripts", "tests", "examples", "tools"])
def test_docstrings_begin_with_what_they_name_or_do(where: str) -> None:
    files = [path for path in sorted((ROOT / where).rglob("*.py")) if "v1" not in path.parts]
    assert files
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in first_words(path)
        if text.startswith(tuple(f"{word} " for word in BANNED))
    ]
    assert wrong == []


def test_comments_begin_with_what_they_are_about() -> None:
    """Some of the words of docstrings may begin a whole sentence of a comment."""
    words = [word for word in BANNED if word not in ("As", "Where")]
    begins = re.compile(rf"^\s*# ({'|'.join(words)}) ")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in [*MODULES.values(), *OTHER_CODE]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if begins.match(line)
    ]
    assert wrong == []


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for path in [*MODULES.values(), *scripts()]:
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


CONFIG_ERRORS = ("InvalidSetting", "NotAvailable", "UnknownFlag", "InvalidFile", "MissingFile", "PluginError")
# The words of slime.types.errors.ConfigError's constructors.
GRAMMARS = {
    "conflict": r"cannot be used together|\bcontradicts?\b|\bexcludes?\b",
    "requires": r"\b(requires?|needs?)\b|\bonly with\b",
    "required": r"\bis required\b",
    "unavailable": r"\bnot (supported|available)\b",
    "unknown": r"\bunknown\b|\bdid you mean\b|\bknown ones are\b",
    "must_be or one_of": r"\bmust be\b|\bexpected one of\b",
}


def hand_spelled(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields (line, constructor, message) of errors that are worded as a constructor words them, without it."""
    assigned = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CONFIG_ERRORS):
            continue
        words = node.args[0] if node.args else None
        message = assigned.get(words.id, words) if isinstance(words, ast.Name) else words
        text = "".join(
            part.value
            for part in (ast.walk(message) if message else ())
            if isinstance(part, ast.Constant) and isinstance(part.value, str)
        )
        for constructor, grammar in GRAMMARS.items():
            if re.search(grammar, text):
                yield node.lineno, constructor, text


def test_errors_are_worded_by_their_constructors() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {constructor}: {text}"
        for path in MODULES.values()
        for line, constructor, text in hand_spelled(parsed(path))
    ]
    assert wrong == []


def test_a_help_text_is_written_once() -> None:
    """A setting of several packages or programs is declared once, and taken over by inheritance or by `like`."""
    places: dict[str, list[str]] = {}
    for path in MODULES.values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setting" and len(node.args) > 1:
                if isinstance(node.args[1], ast.Constant):
                    place = f"{path.relative_to(ROOT)}:{node.lineno}"
                    places.setdefault(str(node.args[1].value), []).append(place)
    assert len(places) > 200
    assert {text: found for text, found in places.items() if len(found) > 1} == {}


def test_the_spelling_of_flags_is_written_once() -> None:
    """By `flag_name` and `negated`; the flags of other programs are read as they are, in folders of their own."""
    by_hand = re.compile(r"""replace\("_", "-"\)|["'](--)?no[-_](\{|["'] \+)""")
    spells = ("slime.types.setting_values", "slime.types.settings")
    others = ("slime.converters.megatron.flags.", "slime.rollout.engines.sglang.")
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for name, path in MODULES.items()
        if name not in spells and not name.startswith(others)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if by_hand.search(line)
    ]
    assert wrong == []


# Sizes, which are compared with a limit in the same unit.
UNITS = ("bytes", "tokens", "characters")
# Equal identities mean that a cursor of one dataset fits another, so that their words stay as they were written.
STORED = ("packages/buffer/slime/buffer/sources/dataset.py",)


def hand_counted(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, words) of texts in which a plural stands behind a length, whether there are one or many."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.search(r"%d (?!is\b|bytes\b|goes\b)[a-z]+s\b|[a-z]\(s\)", node.value):
                yield node.lineno, node.value
        if not isinstance(node, ast.JoinedStr):
            continue
        for number, words in zip(node.values, node.values[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and isinstance(words, ast.Constant):
                noun = re.match(r" (?:[a-z-]+ )??([a-z-]+[a-z]s)\b", str(words.value))
                if noun and noun[1] not in (*UNITS, "is", "has") and ast.unparse(number.value).startswith("len("):
                    yield node.lineno, str(words.value)


def test_counts_are_worded_by_counted() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in MODULES.values()
        if str(path.relative_to(ROOT)) not in STORED
        for line, text in hand_counted(parsed(path))
    ]
    assert wrong == []
