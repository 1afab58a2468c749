"""The embedded engine as a kind of engine."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from slime.rollout.chat.syntaxes.registry import AnswerSyntax
from slime.rollout.children.environment import search_path
from slime.rollout.engines.gpus import VISIBLE
from slime.rollout.engines.kind import REGULAR, Abilities, EngineKind, EngineNode, MemoryUse, Starts
from slime.types.errors import ConfigError, NotAvailable

if TYPE_CHECKING:
    from slime.rollout.settings.rollout import RolloutSettings

T = TypeVar("T")

PACKAGES = ("torch", "transformers")
# The fraction of a memory that all engines sharing it may fill with keys and values.
MEMORY_FRACTION = 0.5
MAX_RUNNING_REQUESTS = 256


def _most_running(settings: RolloutSettings) -> int:
    return settings.rollout_engine_max_running_requests or MAX_RUNNING_REQUESTS


def _syntax(settings: RolloutSettings) -> AnswerSyntax:
    args = settings.sglang_args
    return AnswerSyntax(args.get("tool_call_parser"), args.get("reasoning_parser"))


class Embedded(EngineKind):
    name = "embedded"
    title = "the embedded engine"
    fixes = {"returns_experts": "--enable-return-routed-experts"}
    weight_transports = ("tensor", "disk")
    delta_carriers = ("tensor", "disk")
    stream_interval = 64
    increments = {"incremental": True}
    nuclei = {"return_top_p_token_ids": True}
    server_flags = frozenset({"tool_call_parser", "reasoning_parser"})
    own_settings = {
        "rollout_num_engines": "--rollout-num-gpus", "rollout_engine_dtype": "--sglang-dtype",
        "rollout_engine_max_running_requests": "--sglang-max-running-requests", "rollout_engine_device": "",
        "rollout_engine_threads": "",
    }  # fmt: skip

    def is_installed(self) -> bool:
        return not self.missing()

    def not_installed(self) -> ConfigError:
        return NotAvailable.requires(
            "--rollout-engine embedded",
            " and ".join(self.missing() or PACKAGES),
            'pip install "slime-rollout[embedded]", or name engines that run already with '
            "--rollout-external-engine-addrs",
        )

    def missing(self) -> list[str]:
        """Returns the packages of the engine that are not installed."""
        return [name for name in PACKAGES if importlib.util.find_spec(name) is None]

    def check(self, settings: RolloutSettings) -> None:
        _syntax(settings).check("the embedded engine has no such parser")

    def divide(self, gpus: Sequence[T], engines: int, gpus_per_engine: int) -> list[list[T]]:
        """Assigns the GPUs, if any, to the engines in turn."""
        return [[gpus[i % len(gpus)]] if gpus else [] for i in range(engines)]

    def starts(
        self,
        settings: RolloutSettings,
        gpus: Sequence[str],
        first: int = 0,
        node: EngineNode | None = None,
        others: int = 0,
        worker_type: str = REGULAR,
    ) -> Starts:
        from slime.rollout.engines.embedded.launch import start_embedded
        from slime.rollout.engines.embedded.options import EmbeddedOptions
        from slime.rollout.engines.keys import new_key

        syntax = _syntax(settings)
        shares = self.divide(gpus, settings.rollout_num_engines, settings.rollout_num_gpus_per_engine)
        on_gpus = len(gpus) if settings.rollout_engine_device != "cpu" else 0
        # The number of engines that share one memory for their keys and values.
        sharing = max(1, math.ceil((len(shares) + others) / max(1, on_gpus)))
        options = EmbeddedOptions(
            model_path=settings.hf_checkpoint,
            host=settings.rollout_engine_host,
            tool_call_parser=syntax.tool_calls,
            reasoning_parser=syntax.reasoning,
            device=settings.rollout_engine_device,
            dtype=settings.rollout_engine_dtype,
            threads=settings.rollout_engine_threads,
            enable_return_routed_experts=settings.use_rollout_routing_replay,
            max_running_requests=_most_running(settings),
            max_total_tokens=settings.rollout_engine_max_total_tokens,
            memory_fraction=MEMORY_FRACTION / sharing,
            deterministic=settings.deterministic,
            random_seed=settings.rollout_seed,
        )
        return [
            partial(
                start_embedded,
                options,
                name=f"embedded-{i}",
                api_key=new_key(),
                env={"PYTHONPATH": search_path()} | ({VISIBLE: ",".join(share)} if share else {}),
            )
            for i, share in enumerate(shares, first)
        ]

    def abilities(self, server_info: Mapping[str, Any]) -> Abilities:
        return Abilities(
            seeded=True,
            memory_saver=True,
            keeps_weights=True,
            returns_experts=server_info.get("enable_return_routed_experts"),
            increments=server_info.get("increments"),
        )

    def memory(self, settings: RolloutSettings) -> MemoryUse:
        from slime.rollout.engines.embedded.options import PACKED_MODELS

        dtype = settings.rollout_engine_dtype
        return MemoryUse(
            dtype=None if dtype == "auto" else dtype,
            usual_dtype="float32",
            because=f"the cache grows with up to {_most_running(settings)} sequences at once",
            packed_models=PACKED_MODELS,
        )
