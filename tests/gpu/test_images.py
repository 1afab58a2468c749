"""Prompts with images through a real SGLang: what it sees, and where, is what transformers and the trainer see.

    pytest tests/gpu/test_images.py

The models, a Qwen2.5-VL and a Qwen3-VL, are random, of two layers. SLIME_TEST_ATTENTION, SLIME_TEST_MM_ATTENTION: see
`--sglang-attention-backend`, `--sglang-mm-attention-backend`.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu_needs import ATTENTION, needs
from slime.rollout.engines.client import EngineClient
from slime.rollout.engines.gpus import visible_gpus
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang.launch import SGLangOptions, start_sglang
from slime.rollout.prompts.media import Media

NUM_GPUS = 1

MM_ATTENTION = os.environ.get("SLIME_TEST_MM_ATTENTION", "triton_attn")
pytestmark = needs(NUM_GPUS, "sglang", "torchvision")

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>")  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for item in message.content %}{% if item.type == 'image' %}" + IMAGE + "{% else %}{{ item.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
# Mean differences of log-probs: bfloat16 makes 0.03 (this model on a CPU, against float32), other images 0.5 to 1.1,
# positions that count an image's tokens one by one 0.6 to 0.8.
BOUND = 0.1


# Spreads rewards over several values even for the bytes of an untrained model.
GRADES = """async def reward(args, sample, **kwargs):
    return sum(ord(character) for character in sample.response) % 7 / 7
"""
# Pixels of an image token's side.
SIDES = {"qwen2_5_vl": 28, "qwen3_vl": 32, "qwen3_5": 32}


def write_model(directory: Path, family: str) -> Path:
    """In bfloat16, with heads of 64 for every kernel, and weights so large that other images are other log-probs."""
    import torch
    import transformers
    from tokenizers.pre_tokenizers import ByteLevel

    # A token is a byte.
    vocabulary = {name: i for i, name in enumerate([*sorted(ByteLevel.alphabet()), *SPECIAL])}
    tokenizer = transformers.Qwen2Tokenizer(
        vocab=vocabulary, merges=[], unk_token="<|endoftext|>", pad_token="<|endoftext|>", eos_token="<|im_end|>",
        bos_token=None, additional_special_tokens=list(SPECIAL), chat_template=TEMPLATE,
    )  # fmt: skip
    sees = dict(
        depth=2, hidden_size=128, intermediate_size=256, num_heads=2, out_hidden_size=256, initializer_range=0.1
    )
    image: dict[str, Any] = {}
    positions: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]}
    text = dict(
        vocab_size=320, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, initializer_range=0.1,
        pad_token_id=vocabulary["<|endoftext|>"], eos_token_id=vocabulary["<|im_end|>"], bos_token_id=None,
    )  # fmt: skip
    processor = name = "Qwen3VL"
    videos = "Qwen3VLVideoProcessor"
    if family == "qwen2_5_vl":
        processor = name = "Qwen2_5_VL"
        videos = "Qwen2VLVideoProcessor"
        sees |= dict(window_size=56, fullatt_block_indexes=[1])
    else:
        # Its positions are interpolated.
        sees |= dict(num_position_embeddings=9)
        image = {"patch_size": 16, "min_pixels": 64 * 64}
        # SGLang goes by this, transformers by the family.
        positions |= {"mrope_interleaved": True}
    if family == "qwen3_vl":
        # Both layers of the language model see images too.
        sees |= dict(deepstack_visual_indexes=[0, 1])
    if family == "qwen3_5":
        # A layer of gated delta nets, then one of attention; its processor is the one before.
        name = "Qwen3_5"
        positions |= {"partial_rotary_factor": 0.5}
        text |= dict(
            head_dim=128, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=128, linear_value_head_dim=128,
        )  # fmt: skip
    getattr(transformers, f"{processor}Processor")(
        transformers.Qwen2VLImageProcessor(**image), tokenizer, getattr(transformers, videos)(), chat_template=TEMPLATE
    ).save_pretrained(directory)
    config = getattr(transformers, f"{name}Config")(
        vision_config=sees,
        text_config=text | dict(rope_parameters=positions),
        tie_word_embeddings=False,
        **{f"{name}_token_id": vocabulary[f"<|{token}|>"] for name, token in (
            ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"),
            ("vision_end", "vision_end"),
        )},
    )  # fmt: skip
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForConditionalGeneration")(config).to(torch.bfloat16).save_pretrained(directory)
    if family == "qwen3_5":
        # Published models have these, SGLang goes by them, and transformers does not write them all.
        about = json.loads((directory / "config.json").read_text())
        about["text_config"]["full_attention_interval"] = 2
        # SGLang reads it here, and takes 0.25 where it is in rope_parameters alone.
        about["text_config"]["partial_rotary_factor"] = positions["partial_rotary_factor"]
        about["vision_config"]["deepstack_visual_indexes"] = []
        (directory / "config.json").write_text(json.dumps(about))
    return directory


def picture(seed: int, side: int, columns: int = 2) -> bytes:
    """A PNG of noise, of two rows and so many columns of tokens: a size that no processor changes."""
    import PIL.Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (2 * side, columns * side, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


# Text, and seed and columns of each image.
CASES: list[tuple[str, list[tuple[int, int]]]] = [
    (f"<|im_start|>which{IMAGE}?", [(1, 2)]),
    (f"<|im_start|>{IMAGE}or{IMAGE}?", [(3, 4), (2, 2)]),
    ("<|im_start|>no image", []),
]


@pytest.fixture(scope="module", params=SIDES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("images") / "model", family)


@pytest.fixture(scope="module")
def media(directory: Path) -> Media:
    return Media(str(directory))


@pytest.fixture(scope="module")
def model(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    options = SGLangOptions(
        model_path=str(directory), gpus=visible_gpus()[:NUM_GPUS], random_seed=1,
        args={"mem_fraction_static": 0.3, "attention_backend": ATTENTION, "mm_attention_backend": MM_ATTENTION},
    )  # fmt: skip
    with start_sglang(options) as process:
        process.wait_ready(400)
        yield process


def log_probs(model: Any, media: Media, text: str, images: list[bytes], output: list[int]) -> np.ndarray:
    """[R] by transformers in float32, positions by its own count."""
    import torch

    if not images:
        ids = torch.tensor([[*media.processor.tokenizer.encode(text, add_special_tokens=False), *output]])
        inside: dict[str, Any] = {"inputs_embeds": model.get_input_embeddings()(ids)}
    else:
        prompt = media.prompt(text, images)
        ids = torch.tensor([[*prompt.tokens.tolist(), *output]])
        shown = ids == media.image_token
        shown[:, len(prompt.tokens) :] = False
        inputs = {name: torch.from_numpy(array) for name, array in media.vision.join([prompt.train_inputs]).items()}
        found = model.get_image_features(**inputs)
        embedded = model.get_input_embeddings()(ids).masked_scatter(
            shown[..., None], torch.cat(list(found.pooler_output))
        )
        positions, _ = model.model.get_rope_index(ids, shown.int(), image_grid_thw=inputs["image_grid_thw"])
        inside = {"inputs_embeds": embedded, "position_ids": positions}
        if "deepstack_features" in found:
            # Some versions of transformers split them by image.
            deep = [torch.cat(f) if isinstance(f, tuple) else f for f in found.deepstack_features]
            inside |= {"visual_pos_masks": shown, "deepstack_visual_embeds": deep}
    hidden = model.model.language_model(**inside).last_hidden_state
    logits = model.lm_head(hidden)[0, -len(output) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0].detach().numpy()


def generate(engine: EngineProcess, media: Media, cases: list[tuple[list[int], list[str]]]) -> list[dict[str, Any]]:
    """cases: placeholders and data URIs of each prompt."""
    params = {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True, "skip_special_tokens": False}

    async def call() -> list[dict[str, Any]]:
        async with EngineClient(engine.url, engine.name) as client:
            extra = {"image_data": [images for _, images in cases]} if any(images for _, images in cases) else {}
            return await client.generate([ids for ids, _ in cases], params, timeout_seconds=240, **extra)

    return asyncio.run(call())


def asked(media: Media, text: str, images: list[bytes]) -> tuple[list[int], list[str]]:
    if not images:
        return media.processor.tokenizer.encode(text, add_special_tokens=False), []
    prompt = media.prompt(text, images)
    return prompt.placeholders, prompt.images


@pytest.fixture(scope="module")
def cases(family: str) -> list[tuple[str, list[bytes]]]:
    return [(text, [picture(seed, SIDES[family], columns) for seed, columns in images]) for text, images in CASES]


def test_an_engine_has_the_log_probs_of_transformers_for_prompts_with_images(
    family: str, engine: EngineProcess, media: Media, model: Any, cases: list[tuple[str, list[bytes]]]
) -> None:
    answers = generate(engine, media, [asked(media, *case) for case in cases])
    for (text, images), answer, (_, made) in zip(cases, answers, CASES, strict=True):
        wanted = len(media.prompt(text, images).tokens) if images else len(asked(media, text, [])[0])
        assert answer["meta_info"]["prompt_tokens"] == wanted, (text, answer["meta_info"])
        given = np.array([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
        output = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
        right = np.abs(given - log_probs(model, media, text, images, output)).mean()
        others = {"other images": [picture(9 + i, SIDES[family], columns) for i, (_, columns) in enumerate(made)]}
        if len(images) > 1:
            others["images the other way round"] = images[::-1]
        wrong = {
            name: np.abs(given - log_probs(model, media, text, shown, output)).mean()
            for name, shown in others.items()
            if images
        }
        print(f"{len(images)} images: engine and transformers differ by {right:.4f}, with {wrong}")
        assert right < BOUND, (text, right, wrong)
        assert all(value > 2 * BOUND for value in wrong.values()), (text, right, wrong)


def test_a_response_taken_up_again_keeps_its_tokens(
    engine: EngineProcess, media: Media, model: Any, cases: list[tuple[str, list[bytes]]]
) -> None:
    text, images = cases[0]
    ids, data = asked(media, text, images)
    # Bytes that are not text: decoded and tokenized again, they would give other and more tokens.
    begun = [media.processor.tokenizer.convert_tokens_to_ids(name) for name in ("Ã", "Ã", "ł", "a")]
    (answer,) = generate(engine, media, [([*ids, *begun], data)])
    assert answer["meta_info"]["prompt_tokens"] == len(media.prompt(text, images).tokens) + len(begun)
    given = np.array([value for value, _, _ in answer["meta_info"]["output_token_logprobs"]])
    output = [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]]
    wanted = log_probs(model, media, text, images, [*begun, *output])[len(begun) :]
    assert np.abs(given - wanted).mean() < BOUND, (given, wanted)


# Megatron has no Qwen2.5-VL.
@pytest.mark.parametrize(
    ("family", "backend"),
    [("qwen2_5_vl", "fsdp"), *((family, name) for family in ("qwen3_vl", "qwen3_5") for name in ("fsdp", "megatron"))],
    indirect=["family"],
)
def test_a_colocated_run_trains_on_what_its_engine_saw(
    family: str, backend: str, directory: Path, tmp_path: Path
) -> None:
    rows = [
        {"prompt": "which<image>?", "images": ["first.png"], "label": "a"},
        {"prompt": "<image>or<image>?", "images": ["wide.png", "second.png"], "label": "e"},
        {"prompt": [{"role": "user", "content": "no image"}], "label": "i"},
        {"prompt": [{"role": "user", "content": "<image>"}], "images": ["second.png"], "label": "o"},
    ]
    for name, seed, columns in (("first", 1, 2), ("second", 2, 2), ("wide", 3, 4)):
        (tmp_path / f"{name}.png").write_bytes(picture(seed, SIDES[family], columns))
    (tmp_path / "grades.py").write_text(GRADES)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    values: dict[str, Any] = {
        "hf-checkpoint": directory, "prompt-data": tmp_path / "train.jsonl", "input-key": "prompt",
        "label-key": "label", "multimodal-keys": '{"image": "images"}',
        "custom-rm-path": f"{tmp_path / 'grades.py'}:reward", "rollout-engine": "sglang", "train-backend": backend,
        "num-rollout": 3, "rollout-batch-size": 8,
        "n-samples-per-prompt": 4, "rollout-max-response-len": 16, "lr": 1e-5, "max-tokens-per-gpu": 2048,
        "output-dir": tmp_path / "run", "sglang-attention-backend": ATTENTION,
        "sglang-mm-attention-backend": MM_ATTENTION, "sglang-mem-fraction-static": 0.3,
    }  # fmt: skip
    words = [word for name, value in values.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "slime.launcher.cli", "train", *words]
    switches = ["--apply-chat-template", "--use-dynamic-batch-size", "--colocate", "--check-weight-update-equal"]
    done = subprocess.run([*command, *switches], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:] + logs(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [step for step in map(json.loads, lines) if "train/loss" in step]
    print([step["train/train_rollout_logprob_abs_diff"] for step in steps])
    assert len(steps) == 3, lines
    for step in steps:
        # The first is of the weights on disk, the others of those that were sent, what sees among them.
        assert 0 < step["train/train_rollout_logprob_abs_diff"] < BOUND, (steps, logs(tmp_path / "run"))
        assert step["train/grad_norm"] > 0


def logs(run: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted((run / "logs").glob("*.log")))
