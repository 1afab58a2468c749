"""The table of engine kinds, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.engines.embedded.kind import Embedded
from slime.rollout.engines.kind import EngineKind
from slime.rollout.engines.sglang.kind import SGLang
from slime.types.errors import ConfigError, InvalidSetting
from slime.types.setting_values import flag_name

if TYPE_CHECKING:
    from slime.rollout.settings.rollout import RolloutSettings

log = logging.getLogger(__name__)

# In the order in which `--rollout-engine auto` tries them.
KINDS: dict[str, EngineKind] = {kind.name: kind for kind in (SGLang(), Embedded())}


def engine_kind(name: str) -> EngineKind:
    """Returns the kind with this name. Raises InvalidSetting for an unknown name."""
    if name not in KINDS:
        raise InvalidSetting.unknown("kind of engine", name, KINDS, field="--rollout-engine")
    return KINDS[name]


def choose_engine(settings: RolloutSettings, gpus: Sequence[str], *, assume_installed: bool = False) -> EngineKind:
    """Returns the kind that `--rollout-engine` names, or for auto the first that can run on a machine with these GPUs.

    assume_installed: does not check the packages of this machine, because the run is on another. Raises ConfigError if
    no kind can run.
    """
    lacking: dict[str, ConfigError] = {}
    for kind in KINDS.values():
        if settings.rollout_engine in ("auto", kind.name):
            error = _cannot_run(kind, settings, gpus, assume_installed)
            if error is None:
                break
            lacking[kind.name] = error
    else:
        raise lacking.popitem()[1]
    kind.check(settings)
    if refused := kind.refused_server_flags(settings.sglang_args):
        for error in lacking.values():
            log.warning("%s ignores %s: %s", kind.title, ", ".join(refused), error.message)
    for typed, reason in unread_settings(kind, settings):
        log.warning("%s has no effect: %s", typed, reason)
    if settings.rollout_num_gpus is not None and not gpus:
        raise no_gpu_for(settings.rollout_num_gpus)
    return kind


def unread_settings(kind: EngineKind, settings: RolloutSettings) -> Iterator[tuple[str, str]]:
    """Yields (flag with its value, reason) for each setting that was changed from its default although engines of this
    kind do not read it."""
    for other in KINDS.values():
        for name, instead in other.own_settings.items() if other is not kind else ():
            value = getattr(settings, name)
            if name not in kind.own_settings and value != getattr(type(settings), name):
                reason = f"only {other.title} reads it" + (f"; use {instead}" if instead else "")
                yield f"{flag_name(name)} {value}", reason


def _cannot_run(
    kind: EngineKind, settings: RolloutSettings, gpus: Sequence[str], assume_installed: bool
) -> ConfigError | None:
    if kind.needs_gpu and not gpus:
        return InvalidSetting.requires(f"--rollout-engine {kind.name}", "a GPU", "none is visible")
    if kind.needs_gpu and settings.rollout_engine == "auto" and settings.rollout_engine_device == "cpu":
        return InvalidSetting.conflict(f"--rollout-engine {kind.name}", "--rollout-engine-device cpu")
    if not assume_installed and not kind.is_installed():
        return kind.not_installed()
    return None


def no_gpu_for(rollout_num_gpus: int, instead: str = "") -> InvalidSetting:
    """Returns the error for `--rollout-num-gpus` on a machine without GPUs. instead: another way out, in words."""
    return InvalidSetting.requires(
        f"--rollout-num-gpus {rollout_num_gpus}",
        "a machine with GPUs",
        f"no GPU is visible here; {f'{instead}, and ' if instead else ''}--rollout-num-engines sets how many engines "
        "run on the CPU, as num_engines in the file of --sglang-config does",
    )


def needs_gpu(rollout_engine: str) -> bool:
    """Returns whether `--rollout-engine` names a kind that runs on GPUs only; False for auto."""
    return rollout_engine in KINDS and KINDS[rollout_engine].needs_gpu


def counted_by_engines(rollout_engine: str) -> bool:
    """Returns whether `--rollout-engine` names a kind of which `--rollout-num-engines` are started; False for auto."""
    return rollout_engine in KINDS and not KINDS[rollout_engine].needs_gpu


def kind_of(server_info: Mapping[str, Any], otherwise: EngineKind) -> EngineKind:
    """Returns the kind that a running engine names in its answer to /server_info; `otherwise` for SGLang, which names
    none."""
    return KINDS.get(str(server_info.get("engine")), otherwise)
