"""Samples with images: what the processor makes of them, what an engine is asked, what a sample carries away."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from rollout_fakes import EOS, FakeBuffer, FakeEngine
from rollout_tiny_model import write_tiny_model
from rollout_tiny_vision import png, write_idefics3, write_llava, write_qwen2_5_vl

from slime.rollout.calls.call import CALL, RolloutCall
from slime.rollout.generate.sample import generate
from slime.rollout.prompts.media import Media, data_uri
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.sources import LeasedDataSource
from slime.types import Sample, SampleGroup
from slime.types.errors import EngineError, InvalidField, InvalidFile, InvalidSetting

RED, WIDE = png("red"), png("green", (32, 16))
MESSAGES = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "which?"}]}]


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_5_vl(tmp_path_factory.mktemp("qwen"))


def sample_with(*images: bytes, **values: Any) -> Sample:
    return Sample(prompt=MESSAGES, multimodal_inputs={"image": list(images)}, index=0, group_index=0, **values)


@pytest.mark.parametrize("kind", ["llava", "idefics3"])
def test_a_prompt_is_what_the_processor_says_and_an_engine_makes_it_again(
    kind: str, request: pytest.FixtureRequest
) -> None:
    media = Media(str(request.getfixturevalue(kind)))
    prompt = media.prompt("a<image>b<image>", [RED, WIDE])
    pictures = [PIL.Image.open(io.BytesIO(image)) for image in (RED, WIDE)]
    wanted = media.processor(text=["a<image>b<image>"], images=[pictures], add_special_tokens=False)
    assert prompt.tokens.tolist() == list(wanted["input_ids"][0])
    pixels = np.asarray(wanted["pixel_values"])
    np.testing.assert_array_equal(prompt.train_inputs["pixel_values"], pixels[0] if kind == "idefics3" else pixels)
    assert prompt.placeholders.count(media.image_token) == 2 < prompt.tokens.tolist().count(media.image_token)
    tokens, places, inputs = media.expand([*prompt.placeholders, media.image_token], [RED, WIDE])
    # The last one is of the model's own writing.
    assert tokens == [*prompt.tokens.tolist(), media.image_token] and len(tokens) - 1 not in places
    assert [tokens[place] for place in places] == [media.image_token] * len(places)
    np.testing.assert_array_equal(inputs["pixel_values"], prompt.train_inputs["pixel_values"])


def test_an_image_is_as_many_tokens_as_its_size_makes(qwen: Path) -> None:
    media = Media(str(qwen))
    prompt = media.prompt("a<image>b<image>", [RED, WIDE])
    assert prompt.train_inputs["image_grid_thw"].tolist() == [[1, 4, 4], [1, 4, 8]]
    assert prompt.train_inputs["pixel_values"].shape == (16 + 32, 2 * 3 * 4 * 4)
    letters = [media.processor.tokenizer.convert_tokens_to_ids(letter) for letter in "ab"]
    image = [media.image_token]
    assert prompt.tokens.tolist() == [letters[0], *image * 4, letters[1], *image * 8]
    assert prompt.placeholders == [letters[0], *image, letters[1], *image]
    tokens, places, inputs = media.expand(prompt.placeholders, [RED, WIDE])
    assert tokens == prompt.tokens.tolist() and len(places) == 12
    for name, array in prompt.train_inputs.items():
        np.testing.assert_array_equal(inputs[name], array)


def test_an_engine_gets_placeholders_and_images_and_the_sample_keeps_tokens_and_pixels(
    llava: Path, make_state: Callable[..., Any]
) -> None:
    engine = FakeEngine(lambda ids, params: [3, EOS])
    state = make_state(engine, hf_checkpoint=str(llava))
    sample = asyncio.run(generate(state.args, sample_with(RED), state.sampling_params))
    engine.stop()
    (request,) = engine.requests
    image = state.processor.image_token_id
    assert request["image_data"] == [[data_uri(RED)]] and request["input_ids"][0].count(image) == 1
    assert data_uri(RED).startswith("data:image/png;base64,")
    assert sample.tokens.count(image) == 4 and sample.tokens[-2:] == [3, EOS]
    assert sample.multimodal_train_inputs is not None
    assert sample.multimodal_train_inputs["pixel_values"].shape == (1, 3, 16, 16)
    assert sample.multimodal_train_input_id


def test_a_resumed_response_goes_on_behind_the_placeholders(llava: Path, make_state: Callable[..., Any]) -> None:
    engine = FakeEngine(lambda ids, params: [4, EOS])
    state = make_state(engine, hf_checkpoint=str(llava))
    sample = sample_with(RED)
    sample.tokens = state.prompts.encode(sample)
    sample.append_response_tokens(tokens=[3], log_probs=[-1.0], text="a")
    asyncio.run(generate(state.args, sample, state.sampling_params))
    engine.stop()
    (request,) = engine.requests
    assert request["input_ids"][0] == [*state.prompts.with_media(sample).placeholders, 3]
    assert sample.tokens[-3:] == [3, 4, EOS]


def test_samples_with_and_without_images_are_two_requests(llava: Path, make_state: Callable[..., Any]) -> None:
    engine = FakeEngine(lambda ids, params: [3, EOS])
    state = make_state(
        engine, hf_checkpoint=str(llava), rollout_batch_size=2, deterministic=True, custom_rm_path=f"{__file__}:reward"
    )
    groups = [SampleGroup(0, "train", [sample_with(RED)]), SampleGroup(1, "train", [Sample(prompt="12>", index=1)])]
    groups[1].samples[0].group_index = 1
    token = CALL.set(RolloutCall(0, 2))
    try:
        with LeasedDataSource(FakeBuffer(groups), worker_id="test", wait_seconds=0.05) as source:
            generate_rollout(state.args, 0, source)
    finally:
        CALL.reset(token)
        engine.stop()
    assert [len(request.get("image_data", [])) for request in engine.requests] == [1, 0]


async def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    return 1.0


def test_an_engine_that_tokenised_the_prompt_otherwise_is_an_error(llava: Path, make_state: Callable[..., Any]) -> None:
    engine = FakeEngine(lambda ids, params: [3, EOS])
    engine.tokens_an_image = 2
    state = make_state(engine, hf_checkpoint=str(llava))
    with pytest.raises(EngineError, match="counted 9 tokens in a prompt with images .1., .* counts 11"):
        asyncio.run(generate(state.args, sample_with(RED), state.sampling_params))
    engine.stop()


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([RED, RED], "got 2 images, expected 1, one for each placeholder"),
        ([b"no image"], "an image that can be decoded"),
        ([RED[:45]], "an image that can be decoded"),
        (["red.png"], "a list of encoded images, as bytes"),
    ],
)
def test_images_that_do_not_fit_are_named(
    llava: Path, engine: FakeEngine, make_state: Callable[..., Any], images: list[Any], message: str
) -> None:
    state = make_state(engine, hf_checkpoint=str(llava))
    with pytest.raises(InvalidField, match=message):
        state.prompts.encode(sample_with(*images))


def test_a_model_that_reads_text_alone_says_so(
    tmp_path: Path, engine: FakeEngine, make_state: Callable[..., Any]
) -> None:
    directory = write_tiny_model(tmp_path / "text")
    state = make_state(engine, hf_checkpoint=str(directory))
    assert state.processor is None
    with pytest.raises(InvalidSetting, match="--hf-checkpoint requires a model that reads images: .* reads text"):
        state.prompts.encode(sample_with(RED))


def test_a_directory_without_a_processor_says_so(llava: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((llava / "config.json").read_text())
    with pytest.raises(InvalidFile, match="--model-path: .* its processor cannot be loaded"):
        Media(str(tmp_path), "--model-path")
