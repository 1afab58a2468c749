"""The graders deepscaler, dapo, f1, gpqa and ifbench, case by case, and the modules that plug-ins import them from."""

from __future__ import annotations

import argparse
import asyncio
import sys
import types

import pytest

from slime.rollout.rewards import reward_function
from slime.rollout.rm_hub import grade_answer_verl
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score, last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_mathd, grade_answer_sympy
from slime.types import Sample
from slime.types.errors import InvalidField, NotAvailable

NUM_GPUS = 0

ARGS = argparse.Namespace()


def rate(name: str, response: str, label: object = None, metadata: dict | None = None) -> object:
    sample = Sample(index=3, response=response, label=label, metadata=metadata or {})
    return asyncio.run(reward_function(name)(ARGS, sample))


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        (r"so</think> \boxed{42}", "42", 1),
        (r"\boxed{41}</think> \boxed{41} no, \boxed{42}", "42", 1),
        (r"\boxed{42}</think> \boxed{41}", "42", 0),
        (r"first</think>\boxed{1}</think> then \boxed{2}", "2", 1),
        (r"### notes ###Response the answer is \boxed{\frac12}", "0.5", 1),
        (r"\boxed{42}", "42", 0),  # never ended its reasoning
        ("so</think> 42", "42", 0),
        (r"so</think> \boxed{42", "42", 0),
        (r"so</think> \boxed{42}", r"\boxed{42}", 1),
        (r"so</think> \boxed{42}", "", 0),
        (r"so</think> \boxed{42}", 42, 1),
        (r"so</think> \boxed{1{,}000}", "1000", 1),
        (r"so</think> \boxed{(1, 2)}", "(2, 1)", 0),
    ],
)
def test_deepscaler_reads_the_last_box_after_the_reasoning(response: str, label: object, reward: int) -> None:
    assert get_deepscaler_rule_based_reward(response, label) == reward
    assert rate("deepscaler", response, str(label)) == reward


@pytest.mark.parametrize(
    ("response", "label", "acc"),
    [
        ("Answer: 42", "42", True),
        ("answer : 42", 42, True),
        ("Answer: 41\nAnswer: 42", "42", True),
        ("Answer: 42\nAnswer: 41", "42", False),
        ("Answer: $42$", "42", True),
        (r"Answer: \boxed{42}", "42", True),
        (r"Answer: $\boxed{42}$.", "42", True),
        ("Answer: x = 42", "42", True),
        ("Answer: 1,234", "1234", True),
        ("Answer: 12,34", "1234", False),
        ("Answer: 42 dollars", "42", True),
        (r"Answer: 42\text{ cm}", "42", True),
        (r"Answer: 60^\circ", "60", True),
        ("Answer: 42.0", "42", True),
        ("Answer: 42.5", "42", False),
        ("Answer: -7", "-7", True),
        ("Answer: 7", "-7", False),
        ("Answer: forty-two", "42", False),
        ("the answer is 42", "42", False),
        ("Answer: 42" + " so" * 150, "42", False),  # further back than 300 characters
        ("", "42", False),
        ("Answer: 42", "42.0", True),
    ],
)
def test_dapo_compares_the_last_stated_answer(response: str, label: object, acc: bool) -> None:
    result = compute_score(response, label)
    assert result["acc"] is acc and result["score"] == (1.0 if acc else -1.0)
    assert rate("dapo", response, str(label)) == result


def test_dapo_refuses_a_label_that_is_no_integer() -> None:
    with pytest.raises(InvalidField, match="0.5"):
        rate("dapo", "Answer: 1", "0.5")


def test_dapo_strict_boxes_are_compared_literally() -> None:
    assert compute_score(r"so \boxed{1/2}", "1/2", strict_box_verify=True)["acc"] is True
    assert compute_score(r"so \boxed{0.5}", "1/2", strict_box_verify=True)["score"] == -1.0
    assert compute_score(r"\boxed{7}" + " " * 200, "7", strict_box_verify=True)["acc"] is False
    assert last_boxed_only_string(r"a \boxed{1} b \boxed{2{3}}") == r"\boxed{2{3}}"
    assert remove_boxed(r"\boxed{2{3}}") == "2{3}"
    with pytest.raises(ValueError, match="boxed"):
        remove_boxed("2")


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("Paris", "paris", (1.0, 1.0, 1.0)),
        ("The Paris!", "paris", (1.0, 1.0, 1.0)),
        ("in Paris, France", "Paris", (0.5, 1 / 3, 1.0)),
        ("Paris Paris", "Paris", (2 / 3, 0.5, 1.0)),
        ("London", "Paris", (0.0, 0.0, 0.0)),
        ("yes", "yes", (1.0, 1.0, 1.0)),
        ("yes it is", "yes", (0.0, 0.0, 0.0)),
        ("no", "noanswer", (0.0, 0.0, 0.0)),
        ("", "Paris", (0.0, 0.0, 0.0)),
        ("the", "a", (0.0, 0.0, 0.0)),
    ],
)
def test_f1_counts_common_words(response: str, label: str, score: tuple[float, float, float]) -> None:
    assert f1_score(response, label) == pytest.approx(score)
    assert rate("f1", response, label) == pytest.approx(score[0])


CHOICES = {"choices": ["4 K", "77 K", "273 K", "300 K"]}


@pytest.mark.parametrize(
    ("response", "label", "metadata", "reward"),
    [
        ("The answer is B", "B", {}, 1),
        ("The answer is (B).", "B", {}, 1),
        ("Answer: **C**", "B", {}, 0),
        ("answer: b", "B", {}, 1),
        ("The answer is a noble gas: B", "B", {}, 1),
        ("The answer is a noble gas", "A", {}, 0),
        (r"\boxed{B}", "B", {}, 1),
        (r"\boxed{\text{(B)}}", "B", {}, 1),
        ("Option A? Option B!", "B", {}, 1),
        ("B is the correct one", "B", {}, 1),
        ("option A</think>option B", "B", {}, 1),
        ("The answer is B", 1, {}, 1),
        ("The answer is B", "77 K", CHOICES, 1),
        ("The answer is A", "77 K", CHOICES, 0),
        ("It must be 77 K.", "77 K", CHOICES, 1),
        ("It must be 277 K.", "77 K", CHOICES, 0),
        ("The answer is E", "B", CHOICES, 0),
        ("The answer is B", "A", {"correct_letter": "b"}, 1),
        ("The answer is X", "X", {"valid_letters": ["X", "Y"]}, 1),
        ("helium", "x", {"correct_answer": "Helium"}, 1),
        ("A dog, then B", "B", {}, 1),
        ("", "B", {}, 0),
        ("no idea", "B", CHOICES, 0),
        ("The answer is B", "77 K", {"choices": {"A": "4 K", "B": "77 K"}}, 1),
    ],
)
def test_gpqa_finds_the_chosen_option(response: str, label: object, metadata: dict, reward: int) -> None:
    assert compute_gpqa_reward(response, label, metadata) == reward
    assert rate("gpqa", response, label, metadata) == reward


def test_ifbench_without_its_checkers_is_refused_by_name() -> None:
    with pytest.raises(NotAvailable, match="IFBench"):
        reward_function("ifbench")


def test_ifbench_asks_its_checkers_with_one_mapping_for_each_instruction(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def strict(example: types.SimpleNamespace, responses: dict[str, str]) -> types.SimpleNamespace:
        asked.append(example)
        return types.SimpleNamespace(follow_all_instructions=responses[example.prompt] == "ok")

    library = types.ModuleType("evaluation_lib")
    library.InputExample = types.SimpleNamespace  # type: ignore[attr-defined]
    library.test_instruction_following_strict = strict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "evaluation_lib", library)
    metadata = {"instruction_id_list": ["count:a", "format:b"], "kwargs": [{"n": 3, "m": None}], "prompt_text": "do"}
    assert rate("ifbench", "ok", metadata=metadata) == 1.0
    assert compute_ifbench_reward("no", None, metadata) == 0.0
    assert asked[0].kwargs == [{"n": 3}, {"n": 3}] and asked[0].instruction_id_list == ["count:a", "format:b"]
    with pytest.raises(InvalidField, match="instruction_id_list"):
        rate("ifbench", "ok", metadata={})


def test_math_functions_of_plugins_agree_with_rm_type_math() -> None:
    assert extract_answer(r"a \boxed{1} \boxed{2}") == "2" and extract_answer("2") is None
    assert grade_answer_verl(r"so \boxed{\frac{1}{2}}", "0.5") and not grade_answer_verl("0.5", "0.5")
    assert grade_answer_mathd("1,000", "1000") and grade_answer_sympy("x+1", "1+x")
    assert not grade_answer_sympy(None, "1") and not grade_answer_sympy("2", "1")
