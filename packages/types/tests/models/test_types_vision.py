"""Outputs of image processors, concatenated for a call of a model, and models that read no images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from slime.types.errors import InvalidField, InvalidSetting, NotAvailable
from slime.types.models.vision import FAMILIES, images_id, images_of, require_vision, trained_vision, vision_of


def test_images_of_several_prompts_are_joined_end_to_end() -> None:
    family = FAMILIES["llava"]
    one, two = (family.take({"pixel_values": np.full((n, 3, 4, 4), n), "input_ids": [[1]]}) for n in (1, 2))
    joined = family.join([one, two])
    assert joined.keys() == {"pixel_values"} and joined["pixel_values"].shape == (3, 3, 4, 4)
    assert joined["pixel_values"][:, 0, 0, 0].tolist() == [1, 2, 2]


def test_tiles_of_other_sizes_are_padded_with_what_is_not_looked_at() -> None:
    family = FAMILIES["idefics3"]
    parts = [
        family.take(
            {"pixel_values": np.ones((1, n, 3, size, 4)), "pixel_attention_mask": np.ones((1, n, size, 4), int)}
        )
        for n, size in ((2, 4), (1, 6))
    ]
    joined = family.join(parts)
    assert joined["pixel_values"].shape == (1, 3, 3, 6, 4)
    assert joined["pixel_attention_mask"][0].sum((1, 2)).tolist() == [16, 16, 24]
    assert joined["pixel_values"].sum() == 3 * (16 + 16 + 24)


def test_a_sample_without_pixels_is_refused() -> None:
    with pytest.raises(InvalidField, match=r"multimodal_train_inputs\.pixel_values"):
        FAMILIES["llava"].join([{"pixel_values": np.ones((1, 3, 4, 4))}, {}])


@pytest.mark.parametrize("inputs", [{"video": [b"x"]}, {"image": ["path"]}, {"image": b"x"}])
def test_other_inputs_than_encoded_images_are_refused(inputs: dict[str, object]) -> None:
    with pytest.raises(InvalidField, match="multimodal_inputs"):
        images_of(inputs)


def test_equal_ids_mean_equal_images() -> None:
    assert images_of({"image": [b"ab"]}) == [b"ab"] and images_of(None) == []
    assert images_id([b"ab"]) == images_id([b"ab"])
    assert len({images_id(images) for images in ([b"ab"], [b"a", b"b"], [b"b", b"a"], [])}) == 4


def test_models_are_known_by_their_config(tmp_path: Path) -> None:
    assert vision_of({"model_type": "llava"}) is FAMILIES["llava"] and vision_of({"model_type": "qwen3"}) is None
    qwen = vision_of({"model_type": "qwen2_5_vl", "image_token_id": 7, "vision_config": {"spatial_merge_size": 4}})
    assert qwen is not None and (qwen.image_token, qwen.merge, qwen.grids) == (7, 4, "image_grid_thw")
    assert vision_of({"model_type": "qwen3_vl", "image_token_id": 7}) is not None
    for config, error, named in (
        ({"model_type": "qwen3"}, InvalidSetting, "reads text only"),
        ({"model_type": "gemma3", "vision_config": {}}, NotAvailable, "with a gemma3"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(error, match=f"--flag.*{named}"):
            require_vision(str(tmp_path), "--flag")


def test_a_trainer_leaves_out_what_sees_only_of_a_model_that_can_do_without() -> None:
    config = {"model_type": "qwen3_5", "image_token_id": 7, "vision_config": {"spatial_merge_size": 4}}
    found = vision_of(config)
    assert found is not None and (found.image_token, found.merge) == (7, 4)
    assert trained_vision(config, True) == found
    assert trained_vision(config, None) is None and trained_vision(config, False) is None
    assert trained_vision({"model_type": "qwen3_vl"}, None) is not None
    # A config that describes a language model alone.
    assert vision_of({"model_type": "qwen3_5"}) is None


def test_positions_count_an_image_by_its_rows_and_columns() -> None:
    family = FAMILIES["qwen2_vl"]
    places = np.array([0, 1, 1, 1, 1, 1, 1, 0, 0, 1, 0], bool)
    found = family.positions(places, {"image_grid_thw": np.array([[1, 4, 6], [1, 2, 2]])})
    assert found.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4, 5, 6, 7],
        [0, 1, 1, 1, 2, 2, 2, 4, 5, 6, 7],
        [0, 1, 2, 3, 1, 2, 3, 4, 5, 6, 7],
    ]
    assert family.positions(np.zeros(3, bool), None).tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize(
    ("places", "named"), [([1, 1, 0, 1, 1], "text within"), ([1, 1, 1], "images of 4 tokens.*expected 3")]
)
def test_positions_of_other_images_than_a_prompt_has_are_refused(places: list[int], named: str) -> None:
    with pytest.raises(InvalidField, match=named):
        FAMILIES["qwen2_vl"].positions(np.array(places, bool), {"image_grid_thw": np.array([[1, 4, 4]])})
