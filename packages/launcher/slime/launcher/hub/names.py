"""Names on the Hub: `ORG/NAME@REVISION` of a model, `ORG/NAME:CONFIG:SPLIT@REVISION` of a data set."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from slime.types.prompt_files.readers import READERS

_NAME = r"(?P<name>[\w-][\w.-]*/[\w-][\w.-]*)"
_REVISION = r"(?:@(?P<revision>[\w][\w./-]*))?"
_MODEL = re.compile(_NAME + _REVISION)
_DATASET = re.compile(_NAME + r"(?::(?P<first>[\w.-]+))?(?::(?P<second>[\w.-]+))?" + _REVISION)


@dataclass(frozen=True)
class HubName:
    """A name on the Hub.

    name: ORG/NAME. revision: a branch, a tag or a commit; None is the main branch. config: configuration of a data set;
    None if it has only one.
    """

    name: str
    revision: str | None = None
    config: str | None = None
    split: str = "train"

    @property
    def last(self) -> str:
        return self.name.rpartition("/")[2]


def model_name(text: str) -> HubName | None:
    """Reads the name of a model; None for a path, that is, if the parent directory exists."""
    match = _MODEL.fullmatch(text)
    return HubName(match["name"], match["revision"]) if match and not _is_local(text) else None


def dataset_name(text: str) -> HubName | None:
    """Reads the name of a data set; None for a path, that is, if it ends like a prompt file or its parent exists."""
    match = _DATASET.fullmatch(text)
    if match is None or _is_local(text) or text.lower().endswith(tuple(READERS)):
        return None
    config, split = (match["first"], match["second"]) if match["second"] else (None, match["first"])
    return HubName(match["name"], match["revision"], config, split or "train")


def _is_local(text: str) -> bool:
    return Path(text).exists() or Path(text).parent.exists()
