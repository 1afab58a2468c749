"""Stores that ranks meet in: who can reach them."""

from __future__ import annotations

import datetime
import threading
from pathlib import Path

import psutil
import pytest

from slime.trainer.process.stores import listening_store, meeting_store

TIMEOUT = datetime.timedelta(seconds=20)


def listening(port: int) -> list[str]:
    connections = psutil.Process().net_connections("inet")
    return [c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr.port == port]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_a_store_listens_on_its_own_address_only(host: str) -> None:
    store = listening_store(host, 0, TIMEOUT)
    assert listening(store.port) == [host.replace("localhost", "127.0.0.1")]


def test_ranks_meet_at_an_address_that_rank_0_listens_on() -> None:
    port = listening_store("127.0.0.1", 0, TIMEOUT).port
    address, found = f"127.0.0.1:{port}", []

    def second() -> None:
        found.append(meeting_store(address, 1, 2, TIMEOUT).get("key"))

    thread = threading.Thread(target=second)
    thread.start()
    store = meeting_store(address, 0, 2, TIMEOUT)
    store.set("key", "value")
    thread.join(20)
    assert found == [b"value"] and listening(port) == ["127.0.0.1"]


def test_ranks_of_one_machine_meet_in_a_file(tmp_path: Path) -> None:
    before = set(psutil.Process().net_connections("inet"))
    first, second = (meeting_store(f"file://{tmp_path}/store", rank, 2, TIMEOUT) for rank in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    # Connections of an earlier test may close meanwhile.
    assert set(psutil.Process().net_connections("inet")) <= before
