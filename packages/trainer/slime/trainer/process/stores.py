"""Stores where ranks meet. torch's TCPStore asks for no token, so it listens on the given address alone if possible."""

from __future__ import annotations

import datetime
import ipaddress
import socket
from urllib.parse import urlsplit

import torch.distributed as dist


def listening_store(host: str, port: int, timeout: datetime.timedelta, *, members: int | None = None) -> dist.TCPStore:
    """Opens the store of rank 0 at `host`, an address of this machine; port 0 takes a free one.

    Given a host name other than localhost, the store listens on all addresses, because the name may belong to a service
    in front of this machine.
    members: number of ranks to wait for; None waits for none.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host if _is_address(host) else "", port))
        listener.listen()
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host, port, members, is_master=True, timeout=timeout, wait_for_workers=members is not None,
            multi_tenant=True, master_listen_fd=listener.detach(),
        )  # fmt: skip


def meeting_store(address: str, rank: int, world_size: int, timeout: datetime.timedelta) -> dist.Store:
    """Opens the store where a trainer's ranks meet: "host:port", where rank 0 listens, or "file:///path". Blocks."""
    url = urlsplit(address if "://" in address else f"tcp://{address}")
    if url.scheme == "file":
        store: dist.Store = dist.FileStore(url.path, world_size)
        store.set_timeout(timeout)
        return store
    host, port = url.hostname or "", url.port or 0
    if rank == 0:
        return listening_store(host, port, timeout, members=world_size)
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=timeout)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True
