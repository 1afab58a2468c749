"""Conversations with images, in place of generated responses: `slime.rollout.generate.supervised`."""

from __future__ import annotations

from typing import Any

import pytest
from rollout_tiny_vision import png, write_qwen3_vl

from slime.rollout.generate.loss_masks import MultiTurnLossMaskGenerator
from slime.rollout.generate.supervised import fill
from slime.rollout.prompts.media import Media
from slime.types import Sample
from slime.types.errors import InvalidField

SQUARE, WIDE = png("red"), png("blue", (32, 16))


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Media:
    return Media(str(write_qwen3_vl(tmp_path_factory.mktemp("model"))))


def conversation(*turns: list[dict[str, Any]] | str, images: list[bytes]) -> Sample:
    messages = [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    return Sample(index=3, prompt=messages, multimodal_inputs={"image": images})


def test_images_of_a_conversation_become_tokens_and_pixels_in_front_of_its_answer(media: Media) -> None:
    image = {"type": "image"}
    sample = conversation([image, image, {"type": "text", "text": "which"}], "red", images=[SQUARE, WIDE])
    masks = MultiTurnLossMaskGenerator(media.processor.tokenizer, "qwen")
    fill(sample, masks, lambda: media)
    prompt = media.prompt("<image><image>which", [SQUARE, WIDE])
    first = len(sample.tokens) - sample.response_length
    assert list(sample.tokens[: len(prompt.tokens)]) == prompt.tokens.tolist() and first >= len(prompt.tokens)
    # The tiny template opens an answer with a character that the answer itself lacks, so its first one counts as that.
    assert sample.loss_mask == [1] * sample.response_length and sample.response == "ed"
    assert sample.multimodal_train_inputs is not None
    for name, array in prompt.train_inputs.items():
        assert (sample.multimodal_train_inputs[name] == array).all(), name
    assert sample.multimodal_train_input_id == prompt.input_id


def test_images_behind_an_answer_are_refused(media: Media) -> None:
    sample = conversation("which", "red", [{"type": "image"}], "blue", images=[SQUARE])
    masks = MultiTurnLossMaskGenerator(media.processor.tokenizer, "qwen")
    with pytest.raises(InvalidField, match="sample 3 .*an image behind an answer is not trained on"):
        fill(sample, masks, lambda: media)


def test_images_without_what_processes_them_are_refused(media: Media) -> None:
    masks = MultiTurnLossMaskGenerator(media.processor.tokenizer, "qwen")
    with pytest.raises(InvalidField, match="multimodal_inputs: got 1 image, expected none where .media"):
        fill(conversation([{"type": "image"}], "red", images=[SQUARE]), masks)
