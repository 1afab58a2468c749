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


def write_qwen2_vl(directory: Path, seed: int = 0) -> Path:
    """An image has a token for each 8 by 8 of its pixels, and positions by row and column."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    sees = dict(embed_dim=32, hidden_size=32, mlp_ratio=2)
    return _write_qwen(directory, seed, Qwen2VLConfig, Qwen2VLForConditionalGeneration, sees)


def write_qwen2_5_vl(directory: Path, seed: int = 0) -> Path:
    """Writes a model like that of `write_qwen2_vl`, but a layer sees windows of 8 by 8 pixels."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sees = dict(hidden_size=32, intermediate_size=64, out_hidden_size=32, window_size=8, fullatt_block_indexes=[1])
    return _write_qwen(directory, seed, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, sees)


def write_qwen3_vl(directory: Path, seed: int = 0) -> Path:
    """Writes a model like that of `write_qwen2_vl`, whose first two layers see images too."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    sees = dict(hidden_size=32, intermediate_size=64, out_hidden_size=32, num_position_embeddings=9)
    sees |= dict(deepstack_visual_indexes=[0, 1])
    return _write_qwen(directory, seed, Qwen3VLConfig, Qwen3VLForConditionalGeneration, sees, head_dim=16)


def write_qwen3_5(directory: Path, seed: int = 0) -> Path:
    """Writes a model like that of `write_qwen2_vl`, with a gated delta net in the first layer."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    sees = dict(hidden_size=32, intermediate_size=64, out_hidden_size=32, num_position_embeddings=9)
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    gated = dict(
        rope_parameters=rope, head_dim=16, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
    )  # fmt: skip
    return _write_qwen(directory, seed, Qwen3_5Config, Qwen3_5ForConditionalGeneration, sees, **gated)


def _write_qwen(directory: Path, seed: int, config: Any, model: Any, sees: dict[str, Any], **text: Any) -> Path:
    import torch
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = _tokenizer(())
    tokenizer.save_pretrained(directory)
    Qwen2VLImageProcessorPil(
        size={"shortest_edge": 64, "longest_edge": 1024}, patch_size=4, merge_size=2
    ).save_pretrained(directory)
    made = config(
        vision_config=sees | dict(depth=2, num_heads=2, patch_size=4, initializer_range=0.2),
        text_config=_text(tokenizer)
        | dict(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}) | text,
        image_token_id=2, video_token_id=0, vision_start_token_id=0, vision_end_token_id=0,
    )  # fmt: skip
    torch.manual_seed(seed)
    model(made).save_pretrained(directory)
    return directory
