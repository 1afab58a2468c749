"""Starts the engines of all models of a run, at the same time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from slime.rollout.engines.base import RunningEngine
from slime.rollout.engines.gpus import VISIBLE, visible_gpus
from slime.rollout.engines.process import EngineProcess, start_all
from slime.rollout.engines.registry import choose_engine
from slime.rollout.settings.rollout import RolloutSettings
from slime.rollout.settings.served_models import check_group, group_settings
from slime.types.errors import InvalidSetting

log = logging.getLogger(__name__)


def start_models(settings: RolloutSettings) -> tuple[list[RunningEngine], dict[str, list[RunningEngine]]]:
    """Starts the engines of all models; returns those of the trained one, and those of the others by name.

    Raises the errors of `start_all`; then no engine is left running.
    """
    gpus = visible_gpus()
    starts = starts_of_models(settings, gpus)
    processes = iter(
        start_all([start for each in starts.values() for start in each], settings.rollout_engine_start_seconds)
    )
    started: dict[str, list[RunningEngine]] = {name: [next(processes) for _ in each] for name, each in starts.items()}
    for name, engines in started.items():
        log.info("model %s is served by %s", name, ", ".join(engine.name for engine in engines))
    trained = next(model.name for model in settings.served_models if model.trained)
    return started.pop(trained), started


def starts_of_models(settings: RolloutSettings, gpus: Sequence[str]) -> Mapping[str, list[Callable[[], EngineProcess]]]:
    """Returns the functions that start the engines of each model. gpus: entries of CUDA_VISIBLE_DEVICES, which groups
    get in their order; engines that are not counted by GPUs share them. Raises InvalidSetting for too few."""
    kind = choose_engine(settings, gpus)
    starts: dict[str, list[Callable[[], EngineProcess]]] = {model.name: [] for model in settings.served_models}
    taken = number = 0
    for model in settings.served_models:
        for group in model.groups:
            check_group(kind, settings, group)
            share = gpus
            if group.num_gpus is not None:
                share = gpus[taken : taken + group.num_gpus]
                taken += group.num_gpus
                if taken > len(gpus):
                    in_file = settings.sglang_config is not None
                    raise InvalidSetting.must_be(
                        f"{settings.place_of(group)}.num_gpus" if in_file else "--rollout-num-gpus",
                        f"at most {len(share if in_file else gpus)}",
                        got=group.num_gpus if in_file else settings.rollout_num_gpus,
                        reason=f"the visible GPUs are {VISIBLE}={','.join(gpus)}",
                    )
            others = 0 if group.num_engines is None else settings.rollout_num_engines - group.num_engines
            of_group = kind.starts(
                group_settings(settings, model, group), share, number, others=others, worker_type=group.worker_type
            )
            starts[model.name] += of_group
            number += len(of_group)
    return starts
