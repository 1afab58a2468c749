"""The endpoint /generate with max_new_tokens 0: returns log-probs of a prompt, as SGLang with `logprob_start_len`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.rollout.engines.embedded.endpoints.generate import KNOWN
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.rollout.engines.embedded.options import PACKED_MODELS
from slime.types.errors import InvalidField, counted

TOGETHER = 256  # tokens
MOST_SCORED = 1024  # waiting prompts
# Models that can compute a prompt in parts, because keys and values are all that a later part needs of an earlier one.
IN_PARTS = (*PACKED_MODELS, "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


@dataclass(frozen=True)
class Scored:
    """A prompt to score. start: the position of the first token whose log-prob is returned."""

    rid: str
    ids: list[int]
    start: int


def asks_for_scores(body: Mapping[str, Any]) -> bool:
    """Returns whether a request asks for scores alone: it is to generate no tokens."""
    params = body.get("sampling_params")
    return isinstance(params, Mapping) and params.get("max_new_tokens") == 0


def parse_scored(body: Mapping[str, Any], loaded: Loaded) -> Scored:
    """Returns the prompt of a request for scores. Raises InvalidField."""
    for name, value in body.items():
        if name not in KNOWN or (name in ("text", "image_data", "stream") and value):
            raise InvalidField(
                name, value, "input_ids, return_logprob and logprob_start_len, where nothing is generated"
            )
    if not body.get("return_logprob"):
        raise InvalidField("sampling_params.max_new_tokens", 0, "at least 1 without return_logprob")
    ids, size = body.get("input_ids"), loaded.vocab_size
    if not isinstance(ids, list) or not ids or not all(type(t) is int and 0 <= t < size for t in ids):
        raise InvalidField("input_ids", ids, f"token ids of one prompt, from 0 to {size - 1}")
    if len(ids) > loaded.context_length:
        raise InvalidField("input_ids", counted(len(ids), "token"), f"at most {loaded.context_length}")
    start = body.get("logprob_start_len")
    if type(start) is not int or not 0 <= start < len(ids):
        raise InvalidField("logprob_start_len", start, f"a place in the prompt, from 0 to {len(ids) - 1}")
    return Scored(str(body.get("rid") or ""), ids, start)


def score(loaded: Loaded, scored: Scored, weights: ModelWeights) -> Iterator[dict[str, Any] | None]:
    """Yields None after each part of the prompt, and SGLang's answer in the end; the first token has no log-prob.

    Runs on the model's thread. Raises WrongState while the weights are a mixture of versions.
    """
    weights.check_complete()
    ids, start = scored.ids, scored.start
    log_probs: list[float] = []
    cache = None
    part = TOGETHER if type(loaded.model).__name__ in IN_PARTS else len(ids)
    tokens = torch.tensor(ids, device=next(loaded.model.parameters()).device)
    for first in range(0, len(ids), part):
        with torch.inference_mode():
            output = loaded.model(
                input_ids=tokens[None, first : first + part], past_key_values=cache, use_cache=part < len(ids)
            )
            cache = output.past_key_values
            log_probs += _log_probs(output.logits[0], tokens[first + 1 : first + part + 1])
        del output
        yield None
    entries = [[value, token, None] for value, token in zip([None, *log_probs], ids, strict=True)]
    meta = {
        "id": scored.rid, "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(ids),
        "completion_tokens": 0, "cached_tokens": 0, "weight_version": weights.version,
        "input_token_logprobs": entries[start:], "output_token_logprobs": [],
    }  # fmt: skip
    yield {"text": "", "output_ids": [], "meta_info": meta}


def _log_probs(logits_TV: torch.Tensor, chosen_T: torch.Tensor) -> list[float]:
    """Returns the log-prob of each chosen token; the last position of a prompt has logits, but no next token."""
    # A few tokens at a time: float32 copies of all logits would take several times their memory.
    parts = zip(logits_TV[: len(chosen_T)].split(TOGETHER), chosen_T.split(TOGETHER), strict=True)
    each = [part.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist() for part, chosen in parts]
    return [value for values in each for value in values]
