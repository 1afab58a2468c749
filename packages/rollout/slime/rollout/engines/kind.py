"""Kinds of inference engines: how one is started, what it can do, how weights reach it, and how much memory it takes.

To add a kind, write a module with a subclass of `EngineKind`, and add a row to `registry.KINDS`. Settings and `--help`
import these modules, which therefore import the code that starts engines only when one is started.
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
# The worker types of engines, as in the file of --sglang-config.
REGULAR, PREFILL, DECODE = "regular", "prefill", "decode"
Starts: TypeAlias = "list[Callable[[], EngineProcess]]"


@dataclass(frozen=True)
class Abilities:
    """Abilities of one running engine; None where it does not report them.

    seeded: sampling follows `sampling_seed`. memory_saver: its GPU memory can be released. keeps_weights: releasing
    does not lose the weights. returns_experts: answers can hold the experts of each token. increments: a
    stream holds each token only once, at least if the request asks for it. tp_size: the number of its tensor-parallel
    ranks. stage: PREFILL or DECODE where it does only that part of each request, and another engine the other; "" where
    it does both. bootstrap_port: where engines that decode reach one that does prefill. transfer_backend: how it hands
    keys and values over.
    """

    seeded: bool | None = None
    memory_saver: bool | None = None
    keeps_weights: bool | None = None
    returns_experts: bool | None = None
    increments: bool | None = None
    tp_size: int = 1
    stage: str = ""
    bootstrap_port: int | None = None
    transfer_backend: str | None = None


@dataclass(frozen=True)
class MemoryUse:
    """The GPU memory of an engine, derived from its settings.

    dtype: the weights' dtype; None: as in config.json, else `usual_dtype`. gpus: the number of GPUs that share one copy
    of the model. small_cache: whether the cache has one byte per number, in place of the bytes of `dtype`. fraction:
    the part of each GPU that weights and cache take together; None: the cache grows with the running sequences.
    because: the origin of the fraction, or the bound of the cache. packed_models: architectures in config.json of which
    a second copy of the weights is held on a CPU, with at most 4 bytes per parameter.
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
    """One node's part of an engine that spans several nodes.

    count: the number of its nodes. rank: the rank of this node; rank 0 serves. address: "host:port" where they meet.
    """

    count: int
    rank: int
    address: str


class EngineKind(abc.ABC):
    """One kind of engine. All of them speak SGLang's HTTP protocol.

    name: its spelling in `--rollout-engine` and on the wire. title: its name in a sentence.
    weight_transports: the transports of `--update-weight-transport` that it supports, the best one first.
    delta_carriers: the ways in which it receives weight deltas, see `slime.types.weight_deltas.CARRIERS`; empty: none.
    deltas_if_started: whether only engines that the run has started receive them.
    holds_quantized: whether it holds FP8 and INT4 weights of a checkpoint as they are, and takes updates of them.
    needs_gpu: whether it runs on GPUs only; the number of other engines is `--rollout-num-engines`.
    spans_nodes: whether one engine can span several nodes.
    worker_types: the parts of a request that its engines can be started for.
    server_flags: names of the `--sglang-NAME` flags that it reads, with underscores; None: all.
    invariant_kernels: the flags `--sglang-NAME` with which the trainer can compute, on one GPU, what it computes, bit
    for bit; empty: none.
    own_settings: settings of the run that no other kind reads, each with the flag of the other kinds, "" for none.
    image_models: values of model_type in config.json whose images it reads; None: all that the project supports.
    aborts_before_stop: whether it stops only after its requests have ended.
    stream_interval: the default of `--rollout-stream-interval` for an engine with `increments`.
    increments: fields of a request that ask an engine with this ability for them.
    nuclei: fields of a request that ask for the token ids that top-p and top-k left, which training needs; empty: its
    answers cannot hold them.
    nuclei_need_top_k: whether its answers hold them only where top-k bounds their number.
    fixes: for each ability that a running engine may lack, the flag of its server that turns it on.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    weight_transports: ClassVar[tuple[str, ...]]
    delta_carriers: ClassVar[tuple[str, ...]] = ()
    deltas_if_started: ClassVar[bool] = False
    holds_quantized: ClassVar[bool] = False
    needs_gpu: ClassVar[bool] = False
    spans_nodes: ClassVar[bool] = False
    worker_types: ClassVar[tuple[str, ...]] = (REGULAR,)
    server_flags: ClassVar[frozenset[str] | None] = frozenset()
    invariant_kernels: ClassVar[Mapping[str, Any]] = {}
    own_settings: ClassVar[Mapping[str, str]] = {}
    image_models: ClassVar[frozenset[str] | None] = None
    aborts_before_stop: ClassVar[bool] = False
    stream_interval: ClassVar[int] = 0
    increments: ClassVar[Mapping[str, Any]] = {}
    nuclei: ClassVar[Mapping[str, Any]] = {}
    nuclei_need_top_k: ClassVar[bool] = False
    fixes: ClassVar[Mapping[str, str]] = {}

    @abc.abstractmethod
    def is_installed(self) -> bool:
        """Returns whether its packages are installed, without importing them."""

    @abc.abstractmethod
    def not_installed(self) -> ConfigError:
        """Returns the error to raise if its packages are not installed."""

    def check(self, settings: RolloutSettings) -> None:
        """Raises ConfigError for settings with which no engine of this kind can start."""
        return None

    def refused_server_flags(self, names: Iterable[str]) -> list[str]:
        """Returns those of the flags `--sglang-NAME` with these names that this kind does not read."""
        taken = self.server_flags
        return [] if taken is None else [flag_name(f"sglang_{name}") for name in names if name not in taken]

    @abc.abstractmethod
    def divide(self, gpus: Sequence[T], engines: int, gpus_per_engine: int) -> list[list[T]]:
        """Returns the GPUs of each engine on a machine with `gpus`. engines: the value of `--rollout-num-engines`."""

    @abc.abstractmethod
    def starts(
        self,
        settings: RolloutSettings,
        gpus: Sequence[str],
        first: int = 0,
        node: EngineNode | None = None,
        others: int = 0,
        worker_type: str = REGULAR,
    ) -> Starts:
        """Returns one function per engine that starts it on its part of `gpus`.

        first: the number in the name of the first engine. node: the part of one engine that `gpus` are for, if it spans
        nodes. others: further engines that share `gpus`, or the CPU, with these. worker_type: one of `worker_types`.
        """

    @abc.abstractmethod
    def abilities(self, server_info: Mapping[str, Any]) -> Abilities:
        """Returns the abilities of a running engine. server_info: its answer to /server_info; empty if it gave none."""

    @abc.abstractmethod
    def memory(self, settings: RolloutSettings) -> MemoryUse:
        """Returns the memory use of one engine with these settings."""

    async def hold(self, client: EngineClient) -> None:
        """Pauses a running engine so that weights can be loaded and memory released."""
        await client.pause("retract")

    def takes_images_of(self, model_type: str) -> bool:
        return model_type in FAMILIES and (self.image_models is None or model_type in self.image_models)

    def check_images(self, directory: str, engine: str = "", *, external: bool = False) -> None:
        """Raises NotAvailable if engines of this kind cannot pass images to the model in `directory`.

        engine: the name of the engine for the error. external: whether someone else started it.
        """
        model_type = require_vision(directory, "--multimodal-keys").model_type
        if self.takes_images_of(model_type):
            return
        known = ", ".join(name for name in FAMILIES if self.takes_images_of(name))
        which = f"engine {engine} ({self.title})" if engine else self.title
        raise NotAvailable.unavailable(
            f"--multimodal-keys with --rollout-engine {self.name}",
            f"{which} accepts token ids together with images only for {known}, not for {model_type} ({directory})",
            "--rollout-engine embedded",
        )
