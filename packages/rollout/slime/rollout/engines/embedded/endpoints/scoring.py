"""/generate with max_new_tokens 0: the model's log-probs of a prompt, as SGLang gives them with `logprob_start_len`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.rollout.engines.embedded.endpoints.generate import KNOWN
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.types.errors import InvalidField, counted

TOGETHER = 256  # tokens


@dataclass(frozen=True)
class Scored:
    """A prompt, and the first of its tokens whose log-prob is wanted."""

    rid: str
    ids: list[int]
    start: int


def asks_for_scores(body: Mapping[str, Any]) -> bool:
    """Tells if nothing is to be generated."""
    params = body.get("sampling_params")
    return isinstance(params, Mapping) and params.get("max_new_tokens") == 0


def parse_scored(body: Mapping[str, Any], loaded: Loaded) -> Scored:
    """Raises InvalidField."""
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


@torch.inference_mode()
def score(loaded: Loaded, scored: Scored, weights: ModelWeights) -> dict[str, Any]:
    """SGLang's answer; the first token of a prompt has no log-prob. On the thread of the model.

    Raises WrongState while the model is a mixture of versions.
    """
    weights.check_complete()
    ids, start = scored.ids, scored.start
    tokens = torch.tensor(ids, device=next(loaded.model.parameters()).device)
    logits_TV = loaded.model(input_ids=tokens[None], use_cache=False).logits[0]
    # A few tokens at a time: float32 copies of all logits would take several times their memory.
    parts = zip(logits_TV[:-1].split(TOGETHER), tokens[1:].split(TOGETHER), strict=True)
    each = [part.float().log_softmax(-1).gather(-1, chosen[:, None])[:, 0] for part, chosen in parts]
    found = torch.cat(each).tolist()
    entries = [[value, token, None] for value, token in zip([None, *found], ids, strict=True)]
    meta = {
        "id": scored.rid, "finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(ids),
        "completion_tokens": 0, "cached_tokens": 0, "weight_version": weights.version,
        "input_token_logprobs": entries[start:], "output_token_logprobs": [],
    }  # fmt: skip
    return {"text": "", "output_ids": [], "meta_info": meta}
