"""Kinds of inference engines: how one is started, what it can do, how weights reach it, and the memory that it takes.

Adding a kind: a module with a subclass of `EngineKind`, and a row in `registry.KINDS`. Settings and `--help` read these
modules, which therefore import what starts an engine only when one is started.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, TypeVar

from slime.types.errors import ConfigError, NotAvailable
from slime.types.models.vision import FAMILIES, require_vision
from slime.types.setting_values import flag_name

if TYPE_CHECKING:
    from slime.rollout.engines.client import EngineClient
    from slime.rollout.engines.process import EngineProcess
    from slime.rollout.settings.rollout import RolloutSettings

T = TypeVar("T")
Starts: TypeAlias = "list[Callable[[], EngineProcess]]"


@dataclass(frozen=True)
class Abilities:
    """Abilities of one running engine; None where it does not say.

    seeded: sampling follows `sampling_seed`. memory_saver: GPU memory can be released; keeps_weights: without losing
    the weights. returns_experts: it tells which experts tokens were sent to. tp_size: its tensor-parallel ranks.
    """

    seeded: bool | None = None
    memory_saver: bool | None = None
    keeps_weights: bool | None = None
    returns_experts: bool | None = None
    tp_size: int = 1


@dataclass(frozen=True)
class MemoryUse:
    """The GPU memory of an engine, as its settings describe it.

    dtype: of the weights; None: as in config.json, else `usual_dtype`. gpus: GPUs that share one copy of the model.
    small_cache: whether the cache has one byte per number rather than the bytes of `dtype`.
    fraction: of each GPU that weights and cache take together; None: the cache grows with what runs.
    because: where the fraction is from, or what bounds the cache. packed_models: architectures in config.json whose
    weights are held a second time on a CPU, with at most 4 bytes a parameter.
    """

    dtype: str | None
    usual_dtype: str
    gpus: int = 1
    small_cache: bool = False
    fraction: float | None = None
    because: str = ""
    packed_models: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineNode:
    """One node's part of an engine that is on several.

    count: of its nodes; rank: of this one, the first of which serves; address: "host:port" where they meet.
    """

    count: int
    rank: int
    address: str


class EngineKind(abc.ABC):
    """One kind of engine. All of them speak SGLang's HTTP protocol.

    name: its spelling in `--rollout-engine` and on the wire. title: its name in a sentence.
    weight_transports: the transports of `--update-weight-transport` that it takes, the best one first.
    delta_carriers: how it takes deltas of weights, see `slime.types.weight_deltas.CARRIERS`; empty: not at all.
    needs_gpu: whether it runs on GPUs only; the number of others is `--rollout-num-engines`.
    spans_nodes: whether one engine can be on several nodes.
    server_flags: names of the `--sglang-NAME` flags that reach it, with underscores; None: all.
    own_settings: settings of the run that no other kind reads, and for each the flag that the others have, "" for none.
    image_models: values of model_type in config.json whose images it takes; None: all that the project knows.
    aborts_before_stop: whether it ends only once its requests have.
    returns_nuclei: whether its answers can tell what top-p and top-k left to sample from, which training needs.
    fixes: for an ability that a running engine may lack, the flag of its server that turns it on.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    weight_transports: ClassVar[tuple[str, ...]]
    delta_carriers: ClassVar[tuple[str, ...]] = ()
    needs_gpu: ClassVar[bool] = False
    spans_nodes: ClassVar[bool] = False
    server_flags: ClassVar[frozenset[str] | None] = frozenset()
    own_settings: ClassVar[Mapping[str, str]] = {}
    image_models: ClassVar[frozenset[str] | None] = None
    aborts_before_stop: ClassVar[bool] = False
    returns_nuclei: ClassVar[bool] = False
    fixes: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def is_installed(self) -> bool:
        """Tells whether its packages are installed; imports none of them."""

    @abc.abstractmethod
    def not_installed(self) -> ConfigError:
        """Returns the error for a machine without its packages."""

    def check(self, settings: RolloutSettings) -> None:
        """Raises ConfigError for settings with which no engine of this kind starts."""
        return None

    def refused_server_flags(self, names: Iterable[str]) -> list[str]:
        """Returns the flags among `--sglang-NAME` of these names that do not reach it."""
        taken = self.server_flags
        return [] if taken is None else [flag_name(f"sglang_{name}") for name in names if name not in taken]

    @abc.abstractmethod
    def divide(self, gpus: Sequence[T], engines: int, gpus_per_engine: int) -> list[list[T]]:
        """Returns the GPUs of each engine that is started where there are these; engines: `--rollout-num-engines`."""

    @abc.abstractmethod
    def starts(
        self, settings: RolloutSettings, gpus: Sequence[str], first: int = 0, node: EngineNode | None = None
    ) -> Starts:
        """Returns functions that start the engines, one each, on `gpus`.

        first: the number in the name of the first one. node: the part of a single engine to start on all of `gpus`.
        """

    @abc.abstractmethod
    def abilities(self, server_info: Mapping[str, Any]) -> Abilities:
        """Returns what a running engine can do. server_info: the engine's answer to /server_info; empty where it gave
        none."""

    @abc.abstractmethod
    def memory(self, settings: RolloutSettings) -> MemoryUse:
        """Returns the memory of one engine with these settings."""

    async def hold(self, client: EngineClient) -> None:
        """Pauses a running engine so that weights can be loaded and memory released."""
        await client.pause("retract")

    def takes_images_of(self, model_type: str) -> bool:
        return model_type in FAMILIES and (self.image_models is None or model_type in self.image_models)

    def check_images(self, directory: str, engine: str = "") -> None:
        """Raises NotAvailable where engines of this kind do not show images to the model in `directory`.

        engine: the one that is named in the error.
        """
        model_type = require_vision(directory, "--multimodal-keys").model_type
        if self.takes_images_of(model_type):
            return
        known = ", ".join(name for name in FAMILIES if self.takes_images_of(name))
        which = f"engine {engine} ({self.title})" if engine else self.title
        raise NotAvailable.unavailable(
            f"--multimodal-keys with --rollout-engine {self.name}",
            f"{which} takes no token ids beside the images of a {model_type} ({directory}), only of {known}",
            "--rollout-engine embedded",
        )
