"""Rows that ask for the colour of an image, a tiny model that sees them, and the reward of its answers."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path

from slime.types import Sample

COLOURS = ("red", "blue", "lime", "black")
WORDS = ("<pad>", "<eos>", "<image>", *"abcdefghijklmnopqrstuvwxyz", *" ?.:>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for item in m.content %}"
    "{% if item.type == 'image' %}<image>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def write_inputs(directory: Path) -> Path:
    """model/, and train.jsonl and test.jsonl with images as files and as text, and a row without any."""
    import PIL.Image

    directory.mkdir(parents=True)
    rows = []
    for colour in COLOURS:
        file = directory / f"{colour}.png"
        PIL.Image.new("RGB", (20, 16), colour).save(file)
        rows.append({"prompt": "which<image>?", "images": file.name, "label": colour})
    encoded = base64.b64encode((directory / "red.png").read_bytes()).decode()
    rows.append(
        {"prompt": "<image>or<image>?", "images": [f"data:image/png;base64,{encoded}", "blue.png"], "label": "red"}
    )
    rows.append({"prompt": [{"role": "user", "content": "say red"}], "label": "red"})
    for name, chosen in (("train", rows), ("test", rows[:2])):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    write_model(directory / "model")
    return directory


def write_model(directory: Path) -> None:
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
        PreTrainedTokenizerFast,
    )
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left", chat_template=TEMPLATE,
        additional_special_tokens=["<image>"],
    )  # fmt: skip
    images = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)  # fmt: skip
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=8, projection_dim=16,
        ),
        text_config=LlamaConfig(
            vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        ),
        image_token_id=2, image_seq_length=4,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(directory)


async def reward(args: argparse.Namespace, sample: Sample, **kwargs: object) -> float:
    """The fraction of letters that are right."""
    return sum(a == b for a, b in zip(sample.response, sample.label, strict=False)) / len(sample.label)
