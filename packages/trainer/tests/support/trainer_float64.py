"""References by transformers in float64, one forward pass for each sample."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def load64(path: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()


def reference_log_probs(model: Any, sample: Any, temperature: float = 1.0, nuclei: bool = False) -> torch.Tensor:
    """nuclei: among the tokens that the sample's were drawn from."""
    tokens = torch.tensor(sample.tokens, dtype=torch.int64)
    logits = model(input_ids=tokens[None]).logits[0] / temperature
    if nuclei:
        allowed = torch.zeros_like(logits, dtype=torch.bool)
        bounds, first = sample.rollout_top_p_token_offsets, len(tokens) - sample.response_length
        for place in range(sample.response_length):
            ids = [*sample.rollout_top_p_token_ids[bounds[place] : bounds[place + 1]], int(tokens[first + place])]
            allowed[first + place - 1, ids] = True
        logits = logits.masked_fill(~allowed, -torch.inf)
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
    return log_probs[len(tokens) - 1 - sample.response_length :]
