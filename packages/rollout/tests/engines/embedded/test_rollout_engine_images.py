"""The embedded engine with images: what it generates is what transformers would."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_tiny_vision import (
    png,
    write_idefics3,
    write_llava,
    write_qwen2_5_vl,
    write_qwen2_vl,
    write_qwen3_5,
    write_qwen3_vl,
)

from slime.rollout.engines.embedded.launch import start_embedded
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.engines.process import EngineProcess
from slime.rollout.prompts.media import Media, data_uri

RED, BLUE, WIDE = png("red"), png("blue"), png("green", (32, 16))
CASES = [("<image>which?", [RED]), ("<image>which?", [BLUE]), ("a<image>b<image>", [WIDE, RED]), ("text", [])]


WRITERS = [write_llava, write_idefics3, write_qwen2_vl, write_qwen2_5_vl, write_qwen3_vl, write_qwen3_5]


@pytest.fixture(scope="module", params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[..., Path]:
    return request.param


@pytest.fixture(scope="module")
def directory(write: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[EngineProcess]:
    with start_embedded(EmbeddedOptions(model_path=str(directory), threads=1)) as process:
        yield process.wait_ready(120)


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def media(directory: Path) -> Media:
    return Media(str(directory))


def post(engine: EngineProcess, path: str, body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(engine.url + path, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())["error"]


def inputs_of(media: Media, text: str, images: list[bytes], output: list[int] | None = None) -> dict[str, torch.Tensor]:
    """Inputs of a model of transformers, for a prompt and the tokens that the model wrote."""
    if not images:
        ids = torch.tensor([media.processor.tokenizer.encode(text, add_special_tokens=False) + (output or [])])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    prompt = media.prompt(text, images)
    inputs = {name: torch.from_numpy(array) for name, array in media.vision.join([prompt.train_inputs]).items()}
    ids = torch.tensor([[*prompt.tokens.tolist(), *(output or [])]])
    if media.vision.grids:
        inputs["mm_token_type_ids"] = (ids == media.image_token).int()
        inputs["mm_token_type_ids"][:, len(prompt.tokens) :] = 0
    return inputs | {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def expected(media: Media, model: Any, text: str, images: list[bytes], count: int) -> list[int]:
    if media.vision.grids:
        output: list[int] = []
        for _ in range(count):
            output.append(int(whole(model, inputs_of(media, text, images, output))[-1].argmax()))
            if output[-1] == model.config.text_config.eos_token_id:
                break
        return output
    inputs = inputs_of(media, text, images)
    made = model.generate(**inputs, do_sample=False, max_new_tokens=count, bad_words_ids=None)
    return made[0, inputs["input_ids"].shape[1] :].tolist()


@torch.no_grad()
def whole(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """[L, V] without a cache, where tokens of images that the model wrote are text."""
    if "mm_token_type_ids" not in inputs:
        return model(**inputs).logits[0]
    ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
    features = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
    embedded = model.get_input_embeddings()(ids)
    embedded = embedded.masked_scatter(types[..., None].bool(), torch.cat(list(features.pooler_output)))
    positions, _ = model.model.get_rope_index(ids, types, image_grid_thw=inputs["image_grid_thw"])
    deep: dict[str, Any] = {}
    if hasattr(features, "deepstack_features"):
        deep["visual_pos_masks"] = types.bool()
        deep["deepstack_visual_embeds"] = [torch.cat(list(of_layer)) for of_layer in features.deepstack_features]
    states = model.model.language_model(inputs_embeds=embedded, position_ids=positions, **deep).last_hidden_state
    return model.lm_head(states)[0]


def request(media: Media, cases: list[tuple[str, list[bytes]]], **params: Any) -> dict[str, Any]:
    ids = [media.processor.tokenizer.encode(text, add_special_tokens=False) for text, _ in cases]
    images = [[data_uri(image) for image in images] for _, images in cases]
    params = {"max_new_tokens": 6, "temperature": 0} | params
    return {"input_ids": ids, "image_data": images, "sampling_params": params, "return_logprob": True}


def test_a_batch_of_prompts_with_other_images_and_none_is_what_transformers_generates(
    engine: EngineProcess, model: Any, media: Media
) -> None:
    answers = post(engine, "/generate", request(media, CASES))
    for (text, images), answer in zip(CASES, answers, strict=True):
        assert answer["output_ids"] == expected(media, model, text, images, 6), text
        if images:
            assert answer["meta_info"]["prompt_tokens"] == len(media.prompt(text, images).tokens)
    # Equal texts: only the images differ.
    assert answers[0]["meta_info"]["output_token_logprobs"] != answers[1]["meta_info"]["output_token_logprobs"]


def test_one_prompt_takes_one_image_and_bare_base64(engine: EngineProcess, media: Media) -> None:
    body = request(media, CASES[:1])
    alone = body | {"input_ids": body["input_ids"][0], "image_data": base64.b64encode(RED).decode()}
    both = post(engine, "/generate", alone)
    assert both["output_ids"] == post(engine, "/generate", body)[0]["output_ids"]


def test_samples_of_one_prompt_share_its_prefill_and_of_another_image_do_not(
    engine: EngineProcess, media: Media
) -> None:
    answers = post(engine, "/generate", request(media, [CASES[0], CASES[0], CASES[1]]))
    cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
    assert cached == [0, answers[0]["meta_info"]["prompt_tokens"], 0]


def test_log_probs_count_the_image(engine: EngineProcess, model: Any, media: Media) -> None:
    # transformers takes an image token that the model wrote for one of an image.
    answer = next(
        answer
        for seed in range(20)
        for answer in post(engine, "/generate", request(media, CASES[:1], temperature=1.0, sampling_seed=seed))
        if media.image_token not in answer["output_ids"]
    )
    prompt, output = media.prompt(*CASES[0]), answer["output_ids"]
    with torch.no_grad():
        logits = model(**inputs_of(media, *CASES[0], output)).logits[0]
    wanted = logits[len(prompt.tokens) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]
    given = [log_prob for log_prob, _, _ in answer["meta_info"]["output_token_logprobs"]]
    assert given == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"image_data": [["https://example.org/a.png"]]}, "fetches nothing"),
        ({"image_data": [["file:///etc/passwd"]]}, "fetches nothing"),
        ({"image_data": [[base64.b64encode(b"no image").decode()]]}, "an image that can be decoded"),
        ({"image_data": [[data_uri(RED)] * 2]}, "got 2 images, expected 1, one for each placeholder"),
        ({"image_data": [[data_uri(RED)]] * 2}, "an entry for each of 1 prompts"),
        ({"video_data": ["x"]}, "text and images only"),
    ],
)
def test_images_that_cannot_be_used_are_refused(
    engine: EngineProcess, media: Media, change: dict[str, Any], named: str
) -> None:
    code, error = post(engine, "/generate", request(media, CASES[:1]) | change)
    assert code == 400 and named in error["message"]


def test_new_weights_come_by_the_names_of_the_files(
    engine: EngineProcess, write: Callable[..., Path], media: Media, tmp_path: Path
) -> None:
    other = write(tmp_path / "other", seed=1)
    from transformers import AutoModelForImageTextToText

    post(engine, "/update_weights_from_disk", {"model_path": str(other), "weight_version": "1"})
    answers = post(engine, "/generate", request(media, CASES))
    changed = AutoModelForImageTextToText.from_pretrained(other, dtype=torch.float32).eval()
    for (text, images), answer in zip(CASES, answers, strict=True):
        assert answer["output_ids"] == expected(media, changed, text, images, 6), text


def test_chat_messages_take_text_alone(engine: EngineProcess) -> None:
    item = {"type": "image_url", "image_url": {"url": data_uri(RED)}}
    code, error = post(engine, "/v1/chat/completions", {"messages": [{"role": "user", "content": [item]}]})
    assert code == 400 and "/generate takes images" in error["message"]
