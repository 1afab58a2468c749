"""Paths of recordings, with or without {rollout_id}, and how a recording begins."""

from __future__ import annotations

from pathlib import Path

from slime.types.errors import InvalidSetting

MAGIC = b"slime rollout 1\n"


def check_template(flag: str, template: str) -> None:
    """Raises InvalidSetting for a template with fields other than {rollout_id}, or without the name of a file."""
    try:
        name = Path(template.format(rollout_id="0")).name
    except (KeyError, IndexError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InvalidSetting.must_be(
            flag, "a path with no field but {rollout_id}", got=template, reason=reason
        ) from None
    if not name:
        raise InvalidSetting.must_be(flag, "the path of a file", got=template)


def has_one_file(template: str) -> bool:
    """Returns whether a template has no {rollout_id}: all iterations have one file, and all evaluations another."""
    return template.format(rollout_id="0") == template.format(rollout_id="eval_1")


def path_of(template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """Returns `template` with {rollout_id} replaced: by "3", for an evaluation by "eval_3".

    Without {rollout_id} the file of an evaluation is the one beside it whose name begins with `eval_`.
    """
    path = Path(template.format(rollout_id=f"eval_{rollout_id}" if evaluation else f"{rollout_id}"))
    return path.with_name(f"eval_{path.name}") if evaluation and has_one_file(template) else path
