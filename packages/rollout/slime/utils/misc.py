"""Compatibility: `slime.utils.misc`, small tools that plug-ins import."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from typing import Any

from slime.types.plugins import find_function

__all__ = [
    "SingletonMeta", "exec_command", "get_current_node_ip", "get_free_port", "is_port_available", "load_function",
    "should_run_checkpoint_action", "should_run_periodic_action",
]  # fmt: skip

LAST_PORT = 65535


def load_function(path: str) -> Callable[..., Any]:
    """Returns the function `module.attribute`, or one of `FILE.py:function`. Raises PluginError, a ValueError."""
    return find_function(path, flag="load_function")


class SingletonMeta(type):
    """A metaclass whose classes make one instance and return it from then on, whatever the arguments."""

    _instances: dict[type, Any] = {}  # noqa: RUF012  the name that subclasses of the original clear

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **kwargs)
        return cls._instances[cls]


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Runs a bash command; returns its standard output with `capture_output`. Raises CalledProcessError."""
    done = subprocess.run(
        ["bash", "-c", cmd], check=True, stdout=subprocess.PIPE if capture_output else None, text=True
    )
    return done.stdout if capture_output else None


def get_current_node_ip() -> str:
    """Returns the address of this machine that others reach; 127.0.0.1 where it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Sends nothing: it only chooses the interface. The address is one of documentation (RFC 5737).
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def is_port_available(port: int) -> bool:
    """Returns whether no process listens on a TCP port, at any address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """Returns the first of `consecutive` free ports in a row, from `start_port` on. Raises OSError where none are."""
    for port in range(start_port, LAST_PORT + 2 - consecutive):
        if all(is_port_available(port + i) for i in range(consecutive)):
            return port
    raise OSError(f"no {consecutive} free ports in a row from {start_port} on")


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Returns whether an action of every `interval` iterations is due after iteration `rollout_id`, counted from 0.

    It is also due at the end of each epoch and after the last iteration, where their numbers are given.
    """
    if interval is None:
        return False
    done = rollout_id + 1
    ends_epoch = num_rollout_per_epoch is not None and done % num_rollout_per_epoch == 0
    return done % interval == 0 or done == num_rollout or ends_epoch


should_run_checkpoint_action = should_run_periodic_action
