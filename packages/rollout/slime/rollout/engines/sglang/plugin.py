"""A plug-in of SGLang, found by its entry point `sglang.srt.plugins`: samples in one pass, takes weight updates of
layers in INT4 and deltas of weights by NCCL, and applies all of M-RoPE to the images of a Qwen3.5, where a run asks
for it.

SGLang loads it in each of its processes. Greedy, seeded and deterministic sampling, top-p, top-k, min-p and requests
for the log-probs of other tokens stay SGLang's own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import json
import logging
import os
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slime.rollout.engines.sglang.installed import (
    ONE_POSITION,
    POSITION_PARAMETERS,
    THREE_POSITIONS,
    drops_image_positions,
)

log = logging.getLogger(__name__)

VARIABLE = "SLIME_SAMPLES_IN_ONE_PASS"
INT4_VARIABLE = "SLIME_UPDATES_INT4"
DELTA_VARIABLE = "SLIME_TAKES_DELTAS"
IMAGE_VARIABLE = "SLIME_KEEPS_IMAGE_POSITIONS"
GROUP, NAME = "sglang.srt.plugins", "slime"
# A variable of SGLang's: log-probs are those of before the temperature.
_ORIGINAL = "SGLANG_RETURN_ORIGINAL_LOGPROB"
# Parameters of `Sampler.forward`, attributes of a sampler and fields of `SamplingBatchInfo` that `forward` uses.
_PARAMETERS = (
    "self", "logits_output", "sampling_info", "return_logprob", "top_logprobs_nums", "token_ids_logprobs", "positions",
)  # fmt: skip
_ATTRIBUTES = {"enable_deterministic", "use_ascend_backend", "rl_on_policy_target"}
_FIELDS = {
    "temperatures", "is_all_greedy", "need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling",
    "sampling_seed", "return_sampling_masks",
}  # fmt: skip
# Classes of layers that SGLang repacks, and the methods by which it updates weights in parts.
_SCHEMES = "sglang.srt.layers.quantization.compressed_tensors.schemes"
_DENSE = f"{_SCHEMES}.compressed_tensors_wNa16.CompressedTensorsWNA16"
_EXPERTS = f"{_SCHEMES}.compressed_tensors_wNa16_moe.CompressedTensorsWNA16MoE"
_TRITON = f"{_SCHEMES}.compressed_tensors_wNa16_moe.CompressedTensorsWNA16TritonMoE"
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_BROADCAST = ("self", "names", "dtypes", "shapes", "group_name", "load_format")
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# Attention of Qwen3.5, and its methods that make queries, keys and gates.
_ATTENTION = "sglang.srt.models.qwen3_5.Qwen3_5AttentionDecoderLayer"


def environment(args: Mapping[str, Any], *, deterministic: bool) -> dict[str, str]:
    """Returns the variables with which an engine samples in one pass; none where it is to sample by itself.

    args: flags of its server, by name with underscores. With `sampling_backend`, SGLang samples as the user says.
    """
    own = deterministic or args.get("enable_deterministic_inference") or args.get("sampling_backend")
    if own:
        return {}
    if not is_found():
        log.info("SGLang samples by itself: slime-rollout is not installed as a distribution, so no plug-in is found")
        return {}
    return {VARIABLE: "1"}


def environment_of_model(directory: str, args: Mapping[str, Any]) -> dict[str, str]:
    """Returns the variables with which an engine takes weight updates of its model, and images; none for one that needs
    no help.

    args: flags of its server, by name with underscores.
    """
    file = Path(directory) / "config.json"
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    config |= json.loads(args.get("json_model_override_args") or "{}")
    quantization = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    asked = {}
    if (quantization or {}).get("quant_method") == "compressed-tensors":
        asked[INT4_VARIABLE] = "SGLang will refuse weight updates in INT4"
    if config.get("model_type") == "qwen3_5" and drops_image_positions():
        asked[IMAGE_VARIABLE] = "SGLang will compute wrong log-probs for prompts with images"
    if not is_found():
        for effect in asked.values():
            log.warning("%s: slime-rollout is not installed as a distribution", effect)
        return {}
    return dict.fromkeys(asked, "1")


def environment_of_deltas() -> dict[str, str]:
    """Returns the variables with which an engine takes deltas of weights by NCCL."""
    if not is_found():
        log.warning("SGLang will refuse weight deltas by NCCL: slime-rollout is not installed as a distribution")
        return {}
    return {DELTA_VARIABLE: "1"}


def is_found() -> bool:
    """Tells whether SGLang would find this plug-in in the environment of this process."""
    return any(entry.name == NAME for entry in importlib.metadata.entry_points(group=GROUP))


def register() -> None:
    """Hooks SGLang's methods that the environment asks to hook, if their form is known."""
    if os.environ.get(VARIABLE):
        _register_sampler()
    if os.environ.get(INT4_VARIABLE):
        _register_updates()
    if os.environ.get(DELTA_VARIABLE):
        _register_deltas()
    if os.environ.get(IMAGE_VARIABLE):
        _register_positions()


def _register_sampler() -> None:
    from sglang.srt.layers import sampler  # pants: no-infer-dep
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pants: no-infer-dep
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo  # pants: no-infer-dep

    known = (
        tuple(inspect.signature(sampler.Sampler.forward).parameters) == _PARAMETERS
        and _ATTRIBUTES <= set(sampler.Sampler.__init__.__code__.co_names)
        and _FIELDS <= set(SamplingBatchInfo.__dataclass_fields__)
        and all(hasattr(sampler.Sampler, name) for name in ("_preprocess_logits", "_sync_token_ids_across_tp"))
        and hasattr(sampler, _ORIGINAL)
    )
    if not known:
        log.warning("SGLang samples by itself: slime-rollout does not know this version of its sampler")
    elif not getattr(sampler, _ORIGINAL):
        HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", forward, HookType.AROUND)


def _register_updates() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pants: no-infer-dep

    from slime.rollout.engines.sglang import repacked

    hooks: list[tuple[str, Callable[..., Any], tuple[str, ...]]] = [
        *((f"{name}.create_weights", repacked.create_weights, ("self", "layer")) for name in (_DENSE, _EXPERTS)),
        *(
            (f"{name}.process_weights_after_loading", repacked.process_weights, ("self", "layer"))
            for name in (_DENSE, _EXPERTS, _TRITON)
        ),
        *(
            (f"{_MANAGER}.update_weights_from_{source}", repacked.update_weights, ("self", "recv_req"))
            for source in ("tensor", "distributed")
        ),
    ]
    unknown = [name for name, _, parameters in hooks if _parameters(name)[: len(parameters)] != parameters]
    if unknown:
        log.error("SGLang will refuse weight updates in INT4: slime-rollout does not know its %s", ", ".join(unknown))
        return
    for name, hook, _ in hooks:
        HookRegistry.register(name, hook, HookType.AROUND)


def _register_deltas() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pants: no-infer-dep

    from slime.rollout.engines.sglang import broadcast_deltas

    name = f"{_UPDATER}.update_weights_from_distributed"
    if _parameters(name) != _BROADCAST:
        log.error("SGLang will refuse weight deltas by NCCL: slime-rollout does not know its %s", name)
        return
    HookRegistry.register(name, broadcast_deltas.update_weights, HookType.AROUND)


def _register_positions() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # pants: no-infer-dep

    names = [f"{_ATTENTION}.{method}" for method in (ONE_POSITION, THREE_POSITIONS)]
    unknown = [name for name in names if _parameters(name) != POSITION_PARAMETERS]
    if unknown:
        log.error("log-probs with images will be wrong: slime-rollout does not know SGLang's %s", ", ".join(unknown))
        return
    HookRegistry.register(names[0], prepare, HookType.AROUND)


def _parameters(name: str) -> tuple[str, ...]:
    """Returns the names of a function's parameters; none if there is no such function."""
    try:
        return tuple(inspect.signature(pkgutil.resolve_name(name)).parameters)
    except (ImportError, AttributeError):
        return ()


def prepare(own: Callable[..., Any], layer: Any, positions: Any, hidden_states: Any) -> Any:
    """Returns queries [T, heads * D], keys and values [T, key heads * D], and gates [T, heads * D] of an attention.

    own: SGLang's method, which reads one position of each token. positions: int64 [T], or [3, T] for M-RoPE: time, row
    and column. hidden_states: [T, hidden].
    """
    if positions.ndim == 1:
        return own(layer, positions, hidden_states)
    return getattr(layer, THREE_POSITIONS)(positions, hidden_states)


def forward(
    own: Callable[..., Any], sampler: Any, logits_output: Any, sampling_info: Any, return_logprob: bool,
    top_logprobs_nums: Any, token_ids_logprobs: Any, positions: Any,
) -> Any:  # fmt: skip
    """Samples in place of `own`, SGLang's `Sampler.forward`, where all sequences of the batch are sampled plainly."""
    asked = return_logprob and (
        any(top_logprobs_nums or ()) or any(ids is not None for ids in token_ids_logprobs or ())
    )
    if asked or not is_plain(sampling_info) or _computes_otherwise(sampler):
        return own(
            sampler, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions
        )
    from slime.rollout.engines.sglang.one_pass import sample

    _say()
    logits = sampler._preprocess_logits(logits_output.next_token_logits, sampling_info)
    tokens, log_probs = sample(logits, sampling_info.temperatures.view(-1))
    if return_logprob:
        logits_output.next_token_logprobs = log_probs
    sampler._sync_token_ids_across_tp(tokens, sampling_info)
    return tokens


@functools.cache
def _say() -> None:
    # Not when the plug-in is loaded: logging is set up after it.
    log.info("SGLang samples in one pass, by a kernel of slime-rollout (--sampling-backend NAME: by itself)")


def is_plain(info: Any) -> bool:
    """Returns whether a batch samples from whole softmaxes. info: SGLang's `SamplingBatchInfo`."""
    partial = info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling
    return not (
        info.is_all_greedy or partial or info.sampling_seed is not None or any(info.return_sampling_masks or ())
    )


def _computes_otherwise(sampler: Any) -> bool:
    """Returns whether the server's flags ask for other arithmetic."""
    return bool(sampler.enable_deterministic or sampler.use_ascend_backend or sampler.rl_on_policy_target is not None)
