"""Prepares a service or a command to generate: checks plug-ins, loads the tokenizer, starts or finds engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from slime.rollout.calls.event_loop import LoopThread
from slime.rollout.engines.base import RemoteEngine, RunningEngine
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.keys import read_key
from slime.rollout.engines.kind import DECODE, PREFILL, EngineNode
from slime.rollout.engines.process import start_all
from slime.rollout.engines.registry import choose_engine
from slime.rollout.fleet.fleet import Fleet
from slime.rollout.fleet.known_engines import KnownEngines
from slime.rollout.fleet.member import Member
from slime.rollout.fleet.router_address import RouterAddress
from slime.rollout.generate.state import RolloutState, flat_args, fleet_options, restart_limits
from slime.rollout.models.fleets import ModelFleets, stop_fleets
from slime.rollout.models.start import start_models
from slime.rollout.plugins import RolloutPlugins
from slime.rollout.prompts.tokenizer import check_directory, check_transformers, load_tokenizer
from slime.rollout.rewards import reward_function
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.settings.served_models import refuse_in_pairs
from slime.types.addresses import split_url
from slime.types.errors import InvalidSetting, NotAvailable, errors_name

LISTEN_SECONDS = 30.0


def open_state(
    settings: RolloutSettings,
    extra_args: dict[str, Any] | None = None,
    hosted: Sequence[RunningEngine] | None = None,
    engines_file: str | None = None,
) -> RolloutState:
    """Starts or finds the engines, and returns the state that generation needs.

    hosted: engines of this run that were started elsewhere, so that none is started here; an empty list for a run
        whose rollout function needs none.
    engines_file: where the service keeps its external engines. If it exists, it is that of the service before this one:
        engines that have joined are known again, and those that have left or do not answer are not.
    Raises a ConfigError for settings that cannot work, before any engine is started where that can be known. Leaves
    nothing running when it raises.
    """
    known = None if engines_file is None else KnownEngines(Path(engines_file))
    if known is not None:
        settings = known.added_to(settings)
    check_directory(settings.hf_checkpoint)
    check_transformers(settings.hf_checkpoint)
    for model in settings.served_models:
        with errors_name(f"{settings.models_source}: model {model.name}"):
            check_directory(model.path)
    if hosted and settings.use_fault_tolerance:
        raise NotAvailable.unavailable(
            "--use-fault-tolerance", "engines on several nodes cannot be started again during the run",
            "all engines on one node",
        )  # fmt: skip
    restart_limits(settings)
    if settings.rm_type:
        reward_function(settings.rm_type)
    plugins = RolloutPlugins(settings)
    others: dict[str, list[RunningEngine]] = {}
    with ThreadPoolExecutor(1) as pool:
        tokenizer = pool.submit(load_tokenizer, settings.hf_checkpoint)
        if hosted is None and settings.served_models:
            engines, others = start_models(settings)
        else:
            engines = start_engines(settings) if hosted is None else list(hosted)
    loop = LoopThread()
    fleet = Fleet(engines, loop, fleet_options(settings))
    models = ModelFleets(fleet, others)
    try:
        fleet.start(absent_leave=known is not None and known.again)
        models.start()
        for each in models.all if engines else ():
            loop.run(RouterAddress(each, settings.rollout_engine_host).start(), timeout=LISTEN_SECONDS)
        check_abilities(settings, fleet)
        if (extra_args or {}).get("true_on_policy_mode"):
            check_on_policy(fleet.members)
        if known is not None:
            # After the checks: a service that has refused the engines that were left finds all of them again.
            known.keep(fleet)
        if (extra_args or {}).get("multimodal_keys"):
            check_images(settings.hf_checkpoint, fleet.members)
        args = flat_args(settings, fleet, extra_args, models.by_name)
        return RolloutState(args, fleet, tokenizer.result(), plugins, models.by_name)
    except BaseException:
        models.stop()
        raise


def check_abilities(settings: RolloutSettings, fleet: Fleet) -> None:
    """Raises InvalidSetting for an engine, started by someone else, that lacks an ability that the settings require, or
    an engine to do the other part of its requests."""
    stages = {member.stage for member in fleet.members}
    if stages not in (set(), {""}, {PREFILL, DECODE}):
        parts = ", ".join(f"{member.name} does {member.stage or 'both'}" for member in fleet.members)
        raise InvalidSetting.requires(
            "--rollout-external-engine-addrs", "engines that do prefill and engines that decode, or ones that do both",
            parts,
        )  # fmt: skip
    for member in fleet.members:
        check_member(settings, member)


def check_member(settings: RolloutSettings, member: Member) -> None:
    """Does the work of `check_abilities` for one engine."""
    if member.stage:
        refuse_in_pairs(settings, f"engine {member.name}, which does {member.stage}", member.abilities.transfer_backend)
    for wanted, ability, flag in (
        (settings.deterministic, "seeded", "--deterministic"),
        (settings.offloads, "memory_saver", "--offload-rollout"),
        (settings.use_rollout_routing_replay, "returns_experts", "--use-rollout-routing-replay"),
    ):
        if wanted and getattr(member.abilities, ability) is False:
            switch = member.kind.fixes.get(ability, "")
            raise InvalidSetting.requires(
                flag,
                f"engines started with {switch}" if switch else "engines that can do this",
                f"engine {member.name} at {member.url} is not one",
            )


def check_on_policy(members: Sequence[Member]) -> None:
    """Raises InvalidSetting for an engine with which --true-on-policy-mode does not work."""
    for member in members:
        if member.stage:
            raise InvalidSetting.conflict(
                "--true-on-policy-mode", f"engine {member.name}, which does {member.stage}",
                "no test compares the log-probs of pairs of engines with the trainer's",
            )  # fmt: skip


def check_images(directory: str, members: Sequence[Member]) -> None:
    """Raises NotAvailable for an engine that does not show the images of prompts to the model in `directory`."""
    for member in members:
        # A HostedEngine is one of this class too, and the run has started it.
        member.kind.check_images(directory, member.name, external=type(member.engine) is RemoteEngine)


def close_state(state: RolloutState) -> None:
    """Stops the engines that this process started, and the event loop."""
    stop_fleets([state.fleet, *state.models.values()])


def start_engines(
    settings: RolloutSettings, first: Mapping[str, int] | None = None, node: EngineNode | None = None
) -> list[RunningEngine]:
    """Returns the external engines if addresses are given; otherwise starts engines, all at once, and returns them when
    they are ready.

    first: by kind of engine, the number in the name of the first one here (default: 0). node: starts this node's part
    of a single engine that spans several.
    Raises the error with which an engine refuses to start, EngineError with the last lines of one that died, or
    DeadlineExceeded; no engine is left running then.
    """
    if settings.rollout_external_engine_addrs:
        api_key = external_key(settings)
        return [
            RemoteEngine(f"external-{i}", engine_url(address), api_key=api_key)
            for i, address in enumerate(settings.rollout_external_engine_addrs)
        ]
    gpus = visible_gpus()
    kind = choose_engine(settings, gpus)
    if node is not None and not kind.spans_nodes:
        raise InvalidSetting.requires(
            f"--rollout-num-gpus-per-engine {settings.rollout_num_gpus_per_engine}", "--rollout-engine sglang",
            f"an engine of kind {kind.name} runs on one node",
        )  # fmt: skip
    return list(
        start_all(
            kind.starts(settings, gpus, (first or {}).get(kind.name, 0), node), settings.rollout_engine_start_seconds
        )
    )


def external_key(settings: RolloutSettings) -> str | None:
    """Returns the key of external engines, or None. Raises the errors of `read_key`."""
    path = settings.rollout_engine_api_key_file
    return read_key(path, "--rollout-engine-api-key-file") if path is not None else None


def engine_url(address: str, field: str = "--rollout-external-engine-addrs") -> str:
    """Returns `host:port`, or a URL, as `http://host:port`. field: its name in errors. Raises InvalidSetting."""
    split_url(address, field)
    return (address if "://" in address else f"http://{address}").rstrip("/")
