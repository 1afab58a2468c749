"""Finds files of payloads that the database does not name, and moves them to `lost+found`; none is deleted.

A process that dies between writing samples and naming them leaves such a file; so does one that dies before it deletes
the samples that were replaced. Files with groups that the database never leased show that the database is older than
they are, unless it was about to restore these groups from a place in the data.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from slime.buffer.groups.place import RESTORING
from slime.buffer.store.base import Payloads, Store
from slime.buffer.store.blobs import file_of, group_of
from slime.types.errors import InvalidFile, counted

log = logging.getLogger(__name__)


def find_strays(store: Store, payloads: Payloads, named: Collection[str]) -> tuple[set[str], set[str]]:
    """Returns (files that a crash may have left, files that are newer than the database).

    named: the payloads that the database names.
    """
    strays = payloads.names() - set(map(file_of, named))
    indexes = {index for name in strays if (index := group_of(name)) is not None}
    leased = {group.group_index for group in store.groups(indexes=sorted(indexes)) if group.attempt}
    restoring = store.get(RESTORING, 0)
    newer = {n for n in strays if (index := group_of(n)) is not None and index not in leased and index >= restoring}
    return strays - newer, newer


def set_strays_aside(store: Store, payloads: Payloads, *, also_newer: bool = False) -> int:
    """Moves strays to lost+found, and tells `payloads` which are in use; returns the number of strays. Raises
    InvalidFile if the database is older than the payloads, unless `also_newer`."""
    named = store.payload_names()
    payloads.track(named)
    strays, newer = find_strays(store, payloads, named)
    if newer and not also_newer:
        raise InvalidFile(
            f"{store.name} is older than {counted(len(newer), 'file')} in {payloads.name} that it does not know, "
            f"such as {min(newer)}: {store.older}. Restore the whole database, or give these samples up by "
            "slime-buffer repair",
            field="buffer_dir",
            value=store.name,
            expected="the database that the payloads belong to",
        )
    payloads.delete_unfinished()
    for name in strays | newer:
        payloads.set_aside(name)
    if strays or newer:
        unnamed = counted(len(strays | newer), "file")
        log.warning("moved %s that no group names to %s", unnamed, payloads.lost_and_found)
    return len(strays | newer)
