"""`--loss-mask-type qwen3_5`: conversations rendered at once by a template of the form that Qwen3.5 has."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime.rollout import sft_rollout
from slime.rollout.generate.loss_masks import MultiTurnLossMaskGenerator
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting

NUM_GPUS = 0

# As in Qwen3.5's: answers behind the last user turn have a place for reasoning, given as a key or inside the content;
# results of tools are turns of a user, which end no reasoning; a conversation without a user is refused.
TEMPLATE = """
{%- set last = namespace(user=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- if last.user < 0 %}{{ raise_exception('No user query found in messages.') }}{% endif %}
{%- for m in messages %}
    {%- set content = (m.content or '')|trim %}
    {%- if m.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if m.reasoning_content is string %}
            {%- set reasoning = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > last.user %}
            {{- '<|im_start|>assistant\n<think>\n' + reasoning|trim + '\n</think>\n\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\n' + content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {{- ('\n\n' if content else '') + '<tool_call>\n' + call.name + '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}
"""
WORDS = (
    "<unk> <|im_start|> <|im_end|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> system "
    "user assistant be kind hi why because yes no bye look found"
).split()
HI, BYE = ({"role": "user", "content": text} for text in ("hi", "bye"))


def tokenizer(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """Words, and runs of one kind of white space: two line breaks are one token, as in Qwen's vocabulary."""
    vocabulary = {word: number for number, word in enumerate([*WORDS, " ", "\n", "\n\n"])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[^>\n]*>|\n+| |[^\s<]+"), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=plain, chat_template=template, unk_token="<unk>")


def masked(messages: list[dict[str, Any]]) -> list[tuple[str, int]]:
    """Returns each token with its mask."""
    masks = MultiTurnLossMaskGenerator(tokenizer(), "qwen3_5")
    ids, mask = masks.get_loss_mask(messages)
    assert ids == masks.tokenizer(masks.tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]
    return list(zip(masks.tokenizer.convert_ids_to_tokens(ids), mask, strict=True))


def turn(role: str, *tokens: str) -> list[tuple[str, int]]:
    """A turn that nobody trains on."""
    return [(token, 0) for token in ("<|im_start|>", role, "\n", *tokens, "<|im_end|>", "\n")]


@pytest.mark.parametrize(
    "answer", [{"content": "<think>\nwhy\n</think>\n\nyes"}, {"content": "yes", "reasoning_content": "why"}]
)
def test_reasoning_is_trained_on_from_behind_its_first_line(answer: dict[str, str]) -> None:
    assert masked([HI, {"role": "assistant", **answer}]) == [
        *turn("user", "hi"),
        ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("<think>", 0), ("\n", 0),
        ("why", 1), ("\n", 1), ("</think>", 1), ("\n\n", 1), ("yes", 1), ("<|im_end|>", 1), ("\n", 1),
    ]  # fmt: skip
    # A generation is given what comes before.
    prompt = tokenizer().apply_chat_template([HI], add_generation_prompt=True, tokenize=False)
    assert tokenizer().tokenize(prompt) == [token for token, trained in masked([HI, {"role": "assistant", **answer}])
                                            if not trained]  # fmt: skip


def test_empty_reasoning_is_closed_by_the_model() -> None:
    assert masked([{"role": "system", "content": "be kind"}, HI, {"role": "assistant", "content": "yes"}]) == [
        *turn("system", "be", " ", "kind"), *turn("user", "hi"),
        # The token of two line breaks ends the line that opens the reasoning, and is the reasoning.
        ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("<think>", 0), ("\n\n", 1), ("</think>", 1), ("\n\n", 1),
        ("yes", 1), ("<|im_end|>", 1), ("\n", 1),
    ]  # fmt: skip


def test_answers_before_the_last_user_turn_have_no_reasoning() -> None:
    first = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nyes"}
    assert masked([HI, first, BYE, {"role": "assistant", "content": "no", "reasoning_content": "because"}]) == [
        *turn("user", "hi"),
        ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("yes", 1), ("<|im_end|>", 1), ("\n", 1),
        *turn("user", "bye"),
        ("<|im_start|>", 0), ("assistant", 0), ("\n", 0), ("<think>", 0), ("\n", 0), ("because", 1), ("\n", 1),
        ("</think>", 1), ("\n\n", 1), ("no", 1), ("<|im_end|>", 1), ("\n", 1),
    ]  # fmt: skip


def test_calls_of_tools_are_trained_on_and_their_results_are_not() -> None:
    call = {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [{"name": "look"}]}
    messages = [HI, call, {"role": "tool", "content": "found"}, {"role": "assistant", "content": "yes"}]
    kept = [token for token, trained in masked(messages) if trained]
    assert "".join(kept) == (
        "why\n</think>\n\n<tool_call>\nlook\n</tool_call><|im_end|>\n\n\n</think>\n\nyes<|im_end|>\n"
    )
    assert "found" not in kept and "<tool_response>" not in kept


def test_a_turn_can_be_left_out_of_training() -> None:
    quiet = {"role": "assistant", "content": "yes", "step_loss_mask": 0}
    messages = [HI, quiet, BYE, {"role": "assistant", "content": "no"}]
    assert [token for token, _ in masked(messages)] == [
        token for token, _ in masked([HI, {**quiet, "step_loss_mask": 1}, *messages[2:]])
    ]
    assert "".join(token for token, trained in masked(messages) if trained) == "\n\n</think>\n\nno<|im_end|>\n"


# The last leaves the numbers of turns and of their ends alike, and would end the mask of its answer early.
@pytest.mark.parametrize(
    "text", ["<|im_end|>", "<|im_start|>assistant\nno<|im_end|>", "<|im_start|>hi<|im_end|> because"]
)
@pytest.mark.parametrize("key", ["user", "content", "reasoning_content", "tool_calls"])
def test_text_that_looks_like_a_turn_is_refused(text: str, key: str) -> None:
    messages: list[dict[str, Any]] = [HI, {"role": "assistant", "content": "yes"}, BYE]
    if key == "user":
        messages[2] = {"role": "user", "content": f"bye {text}"}
    answer = {"role": "assistant", "content": "no"}
    said: Any = [{"name": "look", "arguments": {"at": [text]}}] if key == "tool_calls" else f"bye {text}"
    messages.append(answer if key == "user" else answer | {key: said})
    with pytest.raises(InvalidField, match=r"(?s)messages: got .*, expected messages without <\|im_start\|> and"):
        masked(messages)


def test_a_template_with_other_turns_is_refused() -> None:
    with pytest.raises(InvalidField, match="once per turn"):
        other = tokenizer("{% for m in messages %}{{ m.content }}{% endfor %}")
        MultiTurnLossMaskGenerator(other, "qwen3_5").get_loss_mask([HI, {"role": "assistant", "content": "yes"}])


def test_a_conversation_becomes_a_sample_and_a_slow_tokenizer_is_refused() -> None:
    masks = MultiTurnLossMaskGenerator(tokenizer(), "qwen3_5")
    sample = Sample(index=1, prompt=[HI, {"role": "assistant", "content": "yes", "reasoning_content": "why"}])
    sft_rollout.fill(sample, masks)
    assert sample.response_length == len(sample.loss_mask) == sum(sample.loss_mask) == 7
    with pytest.raises(InvalidSetting, match="--loss-mask-type qwen3_5 requires a fast tokenizer"):
        MultiTurnLossMaskGenerator(argparse.Namespace(is_fast=False), "qwen3_5")
