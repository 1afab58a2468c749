"""Generation in several turns: the model asks a tool for a value, reads it, and answers.

An episode reads `b:b?=77`: the prompt `b:`, the model's call `b?`, the tool's result `=7`, the model's answer `7`.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.settings.plugin_args import RolloutArgs
from slime.rollout.sglang_rollout import GenerateState, generate
from slime.types import Sample


async def generate_with_lookup(args: RolloutArgs, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`--custom-generate-function-path`: a turn of the model that ends with "?" calls the tool."""
    sample = await generate(args, sample, sampling_params)
    if sample.status is Sample.Status.COMPLETED and sample.response.endswith("?"):
        result = "=" + sample.metadata["table"].get(sample.response[-2:-1], "")
        ids = GenerateState(args).tokenizer.encode(result, add_special_tokens=False)
        # The model reads what the tool says and is not trained on it: loss mask 0.
        sample.append_response_tokens(args, tokens=ids, log_probs=None, trainable=False, text=result)
        sample.status = Sample.Status.PENDING  # unfinished: the next call goes on from here
        sample = await generate(args, sample, sampling_params, next_turn=True)
    return sample


async def score(args: RolloutArgs, sample: Sample, **kwargs: Any) -> float:
    """`--custom-rm-path`: 1 for the right call and answer; parts of it earn less, and show a random model the way."""
    call, _, answer = sample.response.partition("=")
    if call != f"{sample.prompt[0]}?":
        return 0.2 if call.endswith("?") else 0.0
    if answer == str(sample.label) * 2:  # the tool's value, and then the model's
        return 1.0
    return 0.5 if answer.isdecimal() and len(answer) == 2 else 0.3
