"""Channels and servers: deadlines, retries, errors, TLS, tokens, health, reflection."""

from slime.types.rpc.channel import connect
from slime.types.rpc.server import RunningService, Server
from slime.types.rpc.settings import RpcSettings
from slime.types.rpc.status import Cancelled, MessageTooLarge

__all__ = [
    "Cancelled",
    "MessageTooLarge",
    "RpcSettings",
    "RunningService",
    "Server",
    "connect",
]
