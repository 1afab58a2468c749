"""Access to Ray: its token, the addresses that it binds to, and a check that it asks for the token."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from slime.types.errors import Unavailable
from slime.types.scratch import ScratchDirectory

log = logging.getLogger(__name__)

AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
# With 0, Ray uses the loopback as the address of a node, and binds everything to it. If it were given 127.0.0.1 as an
# address instead, Ray would replace it by another address of this machine.
SEVERAL_NODES = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
CHECK_SECONDS = 10.0
# A call to Ray that changes nothing, to find out whether Ray asks for a token.
CHECKED_CALL = "/ray.rpc.NodeInfoGcsService/CheckAlive"


@cache
def _own_token() -> str:
    return secrets.token_hex(32)


def loopback_variables() -> dict[str, str]:
    """Returns the environment variables of a Ray that only this machine can reach, and only with the token."""
    return {AUTH_MODE: "token", SEVERAL_NODES: "0"}


@contextmanager
def private_directory() -> Iterator[Path]:
    """Creates a directory for Ray's sockets, ports and logs, which is removed after the context.

    Ray lets every user of the machine write to the files and directories that it creates; in a private directory nobody
    else reaches them. It is in /tmp because paths of Unix sockets have at most 107 characters and TMPDIR may be long.
    """
    directory = ScratchDirectory("slime-ray-", "/tmp" if os.path.isdir("/tmp") else None)
    try:
        yield directory.path
    finally:
        directory.close()


@contextmanager
def own_cluster() -> Iterator[None]:
    """Makes a Ray that is started inside ask for a token and listen on the loopback; leaves no token in ~/.ray.

    With a token there, every later `ray start --head` would start a cluster that asks for it, which `ray start
    --address` and `ray job submit` do not send by themselves.
    """
    variables = loopback_variables()
    has_token = any(name in os.environ for name in (AUTH_TOKEN, AUTH_TOKEN_PATH))
    if not has_token and not Path("~/.ray/auth_token").expanduser().exists():
        variables[AUTH_TOKEN] = _own_token()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    from ray._private import ray_constants
    from ray._raylet import Config

    # If Ray was imported before, it has read both variables already.
    Config.initialize("")
    several_nodes, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several_nodes
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def check_that_ray_asks_for_its_token() -> None:
    """Raises Unavailable if the connected cluster answers a call without a token; warns instead if the user wants that
    (RAY_AUTH_MODE=disabled)."""
    import ray

    address = ray.get_runtime_context().gcs_address
    if not answers_without_token(address):
        return
    if os.environ.get(AUTH_MODE) == "disabled":
        log.warning("Ray at %s takes work from everybody who can reach it (%s=disabled)", address, AUTH_MODE)
        return
    raise Unavailable(
        f"Ray at {address} answers without a token: whoever reaches it can run code as its user. Start it with "
        f"{AUTH_MODE}=token (`ray get-auth-token --generate` makes the token), or allow it with {AUTH_MODE}=disabled",
        field="--ray-address", value=address, expected="a Ray that asks for a token",
    )  # fmt: skip


def answers_without_token(address: str, seconds: float = CHECK_SECONDS) -> bool:
    """Returns whether Ray's control service at "host:port" answers without a token; False also for a service with TLS,
    and if no Ray is there."""
    import grpc

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(CHECKED_CALL)(b"", timeout=seconds)
        except grpc.RpcError:
            return False
    return True
