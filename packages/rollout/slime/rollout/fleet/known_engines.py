"""The engines that a run has not started itself, kept in a file for a rollout service that is started again."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

from slime.rollout.fleet.fleet import Fleet
from slime.rollout.settings.rollout import RolloutSettings
from slime.types.errors import InvalidFile, SlimeError
from slime.types.files import write_whole

log = logging.getLogger(__name__)


class KnownEngines:
    """The file with the URLs of external engines. again: an earlier service of the run has written it.

    Raises InvalidFile for a file that does not hold them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._urls = _read(path) if path.exists() else []

    @property
    def again(self) -> bool:
        return bool(self._urls)

    def added_to(self, settings: RolloutSettings) -> RolloutSettings:
        """Returns `settings` with the external engines that the earlier service had last."""
        if not self._urls or not settings.rollout_external_engine_addrs:
            return settings
        return dataclasses.replace(settings, rollout_external_engine_addrs=self._urls)

    def keep(self, fleet: Fleet) -> None:
        """Writes the external engines of a fleet, if it has any, now and whenever one has joined or left."""

        def write() -> None:
            try:
                write_whole(self._path, json.dumps([member.url for member in fleet.members]) + "\n")
            except SlimeError as error:
                log.warning("a rollout service that is started again will not have the present engines: %s", error)

        if any(member.external for member in fleet.members):
            write()
            fleet.on_new_address(write)


def _read(path: Path) -> list[str]:
    try:
        urls = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        urls = None
    if isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls):
        return urls
    raise InvalidFile(
        f"{path} does not hold the engines of a run", field="engines_file", value=str(path), expected="a list of URLs"
    )
