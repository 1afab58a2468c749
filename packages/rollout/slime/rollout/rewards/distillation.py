"""On-policy distillation with the log-probs of a teacher that an SGLang engine serves over HTTP.

    slime train --use-opd --opd-type sglang --rm-url http://HOST:PORT/generate
        --custom-rm-path slime.rollout.on_policy_distillation.reward_func
        --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards

With `--rm-url model://teacher/generate` the teacher is a model of the run itself, named in the file of --sglang-config.
The teacher must have the tokenizer of the policy. The trainer subtracts --opd-kl-coef times the difference of log-probs
from the advantages; the reward itself is 0.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slime.rollout.models.addresses import reward_url
from slime.rollout.rewards.built_in.remote import ask
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting, counted

if TYPE_CHECKING:
    from slime.rollout.settings.plugin_args import RolloutArgs

# Maximum number of characters of an answer in an error.
SHOWN = 200


async def reward_func(args: RolloutArgs, sample: Sample, **kwargs: Any) -> float:
    """Sets `teacher_log_probs` of the sample and returns 0, the contract of `--custom-rm-path`.

    Raises InvalidSetting without --rm-url, Unavailable if it does not answer, InvalidField for an answer that is not
    that of an engine.
    """
    if not args.rm_url:
        raise InvalidSetting.requires("slime.rollout.on_policy_distillation.reward_func", "--rm-url URL")
    tokens = [int(token) for token in sample.tokens]
    answer = await ask(
        reward_url(args),
        {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False},
            "return_logprob": True,
            "logprob_start_len": 0,
        },
    )
    sample.teacher_log_probs = response_log_probs(answer, tokens, sample.response_length)
    return 0.0


def post_process_rewards(
    args: RolloutArgs, samples: Sequence[Sample], **kwargs: Any
) -> tuple[list[float], list[float]]:
    """Returns zeros for raw and training rewards, the contract of `--custom-reward-post-process-path`."""
    return [0.0] * len(samples), [0.0] * len(samples)


def response_log_probs(answer: Any, tokens: Sequence[int], response_length: int) -> list[float]:
    """Returns the natural log-probs of the last `response_length` of `tokens` in an engine's answer.

    Raises InvalidField for an answer without them.
    """
    expected = f"(log-prob, token) of each of the {len(tokens)} tokens that --rm-url was sent, as SGLang answers"
    meta = answer.get("meta_info") if isinstance(answer, dict) else None
    if not isinstance(meta, dict):
        raise InvalidField("--rm-url", _short(answer), f"meta_info.input_token_logprobs: {expected}")
    field, entries = "meta_info.input_token_logprobs", meta.get("input_token_logprobs")
    if not isinstance(entries, list) or len(entries) != len(tokens):
        got = counted(len(entries), "entry") if isinstance(entries, list) else _short(entries)
        raise InvalidField(field, got, expected)
    for i, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
        if not isinstance(entry, list) or len(entry) < 2 or entry[1] != token:
            raise InvalidField(f"{field}[{i}]", _short(entry), f"{expected}: here token {token}")
    first = len(entries) - response_length
    for i, entry in enumerate(entries[first:], first):
        # The first token of a prompt has no log-prob, and is never a token of a response.
        if isinstance(entry[0], bool) or not isinstance(entry[0], (int, float)) or not math.isfinite(entry[0]):
            raise InvalidField(f"{field}[{i}]", _short(entry), f"{expected}: a number")
    return [float(entry[0]) for entry in entries[first:]]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
