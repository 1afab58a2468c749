"""Random models of two layers that read images, with a character tokenizer and a processor, as HF directories."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for item in m.content %}"
    "{% if item.type == 'image' %}<image>{% else %}{{ item.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
TILES = ("<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)))


def png(colour: str, size: tuple[int, int] = (16, 16)) -> bytes:
    import PIL.Image

    file = io.BytesIO()
    PIL.Image.new("RGB", size, colour).save(file, "PNG")
    return file.getvalue()


def _tokenizer(special: tuple[str, ...]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ("<pad>", "<eos>", "<image>", *special, *"abcdefghijklmnopqrstuvwxyz", *" ?.:>\n")
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left", chat_template=TEMPLATE,
        additional_special_tokens=["<image>", *special],
    )  # fmt: skip


def _text(tokenizer: Any) -> dict[str, Any]:
    return dict(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=160, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        initializer_range=0.2,
    )  # fmt: skip


def write_llava(directory: Path, seed: int = 0) -> Path:
    """An image has four tokens."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    tokenizer = _tokenizer(())
    LlavaProcessor(
        LlavaImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    ).save_pretrained(directory)  # fmt: skip
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=8, projection_dim=16, initializer_range=0.5, initializer_factor=5.0,
        ),
        text_config=LlamaConfig(**_text(tokenizer)),
        image_token_id=2, vision_feature_layer=-2, vision_feature_select_strategy="default", image_seq_length=4,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlavaForConditionalGeneration(config).save_pretrained(directory)
    return directory


def write_idefics3(directory: Path, seed: int = 0) -> Path:
    """An image is cut into tiles of 16 by 16, as many as its shape asks for, of four tokens each."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration, Idefics3Processor, LlamaConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = _tokenizer((*TILES, "<end_of_utterance>"))
    Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer, image_seq_len=4, chat_template=TEMPLATE,
    ).save_pretrained(directory)  # fmt: skip
    config = Idefics3Config(
        vision_config=dict(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=16,
            patch_size=4, initializer_range=0.2,
        ),
        text_config=LlamaConfig(**_text(tokenizer)), image_token_id=2, scale_factor=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    Idefics3ForConditionalGeneration(config).save_pretrained(directory)
    return directory
