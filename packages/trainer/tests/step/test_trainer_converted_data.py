"""Data of --custom-convert-samples-to-train-data-path: each row has the images and the history of its own sample, and
numbers that are none are refused."""

import math
from typing import Any

import numpy as np
import pytest
from trainer_tiny import make_samples, train_data

from slime.trainer.step.train_data import converted
from slime.types import Sample
from slime.types.errors import InvalidField


def sources() -> list[Sample]:
    """Samples of a later iteration, in the order in which they were completed, with an image each."""
    found = make_samples(1)[:4]
    for number, sample in zip((14, 12, 15, 13), found, strict=True):
        sample.index = number
        sample.multimodal_train_inputs = {"pixel_values": np.full(1, float(number))}
        sample.multimodal_train_input_id = str(number)
        sample.weight_versions = [str(number)]
        # Equal lengths: nothing else tells whose they are.
        sample.tokens, sample.response_length = [*sample.array("tokens")[:4], number, number + 1], 2
        sample.loss_mask = [1, 1]
    return found


def ids(samples: list[Sample]) -> list[tuple[str | None, list[str]]]:
    return [(sample.multimodal_train_input_id, sample.weight_versions) for sample in samples]


def without(data: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: values for name, values in data.items() if name not in names}


@pytest.mark.parametrize("first", [0, 12])
def test_rows_in_order_come_from_the_samples_in_order(first: int):
    given = sources()
    for sample in given:
        sample.index = sample.index - 12 + first  # type: ignore[operator]
    found = converted(without(train_data(given), "sample_indices"), given).samples
    assert ids(found) == ids(given)
    assert [sample.index for sample in found] == [sample.index for sample in given]


def test_rows_in_another_order_name_their_samples():
    given = sources()
    assert ids(converted(train_data(given[::-1]), given).samples) == ids(given[::-1])
    assert ids(converted(train_data(given[1:3]), given).samples) == ids(given[1:3])


def test_rows_of_other_numbers_have_to_name_samples_with_images():
    given = sources()
    some = without(train_data(given[1:]), "sample_indices")
    with pytest.raises(InvalidField, match=r"train data\['sample_indices'\].*images"):
        converted(some, given)
    images = [sample.multimodal_train_inputs for sample in given[1:]]
    assert converted(some | {"multimodal_train_inputs": images}, given).samples[0].multimodal_train_inputs is images[0]
    for sample in given:
        sample.multimodal_train_inputs = sample.multimodal_train_input_id = None
    assert len(converted(some, given).samples) == 3


def test_samples_of_one_trajectory_are_told_apart_by_their_tokens():
    """They have one index."""
    given = sources()
    for sample in given[:3]:
        sample.index = 7
    assert ids(converted(train_data(given), given).samples) == ids(given)
    data = train_data(given)
    data["tokens"] = [[5, 5, 5, 5, 5, 5], *data["tokens"][1:]]
    with pytest.raises(InvalidField, match=r"train data\['multimodal_train_inputs'\]\[0\].*3 samples have index 7"):
        converted(data, given)


@pytest.mark.parametrize("name", ["rewards", "raw_reward"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, "much", None])
def test_rewards_that_are_not_finite_are_refused(name: str, value: Any):
    data = train_data(make_samples())
    data[name] = [*data[name][:2], value, *data[name][3:]]
    with pytest.raises(InvalidField, match=rf"train data\['{name}'\]\[2\]: got .*, expected a finite number"):
        converted(data, [])


@pytest.mark.parametrize("value", [math.nan, 0.5])
def test_divisors_that_are_no_whole_numbers_are_refused(value: float):
    data = train_data(make_samples())
    data["rollout_mask_sums"] = [*data["rollout_mask_sums"][:2], value, *data["rollout_mask_sums"][3:]]
    words = r"train data\['rollout_mask_sums'\]\[2\]: got .*, expected a (whole|finite) number"
    with pytest.raises(InvalidField, match=words):
        converted(data, [])


@pytest.mark.parametrize("tokens", [[1.5, 2.0, 3.0], np.array([1, 2, 2**32 + 3])])
def test_tokens_that_would_become_others_are_refused(tokens: Any):
    data = {"tokens": [tokens], "response_lengths": [1], "rewards": [1.0], "loss_masks": [[1]]}
    with pytest.raises(InvalidField, match=r"tokens\[.\]: got .*, expected whole numbers"):
        converted(data, [])
