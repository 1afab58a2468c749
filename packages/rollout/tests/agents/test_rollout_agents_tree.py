"""Conversations that branch: merged as a tree of turns, each completion trained once, nothing encoded again."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from rollout_agents_fakes import END, Letters

from slime.rollout.agents.merge import drifted_turns, merge_turns, parents_of
from slime.rollout.agents.render import Renderer
from slime.rollout.agents.sessions import Turn
from slime.rollout.chat.answers import AnswerReader
from slime.rollout.chat.messages import clean
from slime.rollout.chat.request import Generated, ModelRequest
from slime.rollout.chat.syntaxes.registry import AnswerSyntax
from slime.rollout.metrics import agent_metrics
from slime.types import Sample

SYNTAX = AnswerSyntax("qwen", "qwen3")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PIECES = (
    "a",
    "b",
    "ab",
    "é",
    "\n",
    " ",
    "<think>b</think>",
    '<tool_call>{"name":"f","arguments":{"x":  1}}</tool_call>',
)


class Pairs(Letters):
    """`ab` is a token of its own, and so are its letters: a text has several encodings."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return super().encode(text.replace("ab", "\ue000"))

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **options: Any) -> str:
        return super().decode(ids, skip_special_tokens).replace("\ue000", "ab")


def sampled(rng: random.Random) -> list[int]:
    """Tokens that a model could write; `ab` mostly in two."""
    text = "".join(rng.choices(PIECES, k=rng.randrange(6)))
    tokens = list(map(ord, text)) if rng.random() < 0.8 else Pairs().encode(text)
    return [*tokens, END] if rng.random() < 0.9 else [*tokens, ord("a")]


def conversation(rng: random.Random, *, cumulative: bool) -> tuple[list[Turn], list[int | None]]:
    """Turns of an agent that continues its last answer, an earlier one, or none; and the parents of the turns."""
    renderer, tokenizer = Renderer(Pairs(), cumulative=cumulative), Pairs()
    turns: list[Turn] = []
    parents: list[int | None] = []
    for number in range(rng.randrange(1, 9)):
        parent = rng.choice([None, len(turns) - 1, rng.randrange(len(turns))]) if turns else None
        if parent is None:
            messages: list[Any] = [{"role": "system", "content": f"{number}"}, {"role": "user", "content": "ab"}]
        else:
            calls = turns[parent].messages[-1].get("tool_calls")
            role = "tool" if calls else "user"
            messages = [*turns[parent].messages, {"role": role, "content": f"{number}{rng.choice(['ab', ' é', ''])}"}]
        messages = clean(messages)
        prompt = renderer.prompt(messages, TOOLS, turns, {})
        ids = sampled(rng)
        reason = {"type": "stop" if ids[-1] == END else "length"}
        generated = Generated(prompt_tokens=len(prompt), ids=ids, log_probs=[-1.0] * len(ids), finish_reason=reason)
        reader = AnswerReader(tokenizer, ModelRequest(messages=messages, tools=TOOLS), prompt, SYNTAX)
        reader.read(generated)
        answer = reader.answer(generated)
        text = tokenizer.decode(ids)
        turns.append(Turn(prompt, ids, [-1.0] * len(ids), {"finish_reason": reason}, text, tools=TOOLS))
        turns[-1].messages = [*messages, *clean([answer.message])]
        parents.append(parent)
    return turns, parents


def test_of_a_thousand_conversations_no_token_is_encoded_again() -> None:
    drifted = 0
    for seed in range(1000):
        turns, parents = conversation(random.Random(seed), cumulative=True)
        for turn, parent in zip(turns, parents, strict=True):
            if parent is not None:
                known = turns[parent].all_ids
                assert turn.prompt_ids[: len(known)] == known, seed
        assert not drifted_turns(turns, parents_of(turns)), seed
        check_each_completion_is_trained_once(turns)
        encoded_again = conversation(random.Random(seed), cumulative=False)[0]
        drifted += bool(drifted_turns(encoded_again, parents_of(encoded_again)))
    assert drifted > 100, "without the cumulative mode these conversations are encoded again"


def check_each_completion_is_trained_once(turns: list[Turn]) -> None:
    samples = merge_turns(turns, Sample(index=1), lambda ids: "-" * len(ids))
    trained = []
    for sample in samples:
        tokens, mask = np.asarray(sample.tokens), np.zeros(len(sample.tokens), bool)
        mask[len(tokens) - sample.response_length :] = sample.loss_mask
        trained += tokens[mask].tolist()
        ends = [turn for turn in turns if turn.all_ids == tokens.tolist()]
        assert ends, "a sample is the tokens of its last turn"
    assert sorted(trained) == sorted(token for turn in turns for token in turn.completion_ids)
    assert sum(sample.metadata["num_turns"] for sample in samples) == len(turns)


def turn(prompt: list[int], completion: list[int]) -> Turn:
    return Turn(prompt, completion, [-1.0] * len(completion), {"finish_reason": {"type": "stop"}}, "x")


def test_conversations_side_by_side_are_one_sample_each() -> None:
    turns, known = [], {number: [number] for number in range(3)}
    for step in range(3):
        for number in range(3):
            turns.append(turn([*known[number], 50], [60 + step]))
            known[number] = turns[-1].all_ids
    samples = merge_turns(turns, Sample(index=1), lambda ids: "-")
    assert [sample.tokens == known[number] for number, sample in enumerate(samples)] == [True] * 3
    assert [sample.metadata["num_turns"] for sample in samples] == [3, 3, 3]


def test_a_branch_starts_where_it_leaves_and_trains_only_what_is_new() -> None:
    root = turn([1], [2, 3])
    left, right = turn([*root.all_ids, 4], [5]), turn([*root.all_ids, 6], [7])
    deeper = turn([*left.all_ids, 8], [9])
    first, second = merge_turns([root, left, right, deeper], Sample(index=1), lambda ids: "-")
    assert first.tokens == deeper.all_ids and first.loss_mask == [1, 1, 0, 1, 0, 1]
    assert second.tokens == right.all_ids and second.response_length == 1
    assert [sample.metadata["branch"] for sample in (first, second)] == [False, True]
    for sample in (first, second):
        sample.metadata["gateway_session_id"] = "s"
    assert agent_metrics([first, second]) == {
        "rollout/agents/episodes": 1, "rollout/agents/failed": 0, "rollout/agents/segments": 2.0,
        "rollout/agents/turns": 4.0, "rollout/agents/branches": 1, "rollout/agents/drifted_turns": 0,
    }  # fmt: skip
    assert agent_metrics([Sample(index=1)]) == {}


@pytest.mark.parametrize("changed", ["tools", "arguments"])
def test_other_tools_are_rendered_and_not_forgotten(changed: str) -> None:
    renderer = Renderer(Pairs(), cumulative=True)
    asked = clean([{"role": "user", "content": "hi"}])
    said = turn(renderer.prompt(asked, None, [], {}), [ord("o"), END])
    said.messages = [*asked, {"role": "assistant", "content": "o"}]
    more = [*said.messages, {"role": "user", "content": "x"}]
    tools, arguments = (TOOLS, {}) if changed == "tools" else (None, {"thinking": True})
    assert renderer.prompt(more, None, [said], {})[: len(said.all_ids)] == said.all_ids
    prompt = renderer.prompt(more, tools, [said], arguments)
    assert prompt == Renderer(Pairs()).prompt(more, tools, [], arguments)


class Thinker(Letters):
    """A template that ends the reasoning before it begins, if it is told to."""

    def apply_chat_template(self, messages: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
        start = super().apply_chat_template(messages, tools)
        return start + ("" if kwargs.get("enable_thinking", True) else "<think></think>")


def said_after(messages: list[dict[str, Any]], prompt: list[int], text: str, **more: Any) -> Turn:
    said = turn(prompt, [*map(ord, text), END])
    said.messages = [*messages, {"role": "assistant", "content": text} | more]
    return said


def test_arguments_of_the_template_hold_for_every_turn() -> None:
    renderer, arguments = Renderer(Thinker(), cumulative=True), {"enable_thinking": False}
    asked = clean([{"role": "user", "content": "hi"}])
    said = said_after(asked, renderer.prompt(asked, None, [], arguments), "o")
    said.arguments = arguments
    more = [*said.messages, {"role": "user", "content": "x"}]
    prompt = renderer.prompt(more, None, [said], arguments)
    assert prompt[: len(said.all_ids)] == said.all_ids
    assert Thinker().decode(prompt).endswith("user\nx<|im_end|>\n<|im_start|>assistant\n<think></think>")


def test_of_two_turns_with_one_text_the_one_that_goes_on_is_continued() -> None:
    renderer = Renderer(Pairs(), cumulative=True)
    asked = clean([{"role": "user", "content": "hi"}])
    first = said_after(asked, renderer.prompt(asked, None, [], {}), "o")
    further = [*first.messages, {"role": "user", "content": "x"}]
    second = said_after(further, renderer.prompt(further, None, [first], {}), "ab")
    # Another agent that says the same.
    other = said_after(asked, first.prompt_ids, "o")
    more = [*second.messages, {"role": "user", "content": "y"}]
    prompt = renderer.prompt(more, None, [first, second, other], {})
    assert prompt[: len(second.all_ids)] == second.all_ids


def test_reasoning_tells_answers_apart_where_the_agent_sends_it() -> None:
    renderer = Renderer(Pairs(), cumulative=True)
    asked = clean([{"role": "user", "content": "hi"}])
    turns = [said_after(asked, [number], "o", reasoning_content=f"r{number}") for number in range(2)]
    for number, answer in ((0, turns[0].messages[-1]), (1, {"role": "assistant", "content": "o"})):
        prompt = renderer.prompt([*asked, answer, {"role": "user", "content": "x"}], None, turns, {})
        assert prompt[0] == number


def test_long_conversations_merge_in_time() -> None:
    turns: list[Turn] = []
    messages: list[dict[str, Any]] = []
    for number in range(300):
        asked = [*messages, {"role": "user", "content": str(number)}]
        known = turns[-1].all_ids if turns else []
        turns.append(said_after(asked, [*known, 7], "o"))
        messages = turns[-1].messages
    started = time.process_time()
    (sample,) = merge_turns(turns, Sample(index=1), lambda ids: "-")
    assert sample.metadata["drifted_turns"] == 0 and time.process_time() - started < 3
