"""Supervised fine-tuning on conversations of the data, in place of generated responses.

    slime train --rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss
        --disable-compute-advantages-and-returns --input-key messages --n-samples-per-prompt 1

A prompt is a list of chat messages that ends with an answer. It is tokenised with the model's chat template; loss is
taken on what the assistant wrote (`loss_masks.py`, --loss-mask-type). Engines generate only for evaluations.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.calls.outputs import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.generate.default import generate_rollout as generate_with_engines
from slime.rollout.generate.loss_masks import MultiTurnLossMaskGenerator
from slime.rollout.generate.state import state_of
from slime.rollout.prompts.encoder import unrendered
from slime.rollout.settings.plugin_args import RolloutArgs
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting

FUNCTION = "slime.rollout.sft_rollout.generate_rollout"


def generate_rollout(
    args: RolloutArgs, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Fulfils the contract of `--rollout-function-path`; an evaluation is made by the engines.

    Raises InvalidSetting for several samples per prompt, InvalidField for a prompt that is no conversation.
    """
    if evaluation:
        return generate_with_engines(args, rollout_id, data_source, evaluation=True)
    if args.n_samples_per_prompt != 1:
        raise InvalidSetting.conflict(
            f"--n-samples-per-prompt {args.n_samples_per_prompt}",
            f"--rollout-function-path {FUNCTION}",
            "a conversation is one sample",
        )
    tokenizer = state_of(args).tokenizer
    masks = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type)
    groups: list[list[Sample]] = []
    while len(groups) < args.rollout_batch_size:
        groups += data_source.get_samples(args.rollout_batch_size - len(groups))
    for group in groups:
        for sample in group:
            fill(sample, masks)
    return RolloutFnTrainOutput(samples=groups, metrics={})


def fill(sample: Sample, masks: MultiTurnLossMaskGenerator) -> None:
    """Sets tokens, mask and response of a sample from the conversation in its prompt."""
    messages = unrendered(sample)
    if not isinstance(messages, list) or not any(message.get("role") == "assistant" for message in messages):
        raise InvalidField(
            "prompt", messages, "chat messages with at least one of the assistant",
            f"sample {sample.index} (group {sample.group_index}): got {str(messages)[:100]!r}, expected chat messages "
            "with at least one of the assistant; --input-key names their column",
        )  # fmt: skip
    tokens, mask = masks.get_loss_mask(messages, tools=sample.metadata.get("tools") or None)
    first = mask.index(1) if 1 in mask else len(mask) - 1
    sample.tokens, sample.loss_mask = tokens, mask[first:]
    sample.response_length = len(tokens) - first
    sample.response = masks.tokenizer.decode(tokens[first:])
    sample.reward, sample.status = 0.0, Sample.Status.COMPLETED
