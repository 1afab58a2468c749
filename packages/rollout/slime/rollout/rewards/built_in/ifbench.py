"""Instruction following by the checkers of IFBench (Pyatkin et al. 2025, arXiv:2507.02833): 1 where all are satisfied.

IFBench is not an installable package: clone https://github.com/allenai/IFBench, install its requirements and put it on
PYTHONPATH. A sample names its instructions in metadata: `instruction_id_list`, `kwargs` (a mapping for each
instruction, or one for all) and `prompt_text`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from slime.types import Sample
from slime.types.errors import InvalidField, NotAvailable

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

MODULE = "evaluation_lib"


def require() -> Any:
    """Returns IFBench's module of checkers. Raises NotAvailable where it cannot be imported."""
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise NotAvailable.requires(
            "--rm-type ifbench",
            "IFBench on PYTHONPATH",
            f"clone https://github.com/allenai/IFBench and install its requirements ({error})",
        ) from error


def reward(args: RolloutArgs, sample: Sample) -> float:
    """Raises InvalidField for a sample without instructions."""
    return score(sample.response, sample.metadata or {}, sample.index)


def score(response: str | None, metadata: dict[str, Any], index: int | None = None) -> float:
    ids = [str(name).strip() for name in metadata.get("instruction_id_list") or () if name and str(name).strip()]
    if not ids:
        raise InvalidField(
            "metadata.instruction_id_list", metadata.get("instruction_id_list"), "a list of IFBench instructions",
            f"sample {index} names no instruction in metadata.instruction_id_list",
        )  # fmt: skip
    library = require()
    prompt = str(metadata.get("prompt_text") or "")
    question = library.InputExample(
        key=int(metadata.get("record_id") or 0),
        instruction_id_list=ids,
        prompt=prompt,
        kwargs=_arguments(metadata.get("kwargs"), len(ids)),
    )
    result = library.test_instruction_following_strict(question, {prompt: response or ""})
    return float(result.follow_all_instructions)


def _arguments(kwargs: Any, count: int) -> list[dict[str, Any]]:
    """Returns one mapping for each of `count` instructions, without empty values, which the checkers do not take."""
    every = list(kwargs) if isinstance(kwargs, list) else [kwargs] * count
    every = [dict(entry) if isinstance(entry, dict) else {} for entry in every[:count]]
    every += [dict(every[-1]) if every else {} for _ in range(count - len(every))]
    return [{name: value for name, value in entry.items() if value is not None} for entry in every]
