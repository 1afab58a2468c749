"""SGLang as a kind of engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.rollout.children.environment import search_path
from slime.rollout.engines.kind import DECODE, PREFILL, REGULAR, Abilities, EngineKind, EngineNode, MemoryUse, Starts
from slime.rollout.engines.sglang import plugin
from slime.rollout.engines.sglang.installed import drops_image_positions, is_installed, takes_image_positions
from slime.types.errors import ConfigError, EngineError, InvalidField, InvalidSetting, NotAvailable
from slime.types.models.vision import require_vision
from slime.types.setting_values import flag_name

if TYPE_CHECKING:
    from slime.rollout.engines.client import EngineClient
    from slime.rollout.settings.rollout import RolloutSettings

log = logging.getLogger(__name__)
T = TypeVar("T")
# Models of which SGLang reads the share of a head's channels that turn with the position in one place of config.json
# alone, and what it takes where there is none (0.5.17, configs/qwen3_next.py).
PARTLY_ROTATED, ROTATED = ("qwen3_next", "qwen3_5"), 0.25

FLUSH_SECONDS = 60.0
# SGLang derives the fraction from the size of the GPU and of its batches; this is the usual result.
USUAL_FRACTION = 0.85


class SGLang(EngineKind):
    name = "sglang"
    title = "SGLang"
    weight_transports = ("ipc", "nccl", "disk")
    delta_carriers = ("checkpoint", "nccl")
    deltas_if_started = True
    holds_quantized = True
    needs_gpu = True
    spans_nodes = True
    worker_types = (REGULAR, PREFILL, DECODE)
    server_flags = None
    invariant_kernels = {"enable_deterministic_inference": True, "attention_backend": "fa3"}
    own_settings = {"rollout_num_gpus_per_engine": ""}
    image_models = frozenset({"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"})
    aborts_before_stop = True
    nuclei = {"return_sampling_mask": True}
    nuclei_need_top_k = True
    fixes = {
        "seeded": "--enable-deterministic-inference",
        "memory_saver": "--enable-memory-saver",
        "returns_experts": "--enable-return-routed-experts",
    }

    def is_installed(self) -> bool:
        return is_installed()

    def not_installed(self) -> ConfigError:
        return NotAvailable.requires("--rollout-engine sglang", "SGLang", "it is not installed")

    def check(self, settings: RolloutSettings) -> None:
        _check_rotation(settings.hf_checkpoint)
        name = "rollout_top_p" if settings.rollout_top_p < 1 else "rollout_top_k"
        if settings.samples_from_nuclei and settings.sglang_args.get("speculative_algorithm"):
            raise InvalidSetting.conflict(
                f"{flag_name(name)} {getattr(settings, name):g}", "--sglang-speculative-algorithm",
                "SGLang cannot tell then which tokens each one was sampled from",
            )  # fmt: skip

    def check_images(self, directory: str, engine: str = "", *, external: bool = False) -> None:
        super().check_images(directory, engine)
        model_type = require_vision(directory, "--multimodal-keys").model_type
        if model_type == "qwen3_5" and external:
            log.warning(
                "engine %s: an SGLang before 0.5.23 has wrong log-probs for images of Qwen3.5, unless slime-rollout is "
                "installed there and %s=1 is in its environment; nothing checks this", engine, plugin.IMAGE_VARIABLE,
            )  # fmt: skip
            return
        if model_type != "qwen3_5" or not drops_image_positions() or (plugin.is_found() and takes_image_positions()):
            return
        raise NotAvailable.unavailable(
            "--multimodal-keys with --rollout-engine sglang",
            "the installed SGLang applies only the temporal part of M-RoPE to images of Qwen3.5 "
            "(sgl-project/sglang#34446), so its log-probs with images are wrong; and the plug-in that corrects it "
            + ("does not know this version" if plugin.is_found() else "is not found"),
            "SGLang 0.5.17" if plugin.is_found() else "slime-rollout installed as a distribution (pip install)",
        )

    def divide(self, gpus: Sequence[T], engines: int, gpus_per_engine: int) -> list[list[T]]:
        used = len(gpus) // gpus_per_engine * gpus_per_engine
        return [list(gpus[i : i + gpus_per_engine]) for i in range(0, used, gpus_per_engine)]

    def starts(
        self,
        settings: RolloutSettings,
        gpus: Sequence[str],
        first: int = 0,
        node: EngineNode | None = None,
        others: int = 0,
        worker_type: str = REGULAR,
    ) -> Starts:
        from slime.rollout.engines.keys import new_key
        from slime.rollout.engines.sglang.launch import SGLangOptions, all_gpus, divide_gpus, start_sglang

        if node is None:
            shares = divide_gpus(gpus, settings.rollout_num_gpus, settings.rollout_num_gpus_per_engine)
        else:
            shares = [all_gpus(gpus, settings.rollout_num_gpus_per_engine, node)]
        part = "" if node is None or node.rank == 0 else f"-node-{node.rank}"
        args: dict[str, Any] = {"host": settings.rollout_engine_host}
        if settings.rollout_engine_max_total_tokens is not None:
            args["max_total_tokens"] = settings.rollout_engine_max_total_tokens
        return [
            partial(
                start_sglang,
                SGLangOptions(
                    model_path=settings.hf_checkpoint,
                    gpus=share,
                    memory_saver=settings.offloads,
                    deterministic=settings.deterministic,
                    random_seed=settings.rollout_seed,
                    routed_experts=settings.use_rollout_routing_replay,
                    deltas=settings.update_weight_mode == "delta",
                    increments=bool(settings.rollout_stream_interval),
                    stage="" if worker_type == REGULAR else worker_type,
                    node=node,
                    args=args | settings.sglang_args,
                ),
                name=f"sglang-{i}{part}",
                api_key=new_key(),
                env={"PYTHONPATH": search_path()},
            )
            for i, share in enumerate(shares, first)
        ]

    def abilities(self, server_info: Mapping[str, Any]) -> Abilities:
        return Abilities(
            seeded=server_info.get("enable_deterministic_inference"),
            memory_saver=server_info.get("enable_memory_saver"),
            keeps_weights=server_info.get("enable_weights_cpu_backup"),
            returns_experts=server_info.get("enable_return_routed_experts"),
            increments=server_info.get("incremental_streaming_output"),
            tp_size=int(server_info.get("tp_size") or 1),
            stage=stage if (stage := str(server_info.get("disaggregation_mode"))) in (PREFILL, DECODE) else "",
            bootstrap_port=int(server_info.get("disaggregation_bootstrap_port") or 0) or None,
            transfer_backend=server_info.get("disaggregation_transfer_backend"),
        )

    def memory(self, settings: RolloutSettings) -> MemoryUse:
        args = settings.sglang_args
        dtype = args.get("dtype")
        fraction = args.get("mem_fraction_static")
        return MemoryUse(
            dtype=None if dtype in (None, "auto") else str(dtype),
            usual_dtype="bfloat16",
            gpus=settings.rollout_num_gpus_per_engine,
            small_cache="fp8" in str(args.get("kv_cache_dtype") or ""),
            fraction=float(USUAL_FRACTION if fraction is None else fraction),
            because="SGLang's choice, usually about" if fraction is None else "--sglang-mem-fraction-static",
        )

    async def hold(self, client: EngineClient) -> None:
        # SGLang fails an assertion when it has to load weights or release memory while requests run or wait. Requests
        # that others sent to it directly are therefore aborted, and the rest is waited for.
        await client.pause("abort")
        try:
            await client.flush_cache(FLUSH_SECONDS)
        except InvalidField as error:
            raise EngineError(error.message, field=client.name) from error


def _check_rotation(directory: str) -> None:
    """Raises NotAvailable for a model that SGLang would compute otherwise than transformers, without saying so."""
    file = Path(directory) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        wanted = (text.get("rope_parameters") or {}).get("partial_rotary_factor")
        taken = text.get("partial_rotary_factor", ROTATED)
    except (OSError, ValueError, AttributeError):
        # Whoever loads the model tells what is wrong with it.
        return
    if str(text.get("model_type", "")).startswith(PARTLY_ROTATED) and wanted not in (None, taken):
        raise NotAvailable(
            f"{file}: rope_parameters.partial_rotary_factor is {wanted}, which SGLang does not read, and it would use "
            f"{taken}: add partial_rotary_factor beside rope_parameters too, or use --rollout-engine embedded",
            field="partial_rotary_factor", value=wanted, expected=str(taken),
        )  # fmt: skip
