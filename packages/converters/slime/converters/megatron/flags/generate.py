"""Makes flags.tsv: `python -m slime.converters.megatron.flags.generate [> FILE]` prints it.

The fields of megatron-core's dataclasses give names, types, defaults and help, by the rules by which Megatron-LM makes
flags of them; `megatron_lm` gives the rest.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from importlib import resources
from typing import Any

from slime.converters.megatron.flags import megatron_lm
from slime.converters.megatron.flags.rows import FlagRow, dump, load


def rows() -> list[FlagRow]:
    """Returns the whole table."""
    taken = [*_from_dataclasses(), *_by_hand()]
    seen = {flag for row in taken for flag in row.flags}
    return [*taken, *_refused(seen)]


def _from_dataclasses() -> Iterator[FlagRow]:
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    # MLATransformerConfig changes some defaults; the flags have those of TransformerConfig.
    base_fields = {field.name: field for field in dataclasses.fields(TransformerConfig)}
    refused = {name: why for why, names in megatron_lm.REFUSED_FIELDS.items() for name in names.split()}
    helps = _docstrings(MLATransformerConfig)
    for field in dataclasses.fields(MLATransformerConfig):
        if field.name in megatron_lm.NOT_FLAGS:
            continue
        field = base_fields.get(field.name, field)
        kind, choices = _kind(field)
        meta = field.metadata.get("argparse_meta", {})
        name = field.name.replace("_", "-")
        prefixes = ("--no-", "--disable-") if kind == "off" else ("--",)
        default = megatron_lm.DEFAULTS.get(field.name, meta.get("default", _default(field)))
        row = FlagRow(
            flags=tuple(meta.get("arg_names", [prefix + name for prefix in prefixes])),
            dest=megatron_lm.DEST.get(field.name, field.name),
            kind=kind,
            choices=megatron_lm.CHOICES.get(field.name, choices),
            default=default,
            sets=(("" if field.name in base_fields else "MLA") + f"TransformerConfig.{field.name}",),
            status="used",
            help=megatron_lm.HELP.get(field.name)
            or helps.get(field.name, "") + ("; this turns it off" if kind == "off" else ""),
        )
        if field.name in refused:
            row = dataclasses.replace(row, status="refused", note=refused[field.name])
        elif field.name in megatron_lm.SAME_FIELDS:
            accepts, why = megatron_lm.SAME_FIELDS[field.name]
            row = dataclasses.replace(row, status="same", accepts=accepts, note=why)
        elif field.name in megatron_lm.HINT_FIELDS:
            row = dataclasses.replace(row, status="hint", note=megatron_lm.TE)
        yield row


def _kind(field: dataclasses.Field[Any]) -> tuple[str, tuple[str, ...]]:
    hint, many = field.type, ""
    while typing.get_origin(hint) is typing.Union:
        hint = typing.get_args(hint)[0]
    if typing.get_origin(hint) is list:
        hint, many = typing.get_args(hint)[0], "*"
    if typing.get_origin(hint) is typing.Literal:
        return "str" + many, tuple(typing.get_args(hint))
    if isinstance(hint, enum.EnumMeta):
        return "str" + many, tuple(member.name for member in hint)
    if hint is bool:
        return ("off" if field.default is True else "on"), ()
    return {int: "int", float: "float", str: "str"}[hint] + many, ()  # type: ignore[index]


def _default(field: dataclasses.Field[Any]) -> Any:
    factory = field.default_factory
    value = field.default if factory is dataclasses.MISSING else factory()
    return value.name if isinstance(value, enum.Enum) else value


def _docstrings(cls: type) -> dict[str, str]:
    """Returns the first sentence of the text under each field of a dataclass and its bases."""
    sentences: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0].body  # type: ignore[attr-defined]
        for first, second in itertools.pairwise(body):
            if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr):
                text = " ".join(str(getattr(second.value, "value", "")).split())
                sentence = re.split(r"(?<=[a-z)\]0-9])\. |; ", text + " ")[0].strip().rstrip(".")
                sentences[first.target.id] = sentence if len(sentence) <= 160 else sentence[:157] + "..."  # type: ignore
    return sentences


def _by_hand() -> list[FlagRow]:
    return load(resources.files(__package__).joinpath("by_hand.tsv").read_text(encoding="utf-8"))


def _refused(seen: set[str]) -> Iterator[FlagRow]:
    for why, names in megatron_lm.REFUSED.items():
        for name in names.split():
            flag = f"--{name}"
            if flag not in seen:
                seen.add(flag)
                yield FlagRow(flags=(flag,), dest=name.rstrip("*").replace("-", "_"), note=why)


if __name__ == "__main__":
    print(dump(rows()), end="")
