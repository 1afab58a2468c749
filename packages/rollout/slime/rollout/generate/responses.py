"""Text and tokens of responses: removes stop tokens from the text, and tokenizes text that came without tokens."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.rollout.generate.state import RolloutState
from slime.types import Sample
from slime.types.errors import InvalidField

log = logging.getLogger(__name__)


def trim(state: RolloutState, sample: Sample) -> None:
    """Removes the text of the stop token from the end of `response`; `tokens` keeps the token."""
    tokens = sample.array("tokens")
    text = state.stop_texts.get(int(tokens[-1]), "") if sample.response_length and len(tokens) else ""
    if text and sample.response.endswith(text):
        sample.response = sample.response[: -len(text)]


def complete_custom(state: RolloutState, samples: Sequence[Sample], path: str) -> None:
    """Completes samples of a user's function: tokenizes text without tokens, marks pending samples as completed.

    path: that of the function, for errors. Raises InvalidField for a sample whose text cannot be tokenized.
    """
    for sample in samples:
        if sample.response and not sample.response_length and len(sample.array("tokens")) in (0, _known(state, sample)):
            _tokenize(state, sample, path)
        if sample.response_length and sample.status is Sample.Status.PENDING:
            sample.status = Sample.Status.COMPLETED
        trim(state, sample)


def _known(state: RolloutState, sample: Sample) -> int:
    """Returns the length that `tokens` has if the function set only the prompt's tokens; 0 for a prompt with images."""
    return 0 if sample.multimodal_inputs else len(state.prompts.encode(sample))


def _tokenize(state: RolloutState, sample: Sample, path: str) -> None:
    if sample.multimodal_inputs or sample.multimodal_train_inputs:
        raise _refusal(path, sample, "tokens", None, "tokens: text beside images cannot be tokenised again")
    if sample.rollout_log_probs is not None:
        raise _refusal(
            path, sample, "rollout_log_probs", len(sample.rollout_log_probs), "tokens, because it set their log-probs"
        )
    if not state.warned_of_text:
        state.warned_of_text = True
        log.warning(
            "--custom-generate-function-path %s set response but no tokens: prompt and response are tokenised. Such "
            "samples have no log-probs of the engine, and their tokens may differ from those that it generated "
            "(off-policy).",
            path,
        )
    prompt = state.prompts.encode(sample)
    response = np.asarray(state.tokenizer.encode(sample.response, add_special_tokens=False), np.int32)
    mask = sample.array("loss_mask")
    if mask is not None and len(mask) != len(response):
        raise _refusal(
            path, sample, "loss_mask", f"length {len(mask)}", f"one entry for each of its {len(response)} tokens"
        )
    sample.tokens = np.concatenate((prompt, response))  # type: ignore[assignment]
    sample.response_length = len(response)


def _refusal(path: str, sample: Sample, field: str, value: Any, expected: str) -> InvalidField:
    return InvalidField(
        field,
        value,
        expected,
        f"--custom-generate-function-path {path} set response but no tokens (sample {sample.index}): {field}: got "
        f"{value}, expected {expected}",
    )
