"""Rows of the table of Megatron's flags, and the file flags.tsv that holds them.

`flags.tsv` beside this module is generated (`python -m slime.converters.megatron.flags.generate`), so that reading it
needs neither torch nor megatron.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
from collections.abc import Iterable
from importlib import resources
from typing import Any

from slime.types.errors import InvalidFile

CONFIGS = (
    "TransformerConfig",
    "MLATransformerConfig",
    "OptimizerConfig",
    "DistributedDataParallelConfig",
    "GPTModel",
)


@dataclasses.dataclass(frozen=True)
class FlagRow:
    """One of Megatron's flags.

    flags: its spellings, with dashes. A name that ends in `*` stands for every flag with that beginning.
    dest: the attribute of Megatron-LM's `args`.
    kind: on, off (switches that set True, False), int, float, str, number (an integer where it is one), pattern (an
        integer or a list of integers); one or more values with `*` behind it. Empty for names that are only refused.
    default: Megatron-LM's.
    sets: `CLASS.FIELD`s that get the value, `!CLASS.FIELD` those that get the opposite; `args` where our own code reads
        the attribute.
    status: used; hint (performance only, see `note`); same (taken with a value in `accepts`, refused with others);
        elsewhere (a setting of another package); refused.
    note: why it is refused, or why no other value is taken.
    """

    flags: tuple[str, ...]
    dest: str
    kind: str = ""
    choices: tuple[str, ...] = ()
    default: Any = None
    sets: tuple[str, ...] = ()
    status: str = "refused"
    accepts: tuple[Any, ...] = ()
    note: str = ""
    help: str = ""

    @property
    def flag(self) -> str:
        return self.flags[0]

    @property
    def taken(self) -> bool:
        """Returns whether it is one of MegatronSettings."""
        return self.status in ("used", "hint", "same")


_TUPLES = ("flags", "choices", "sets")
_JSON = ("default", "accepts")


def dump(rows: Iterable[FlagRow]) -> str:
    """Returns the text of flags.tsv."""
    out = io.StringIO()
    names = [field.name for field in dataclasses.fields(FlagRow)]
    writer = csv.writer(out, delimiter="\t", lineterminator="\n", quoting=csv.QUOTE_NONE, quotechar=None)
    writer.writerow(names)
    for row in rows:
        cells = []
        for name in names:
            value = getattr(row, name)
            cells.append(" ".join(value) if name in _TUPLES else json.dumps(value) if name in _JSON else value)
        writer.writerow(cells)
    return out.getvalue()


def load(text: str) -> list[FlagRow]:
    """Returns the rows of a flags.tsv. Raises InvalidFile naming the line."""
    lines = csv.DictReader(io.StringIO(text), delimiter="\t", quoting=csv.QUOTE_NONE)
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            values: dict[str, Any] = {k: tuple(v.split()) if k in _TUPLES else v for k, v in line.items()}
            values["default"] = json.loads(line["default"])
            values["accepts"] = tuple(json.loads(line["accepts"]))
            rows.append(FlagRow(**values))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidFile(f"flags.tsv, line {number}: {error}", field=f"line {number}") from None
    return rows


@functools.cache
def committed() -> tuple[FlagRow, ...]:
    """Returns the rows of flags.tsv."""
    return tuple(load(resources.files(__package__).joinpath("flags.tsv").read_text(encoding="utf-8")))
