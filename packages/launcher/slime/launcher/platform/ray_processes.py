"""Starts Ray for one run without the processes that serve clusters: autoscaler, dashboard, log monitor, metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Ray starts a worker for each core in advance, for tasks; a run has few processes, most of them with variables of their
# own, which need workers of their own.
WORKERS_BEFOREHAND = "RAY_prestart_worker_first_driver"
NOT_NEEDED = "a run reads neither Ray's dashboard nor its metrics"


@contextmanager
def few_processes() -> Iterator[None]:
    """Makes a Ray that is started inside leave out the processes that no run uses and that take longest to start.

    `ray.init` has no arguments for this. The agent of a node, which Ray requires, starts without its servers, as it
    does if the packages of `ray[default]` are missing. A version of Ray that has these parts elsewhere starts them all.
    """
    replacements = list(_replacements())
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements if hasattr(owner, name)]
    for owner, name, replacement in replacements:
        if hasattr(owner, name):
            setattr(owner, name, replacement)
    workers_beforehand = os.environ.get(WORKERS_BEFOREHAND)
    os.environ.setdefault(WORKERS_BEFOREHAND, "0")
    try:
        yield
    finally:
        if workers_beforehand is None:
            del os.environ[WORKERS_BEFOREHAND]
        for owner, name, function in before:
            setattr(owner, name, function)


def _replacements() -> Iterator[tuple[Any, str, Any]]:
    """Yields (module or class, name, replacement). The names are private to Ray, and any version may lack them."""
    with suppress(ImportError):
        from ray._private.node import Node

        yield Node, "start_monitor", lambda node: None
        yield Node, "start_log_monitor", lambda node: None
        yield Node, "start_api_server", _no_dashboard
    with suppress(ImportError):
        from ray._private import utils

        yield utils, "get_dashboard_dependency_error", lambda: ImportError(NOT_NEEDED)


def _no_dashboard(node: Any, **options: Any) -> None:
    node._webui_url = ""  # it is part of the workers' command lines
