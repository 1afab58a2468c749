"""Starts an embedded engine as a process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.types.setting_values import flag_name

# The trainer works on the same cores: OpenMP threads that spin while they wait slow both down by an order of magnitude.
# Threads that sleep at once would spend a third of each decode step waking up, about a thousand times per step. So they
# spin for less than a millisecond first, which is longer than the pauses within a forward pass.
SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


def start_embedded(
    options: EmbeddedOptions,
    *,
    name: str = "embedded-0",
    env: Mapping[str, str] | None = None,
    api_key: str | None = None,
) -> EngineProcess:
    """Starts the process without waiting until it serves (`wait_ready(timeout)` does), so that several load at once.

    api_key: the key that calls must carry; it is passed in the environment of the process.
    """
    return EngineProcess(
        name,
        "embedded",
        lambda announce, parent: command_line(options, announce, parent),
        host=options.host,
        env={**SHARED_CORES, **(env or {})},
        api_key=api_key,
    )


def command_line(options: EmbeddedOptions, announce_fd: int | None = None, parent_fd: int | None = None) -> list[str]:
    """Returns the argument vector that starts an engine with these options."""
    chosen = dataclasses.replace(options, announce_fd=announce_fd, parent_fd=parent_fd)
    argv = [sys.executable, "-m", "slime.rollout.engines.embedded"]
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        flag = flag_name(field.name)
        if isinstance(value, list):
            argv += [word for item in value for word in (flag, str(item))]
        elif value is True:
            argv.append(flag)
        elif value is not None and value is not False:
            argv += [flag, str(value)]
    return argv
