"""Rewards of a function of the user's: taken as numbers, or refused with the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slime.trainer.step.train_data import processed_rewards
from slime.types.errors import InvalidField


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_rewards_may_be_any_sequence_of_numbers(kind: Any) -> None:
    assert processed_rewards((kind([1.0, 0.0]), kind([0.5, -0.5])), 2) == ([1.0, 0.0], [0.5, -0.5])


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "got NoneType"),
        ([1.0, 2.0, 3.0], "got 3 items"),
        ([1.0, 2.0], "got 2 items"),
        (([1.0, 2.0], [1.0]), "got 2 and 1, expected 2 raw and 2 training rewards"),
        (([1.0, 2.0], [0.0, float("nan")]), r"got nan, expected finite numbers \(sample 1 of the iteration\)"),
        ((["1", "2"], [0.0, 0.0]), r"got 1, expected finite numbers \(sample 0"),
        (([None, 1.0], [0.0, 0.0]), "got None, expected finite numbers"),
    ],
)
def test_anything_else_is_refused_with_what_it_is(answer: Any, words: str) -> None:
    with pytest.raises(InvalidField, match=f"--custom-reward-post-process-path: {words}"):
        processed_rewards(answer, 2)
