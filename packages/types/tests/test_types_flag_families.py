"""Families of flags that another program defines, as one setting by name."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slime.types.errors import UnknownFlag
from slime.types.settings import markdown_table, parse, setting


@dataclass(kw_only=True)
class Oven:
    """Oven."""

    minutes: int = setting(30, "how long")
    fan_args: dict[str, Any] = setting(dict, "flags of the fan by name", flag=False)


class FanFlags:
    """`--fan-speed N` and `--fan-quiet`."""

    setting = "fan_args"

    def add_flags(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--fan-speed", dest=self.setting, type=lambda n: {"speed": int(n)}, default=argparse.SUPPRESS
        )

    def read_key(self, key: str, value: Any) -> dict[str, Any] | None:
        return {key.removeprefix("fan_"): value} if key in ("fan_speed", "fan_quiet") else None


def oven(*argv: str) -> Oven:
    return parse(argv, Oven, prog="oven", description="", families=[FanFlags()])[0]


def test_a_family_fills_its_setting() -> None:
    assert oven().fan_args == {}
    assert oven("--fan-speed", "3", "--minutes", "5") == Oven(minutes=5, fan_args={"speed": 3})


def test_flags_win_over_a_file_name_by_name(tmp_path: Path) -> None:
    file = tmp_path / "oven.yaml"
    file.write_text("fan_speed: 1\nfan_quiet: true\nfan_args: {colour: red}\nminutes: 7\n")
    given = oven("--config", str(file), "--fan-speed", "9")
    assert given == Oven(minutes=7, fan_args={"speed": 9, "quiet": True, "colour": "red"})
    file.write_text("fan_spede: 1\n")
    with pytest.raises(UnknownFlag, match="fan_spede"):
        oven("--config", str(file))


def test_a_setting_without_a_flag_is_not_listed() -> None:
    with pytest.raises(UnknownFlag, match="--fan-args"):
        oven("--fan-args", "{}")
    assert "fan" not in markdown_table(Oven)
