"""Opens what a service (or a command) generates with: plug-ins checked, tokenizer loaded, engines started or found."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.rollout.engines.base import Engine, RemoteEngine
from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.fleet import Fleet
from slime.rollout.generate.prompts import check_directory, load_tokenizer
from slime.rollout.generate.state import GenerateState, flat_args, fleet_options
from slime.rollout.loop import LoopThread
from slime.rollout.plugins import RolloutPlugins
from slime.rollout.rewards import reward_function
from slime.rollout.settings import RolloutSettings
from slime.types.errors import InvalidSetting


def open_state(settings: RolloutSettings, extra_args: dict[str, Any] | None = None) -> GenerateState:
    """Raises ConfigError and its kin, before any engine is started where that can be known; leaves nothing running."""
    check_directory(settings.hf_checkpoint)
    if settings.rm_type:
        reward_function(settings.rm_type)
    plugins = RolloutPlugins(settings)
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, settings.hf_checkpoint)
        engines = start_engines(settings)
    loop = LoopThread()
    fleet = Fleet(engines, loop, fleet_options(settings))
    try:
        fleet.start()
        return GenerateState.attach(flat_args(settings, fleet, extra_args), fleet, tokenizer.result(), plugins)
    except BaseException:
        _close(fleet)
        raise


def close_state(state: GenerateState) -> None:
    """Ends the engines that are ours, and the loop."""
    _close(state.fleet)


def _close(fleet: Fleet) -> None:
    try:
        fleet.stop()
    finally:
        fleet.loop.stop()


def start_engines(settings: RolloutSettings) -> list[Engine]:
    """External engines where addresses are given, else embedded ones, which load at the same time; ready when returned.

    Raises what an engine refuses to start with; then none is left running.
    """
    if settings.rollout_external_engine_addrs:
        return [
            RemoteEngine(f"external-{i}", engine_url(address))
            for i, address in enumerate(settings.rollout_external_engine_addrs)
        ]
    options = EmbeddedOptions(
        model_path=settings.hf_checkpoint,
        device=settings.rollout_engine_device,
        dtype=settings.rollout_engine_dtype,
        threads=settings.rollout_engine_threads,
        max_running_requests=settings.rollout_engine_max_running_requests,
        deterministic=settings.deterministic,
        random_seed=settings.rollout_seed,
    )
    processes: list[EngineProcess] = []
    try:
        for i in range(settings.rollout_num_engines):
            processes.append(start_embedded(options, name=f"embedded-{i}", env={"PYTHONPATH": search_path()}))
        return [process.wait_ready(settings.rollout_engine_start_seconds) for process in processes]
    except BaseException:
        for process in processes:
            process.stop()
        raise


def search_path() -> str:
    """Where this process finds its modules, for a process that must find the same."""
    return os.pathsep.join(path for path in sys.path if path)


def engine_url(address: str) -> str:
    """`host:port`, or a URL, as `http://host:port`."""
    url = address if "://" in address else f"http://{address}"
    if not url.rsplit(":", 1)[-1].rstrip("/").isdigit():
        raise InvalidSetting(
            f"--rollout-external-engine-addrs: got {address!r}, expected HOST:PORT",
            field="--rollout-external-engine-addrs",
            value=address,
            expected="HOST:PORT",
        )
    return url.rstrip("/")
