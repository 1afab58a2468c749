"""Flags, files and bounds, and the wording of their errors."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime.types.errors import InvalidFile, InvalidSetting, MissingFile, SlimeError, UnknownFlag
from slime.types.rpc import RpcSettings
from slime.types.setting_values import named_path
from slime.types.settings import REQUIRED, Parser, add_flags, build, json_object, markdown_table, parse, setting


@dataclass(kw_only=True)
class Paint:
    """Paint: what to put on the wall."""

    colour: str = setting("red", "which colour", choices=("red", "green", "blue"), aliases=("color",))
    layers: int = setting(2, "how many layers, 100% of them", minimum=1, maximum=9)
    thickness: float = setting(1e-3, "in metres", above=0)
    dry: bool = setting(True, "wait between layers", off_flag="wet")
    varnish: bool = setting(False, "varnish at the end")
    primer: bool | None = setting(None, "use a primer; decided by the wall where not given")
    walls: list[str] = setting(list, "names of walls")
    mix: list[list[str]] = setting(list, "colours to mix, once a mix", append=True)
    tag: list[str] = setting(list, "a tag", append=True)
    extra: dict[str, Any] = setting(dict, "more, as JSON", parse=json_object)
    seed: int | None = setting(None, "a seed", minimum=0)
    out: Path = setting(Path("out"), "where to write")
    rubbish_dir: str | None = setting(None, "where to put the rubbish")


@dataclass(kw_only=True)
class Job:
    """Job: whose work it is."""

    name: str = setting(REQUIRED, "name of the job")
    seed: int | None = setting(None, "a seed", minimum=0)


def paint(*argv: str) -> Paint:
    return parse(argv, Paint, prog="paint", description="")[0]


def test_defaults_flags_and_equals_signs() -> None:
    assert paint() == Paint()
    given = paint(
        "--colour=blue", "--layers", "3", "--thickness", "1e-6", "--wet", "--varnish", "--no-primer", "--out", "x/y"
    )
    assert (given.colour, given.layers, given.thickness, given.out) == ("blue", 3, 1e-6, Path("x/y"))
    assert (given.dry, given.varnish, given.primer) == (False, True, False)
    assert paint("--primer").primer is True
    assert paint("--color", "green").colour == "green"


def test_lists_repeated_flags_and_json() -> None:
    given = paint(
        "--walls", "a", "b", "--mix", "red", "blue", "--mix", "green", "--tag", "x", "--tag", "y", "--extra", '{"a": 1}'
    )
    assert given.walls == ["a", "b"]
    assert given.mix == [["red", "blue"], ["green"]]
    assert given.tag == ["x", "y"]
    assert given.extra == {"a": 1}


def test_classes_that_share_a_field_share_its_flag() -> None:
    first, second = parse(["--seed", "4", "--name", "n"], Paint, Job, prog="paint", description="")
    assert first.seed == second.seed == 4


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--colour", "gren"], ["--colour", "'gren'", "red, green, blue", "did you mean green?"]),
        (["--layers", "0"], ["--layers", "0", "at least 1"]),
        (["--layers", "10"], ["--layers", "10", "at most 9"]),
        (["--layers", "many"], ["--layers", "'many'", "an integer"]),
        (["--layers"], ["--layers", "requires one value"]),
        (["--thickness", "0"], ["--thickness", "greater than 0"]),
        (["--thickness", "-1e-6"], ["--thickness", "-1e-06", "greater than 0"]),
        (["--thickness", "nan"], ["--thickness", "greater than 0"]),
        (["--seed", "-1"], ["--seed", "-1", "at least 0"]),
        (["--extra", "[1]"], ["--extra", "'[1]'", "JSON object"]),
        (["--extra", "{"], ["--extra"]),
        (["--varnish=yes"], ["--varnish", "'yes'", "no value"]),
        (["--seed", "9" * 20], ["--seed", "64 bits"]),
        (["--rubbish-dir="], ["--rubbish-dir", "a path", "''"]),
        (["stray"], ["unexpected argument 'stray'"]),
        (["-5"], ["unexpected argument '-5'"]),
    ],
)
def test_a_wrong_value_is_named(argv: list[str], words: list[str]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        paint(*argv)
    for word in words:
        assert word in str(caught.value)
    if argv[0].startswith("--"):
        assert caught.value.field == argv[0].split("=")[0]


def test_an_unknown_flag_names_the_nearest_one_and_nothing_is_abbreviated() -> None:
    with pytest.raises(UnknownFlag, match="--thicknes; did you mean --thickness?"):
        paint("--thicknes", "3")
    with pytest.raises(UnknownFlag, match="--lay"):
        paint("--lay=3")
    with pytest.raises(UnknownFlag, match="see --help"):
        paint("--zzzzzzzz")


@pytest.mark.parametrize("word", ["-layers", "–layers", "—layers"])
def test_a_flag_with_another_dash_names_the_one_that_is_meant(word: str) -> None:
    with pytest.raises(UnknownFlag, match=f"unknown option '{word}'; did you mean --layers?"):
        paint(word, "3")


def test_an_unknown_short_option_does_not_list_all_others() -> None:
    with pytest.raises(UnknownFlag, match="^unknown option '-x'; see --help$"):
        paint("-x")


def test_a_required_setting_is_asked_for_and_holds_no_nul() -> None:
    with pytest.raises(InvalidSetting, match="--name is required: name of the job"):
        parse([], Job, prog="job", description="")
    with pytest.raises(InvalidSetting, match="--name must be text without a NUL character, got"):
        parse(["--name", "a\0b"], Job, prog="job", description="")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "index is required"),
        ("1", "--address or --directory is required"),
        ("one --address a", "index must be an integer, got 'one'"),
        ("1 --address a --directory d", "--directory and --address cannot be used together"),
        ("1 --address a --state opn", "--state must be one of open, done, got 'opn'; did you mean open?"),
        ("1 --address a --limit x", "--limit must be an integer, got 'x'"),
        ("1 --address", "--address requires one value"),
    ],
)
def test_errors_of_argparse_are_worded_as_all_others(words: str, message: str) -> None:
    parser = Parser()
    parser.add_argument("index", type=int, nargs="+")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--address")
    where.add_argument("--directory")
    parser.add_argument("--state", choices=["open", "done"])
    parser.add_argument("--limit", type=int)
    with pytest.raises(InvalidSetting) as caught:
        parser.parse_strict(words.split())
    assert str(caught.value) == message


def test_an_unknown_flag_is_named_before_an_argument_that_is_missing() -> None:
    parser = Parser()
    parser.add_argument("index", type=int)
    parser.add_argument("--limit", type=int)
    with pytest.raises(UnknownFlag, match="unknown option --limt; did you mean --limit"):
        parser.parse_strict(["--limt", "2"])


def test_a_path_of_an_argument_is_not_empty() -> None:
    parser = Parser()
    parser.add_argument("--output", type=named_path)
    assert parser.parse_strict(["--output", "."]).output == Path()
    with pytest.raises(InvalidSetting, match=r"^--output must be a path, got ''$"):
        parser.parse_strict(["--output", ""])


@pytest.mark.parametrize("words", [["r\0n"], ["run", "r\0n"], ["run", "--set", "a", "b\0"]])
def test_no_argument_holds_a_nul_character_also_in_lists(words: list[str]) -> None:
    parser = Parser()
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--set", nargs=2, action="append")
    with pytest.raises(InvalidSetting, match=r"^(runs|--set) must be text without a NUL character, got"):
        parser.parse_strict(words)


def test_a_refused_value_is_known_and_not_offered() -> None:
    field = setting("a", "Kind of it", choices=("a", "b"), refused=("c",))
    cls = dataclasses.make_dataclass("Kinds", [("kind", str, field)], kw_only=True)
    assert build(cls, {"kind": "c"}).kind == "c"  # whoever refuses it gives the reason
    assert "{a,b}" in help_of(cls)
    with pytest.raises(InvalidSetting, match="--kind must be one of a, b, got 'd'"):
        build(cls, {"kind": "d"})


def test_a_list_is_shown_as_it_is_typed() -> None:
    field = setting(lambda: ["x", "y"], "Parts of it")
    cls = dataclasses.make_dataclass("Parts", [("part", list[str], field)], kw_only=True)
    assert "(default: x y)" in help_of(cls) and "`x y`" in markdown_table(cls)


def test_the_usage_begins_with_required_flags_and_has_others_in_brackets() -> None:
    assert re.match(r"usage: \S+ --name TEXT \[-h\] \[--seed N\]\n", help_of(Job))
    parsed = Parser()
    add_flags(parsed, Job)
    assert vars(parsed.parse_strict([])) == {}, "the name may stand in a file"


def test_the_usage_of_many_flags_names_only_the_required_ones_and_the_arguments() -> None:
    parser = Parser(prog="p")
    add_flags(parser, Job)
    parser.add_argument("file", metavar="FILE")
    for letter in "abcdefgh":
        parser.add_argument(f"--{letter}")
    assert parser.format_usage() == "usage: p --name TEXT [flags] FILE\n" and "--h H" in parser.format_help()


def help_of(cls: type) -> str:
    parser = Parser()
    add_flags(parser, cls)
    return parser.format_help()


def test_a_file_sets_what_flags_do_not(tmp_path: Path) -> None:
    file = tmp_path / "paint.yaml"
    file.write_text(
        "color: blue\nlayers: 4\nthickness: 1e-6\ndry: false\nwalls: [a]\nmix: [[a, b]]\nextra: {a: 1}\nout: here\n"
    )
    given = paint("--config", str(file), "--layers", "5")
    assert (given.colour, given.layers, given.thickness, given.dry, given.out) == ("blue", 5, 1e-6, False, Path("here"))
    assert (given.walls, given.mix, given.extra) == (["a"], [["a", "b"]], {"a": 1})
    file.write_text("")
    assert paint(f"--config={file}") == Paint()


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("layers: 2.5", InvalidSetting, ["--layers", "2.5", "an integer"]),
        ("layers: true", InvalidSetting, ["--layers", "True", "an integer"]),
        ("thickness: thin", InvalidSetting, ["--thickness", "'thin'", "a number"]),
        ("thickness: true", InvalidSetting, ["--thickness", "a number"]),
        ("dry: 'no'", InvalidSetting, ["--dry", "'no'", "true or false"]),
        ("colour: 3", InvalidSetting, ["--colour", "3", "text"]),
        ("colour:", InvalidSetting, ["--colour", "None"]),
        ("walls: a", InvalidSetting, ["--walls", "'a'", "a list"]),
        ("layrs: 2", UnknownFlag, ["paint.yaml: unknown key 'layrs'; did you mean layers?"]),
        ("zzz: 2", UnknownFlag, ["unknown key 'zzz'; use one of the settings that `paint --help` lists"]),
        ("- a\n- b", InvalidFile, ["mapping"]),
        ("a: [", InvalidFile, ["paint.yaml", "line 1"]),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, error: type[SlimeError], words: list[str]) -> None:
    file = tmp_path / "paint.yaml"
    file.write_text(text)
    with pytest.raises(error) as caught:
        paint("--config", str(file))
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="nowhere.yaml"):
        paint("--config", str(tmp_path / "nowhere.yaml"))
    with pytest.raises(InvalidFile):
        paint("--config", str(tmp_path))


def test_build_takes_what_it_knows() -> None:
    assert build(Job, {"name": "n", "layers": 3}) == Job(name="n")


def test_help_shows_defaults_and_the_table_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        paint("--help")
    out = capsys.readouterr().out
    assert "(default: 2)" in out and "100% of them" in out and "SUPPRESS" not in out and "None" not in out
    table = markdown_table(Paint, Job)
    assert "| `--layers` | `2` | how many layers, 100% of them |" in table
    assert "| `--name` | required | name of the job |" in table


def test_the_readme_shows_the_settings_that_there_are() -> None:
    readme = Path(__file__).parent.parent / "README.md"
    assert markdown_table(RpcSettings) in readme.read_text(encoding="utf-8")
