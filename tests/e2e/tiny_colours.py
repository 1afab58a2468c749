"""Rows that ask for the colour of an image, a tiny model that sees them, and the reward of its answers."""

from __future__ import annotations

import argparse
import base64
import json
from pathlib import Path
from typing import Any

from slime.types import Sample

COLOURS = ("red", "blue", "lime", "black")
WORDS = ("<pad>", "<eos>", "<image>", *"abcdefghijklmnopqrstuvwxyz", *" ?.:>")
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for item in m.content %}"
    "{% if item.type == 'image' %}<image>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def write_inputs(directory: Path, kind: str) -> Path:
    """model/ (llava, qwen2_5_vl, qwen3_vl or qwen3_5), and train.jsonl and test.jsonl with images as files, as text,
    and not at all."""
    import PIL.Image

    directory.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
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
    write = {"llava": write_llava, "qwen2_5_vl": write_qwen2_5_vl, "qwen3_vl": write_qwen3_vl, "qwen3_5": write_qwen3_5}
    write[kind](directory / "model")
    return directory


def tokenizer_of_words() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left", chat_template=TEMPLATE,
        additional_special_tokens=["<image>"],
    )  # fmt: skip


def _text() -> dict[str, Any]:
    return dict(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip


def write_llava(directory: Path) -> None:
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    images = LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    LlavaProcessor(
        images, tokenizer_of_words(), patch_size=8, vision_feature_select_strategy="default",
        num_additional_image_tokens=1, chat_template=TEMPLATE,
    ).save_pretrained(directory)  # fmt: skip
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=8, projection_dim=16,
        ),
        text_config=LlamaConfig(**_text()),
        image_token_id=2, image_seq_length=4,
    )  # fmt: skip
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(directory)


def write_qwen2_5_vl(directory: Path) -> None:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sees = dict(window_size=8, fullatt_block_indexes=[1])
    _write_qwen(directory, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, sees)


def write_qwen3_vl(directory: Path) -> None:
    """Two layers of the language model see images too."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    sees = dict(num_position_embeddings=9, deepstack_visual_indexes=[0, 1])
    _write_qwen(directory, Qwen3VLConfig, Qwen3VLForConditionalGeneration, sees, head_dim=16)


def write_qwen3_5(directory: Path) -> None:
    """The first layer of the language model is a gated delta net."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    gated = dict(
        rope_parameters=rope, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
    )  # fmt: skip
    sees = dict(num_position_embeddings=9)
    _write_qwen(directory, Qwen3_5Config, Qwen3_5ForConditionalGeneration, sees, **gated)


def _write_qwen(directory: Path, config_class: Any, model_class: Any, sees: dict[str, Any], **text: Any) -> None:
    """An image is four tokens, in two rows."""
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer_of_words().save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=4, merge_size=2
    ).save_pretrained(directory)
    config = config_class(
        vision_config=sees
        | dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=64, patch_size=4),
        text_config=_text()
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]})
        | text,
        image_token_id=2, video_token_id=0, vision_start_token_id=0, vision_end_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model_class(config).save_pretrained(directory)


async def reward(args: argparse.Namespace, sample: Sample, **kwargs: object) -> float:
    """The fraction of letters that are right."""
    return sum(a == b for a, b in zip(sample.response, sample.label, strict=False)) / len(sample.label)
