"""Parses and checks the addresses that users give: "host:port", URLs and "unix:PATH".

gRPC and sockets truncate a port to 16 bits: unchecked, 99999 would connect to port 34463 and send a token there.
"""

from __future__ import annotations

import ipaddress
import re

from slime.types.errors import InvalidSetting

EXPECTED = "HOST:PORT with a port from 1 to 65535"
LAST_PORT = 65535
UNIX = "unix:"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


def split_address(address: str, field: str = "address") -> tuple[str, int]:
    """Returns (host, port) of "host:port"; an IPv6 address loses its brackets. Raises InvalidSetting.

    field: the flag or setting that gave the address.
    """
    host, _, port = address.rpartition(":")
    name = _host(host)
    if name is None or not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) <= LAST_PORT):
        expected = EXPECTED
        if address.count(":") > 1 and not address.startswith("["):
            expected += "; an IPv6 address in brackets"
        raise InvalidSetting.must_be(field, expected, got=address)
    return name, int(port)


def check_address(address: str, field: str = "address") -> str:
    """Returns the address of a service, "host:port" or "unix:PATH". Raises InvalidSetting."""
    if not (address.startswith(UNIX) and len(address) > len(UNIX)):
        split_address(address, field)
    return address


def split_url(url: str, field: str = "url") -> tuple[str, int]:
    """Returns (host, port) of "host:port" or "http://host:port/". Raises InvalidSetting."""
    try:
        return split_address(re.sub(r"^https?://", "", url).removesuffix("/"), field)
    except InvalidSetting as error:
        raise InvalidSetting.must_be(field, error.expected, got=url) from None


def parse_address(text: str) -> str:
    """Returns "host:port", for `setting(parse=...)`. Raises ValueError saying what was expected."""
    try:
        return check_address(text)
    except InvalidSetting as error:
        raise ValueError(f"expected {error.expected}") from None


def join_address(host: str, port: int) -> str:
    """Returns "host:port" of an address to listen on; port 0 lets the system pick one. Raises InvalidSetting."""
    if not 0 <= port <= LAST_PORT:
        raise InvalidSetting.must_be("--port", f"from 0 to {LAST_PORT}", got=port)
    name = _host(host) or _host(f"[{host}]")
    if name is None:
        raise InvalidSetting.must_be("--host", "a name or an IP address", got=host)
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"


def _host(text: str) -> str | None:
    """Returns a host name or IP address, an IPv6 one without its brackets; None for anything else."""
    if text.startswith("[") and text.endswith("]"):
        try:
            ipaddress.IPv6Address(text[1:-1])
        except ValueError:
            return None
        return text[1:-1]
    return text if _NAME.fullmatch(text) else None
