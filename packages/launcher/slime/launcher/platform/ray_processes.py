"""Starts Ray for one run without the processes that serve clusters, autoscaler, dashboard, log monitor and metrics, and
without its signal handler in this process."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
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
    workers_beforehand = os.environ.get(WORKERS_BEFOREHAND)
    os.environ.setdefault(WORKERS_BEFOREHAND, "0")
    try:
        with _replaced(_replacements()):
            yield
    finally:
        if workers_beforehand is None:
            del os.environ[WORKERS_BEFOREHAND]


@contextmanager
def no_signal_handler_of_ray() -> Iterator[None]:
    """Keeps Ray from handling signals in this process. Its own processes still write where they crashed.

    A SIGTERM that came to Ray's handler before the end of `ray.init` would abort this process 3 s later, also while it
    stops what it has started. Ray has this setting since 2.53; with 2.52 its handler stays.
    """
    from ray._private import ray_constants

    with _replaced([(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER", True)]):
        yield


@contextmanager
def _replaced(replacements: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Replaces those attributes, (module or class, name, value), that this version of Ray has."""
    existing = [replacement for replacement in replacements if hasattr(*replacement[:2])]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in existing]
    for owner, name, value in existing:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


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
