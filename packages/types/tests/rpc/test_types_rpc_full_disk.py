"""A service on a full disk says that its token cannot be written, and leaves no part of it."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from slime.types.errors import OutOfSpace
from slime.types.rpc import RpcSettings, RunningService, Server


def test_a_token_that_does_not_fit_on_the_disk_is_an_error_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A limit of files ends writes as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(OutOfSpace) as raised:
            RunningService(Server([], RpcSettings(), service_names=[]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(tmp_path / "slime" / "127.0.0.1:") in raised.value.message
    assert list((tmp_path / "slime").iterdir()) == []
