"""Checksums of whole tensors, by the names of --update-weight-delta-checksum."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from slime.types.errors import NotAvailable

CHECKSUMS = ("xxh3-128", "blake3", "adler32")
EXTRA = "slime-types[deltas]"


def find_checksum(name: str) -> Callable[[Any], str]:
    """Returns the function from contiguous bytes to their checksum. Raises NotAvailable for an unknown name, or where
    its package is not installed."""
    try:
        if name == "xxh3-128":
            import xxhash

            return lambda data: xxhash.xxh3_128_hexdigest(data)
        if name == "blake3":
            import blake3

            return lambda data: blake3.blake3(data, max_threads=blake3.blake3.AUTO).hexdigest()
    except ImportError:
        package = name.partition("-")[0].replace("xxh3", "xxhash")
        raise NotAvailable.not_installed(f"--update-weight-delta-checksum {name}", package, EXTRA) from None
    if name == "adler32":
        return lambda data: f"{zlib.adler32(data):08x}"
    raise NotAvailable.one_of("--update-weight-delta-checksum", CHECKSUMS, got=name)
