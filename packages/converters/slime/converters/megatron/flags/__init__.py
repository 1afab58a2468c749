"""Megatron's command-line flags: a table of them, and settings made from it. Imports neither torch nor megatron."""

from slime.converters.megatron.flags.rows import FlagRow, committed
from slime.converters.megatron.flags.settings import (
    MegatronSettings,
    check_backend,
    check_given,
    given,
    make_settings,
    refuse_fp8_on_cpu,
)
from slime.converters.megatron.flags.table import (
    by_dest,
    config_fields,
    defaults,
    number,
    pattern,
    pattern_text,
    row_of,
    table,
    why_refused,
)

__all__ = [
    "FlagRow",
    "MegatronSettings",
    "by_dest",
    "check_backend",
    "check_given",
    "committed",
    "config_fields",
    "defaults",
    "given",
    "make_settings",
    "number",
    "pattern",
    "pattern_text",
    "refuse_fp8_on_cpu",
    "row_of",
    "table",
    "why_refused",
]
