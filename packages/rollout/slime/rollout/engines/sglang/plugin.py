"""A plug-in of SGLang, found by its entry point `sglang.srt.plugins`: samples in one pass where a run asks for it.

SGLang loads it in each of its processes. Greedy, seeded and deterministic sampling, top-p, top-k, min-p and requests
for the log-probs of other tokens stay SGLang's own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger(__name__)

VARIABLE = "SLIME_SAMPLES_IN_ONE_PASS"
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


def is_found() -> bool:
    """Tells whether SGLang would find this plug-in in the environment of this process."""
    return any(entry.name == NAME for entry in importlib.metadata.entry_points(group=GROUP))


def register() -> None:
    """Hooks SGLang's sampler, if the environment asks for it and its form is known."""
    if not os.environ.get(VARIABLE):
        return
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
