"""A Ray of one run without the processes that serve clusters: autoscaler, dashboard, log monitor, metrics."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

# Ray starts a worker for each core beforehand, for tasks; a run has few processes, most with variables of their own.
WORKERS_BEFOREHAND = "RAY_prestart_worker_first_driver"
NOT_NEEDED = "a run reads neither Ray's dashboard nor its metrics"


@contextmanager
def few_processes() -> Iterator[None]:
    """Has the Ray that is started inside leave out what no run uses, and what takes longest to start.

    `ray.init` has no arguments for these. The agent of a node, which Ray insists on, starts as it does where the
    packages of `ray[default]` are missing: without its servers. A Ray that has these parts elsewhere, or under other
    names, starts them all.
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
    """Yields (module or class, name, what takes its place). These are private to Ray and may be gone in any version."""
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
