"""Models of a few thousand parameters that read images, and samples for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from slime.types import Sample

VOCAB, IMAGE = 32, 2
# Tokens that a tile, or an image of another model, becomes.
TOKENS = 4
GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")


def write_vision_model(path: Path, kind: str, seed: int = 0, *, layers: int = 2, tied: bool = False) -> str:
    """layers: of the language model."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    text: dict[str, Any] = dict(
        model_type="llama", vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.3,
        pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    # More layers than the language model has.
    sees: dict[str, Any] = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16,
        initializer_range=0.3,
    )  # fmt: skip
    own: dict[str, Any]
    if kind == "llava":
        own = dict(
            vision_config=sees | dict(model_type="clip_vision_model", patch_size=8, projection_dim=16),
            vision_feature_layer=-2, vision_feature_select_strategy="default",
        )  # fmt: skip
    elif kind in GRIDS:
        text |= dict(
            model_type=f"{kind}_text",
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        )
        sees = dict(model_type=f"{kind}_vision", depth=3, num_heads=2, patch_size=4, initializer_range=0.3)
        if kind == "qwen2_vl":
            sees |= dict(embed_dim=32, hidden_size=32, mlp_ratio=2)
        elif kind == "qwen2_5_vl":
            sees |= dict(hidden_size=32, intermediate_size=64, out_hidden_size=32, window_size=8)
            sees |= dict(fullatt_block_indexes=[1])
        elif kind == "qwen3_5":
            text |= _gated(layers)
            sees |= dict(hidden_size=32, intermediate_size=64, out_hidden_size=32, num_position_embeddings=9)
        else:
            # Positions of images are interpolated between those of a grid of 3 x 3.
            sees |= dict(hidden_size=32, intermediate_size=64, out_hidden_size=32, num_position_embeddings=9)
            sees |= dict(deepstack_visual_indexes=[0, 1])
        own = dict(vision_config=sees, video_token_id=VOCAB - 1, vision_start_token_id=0, vision_end_token_id=0)
    else:
        own = dict(vision_config=sees | dict(model_type=f"{kind}_vision", patch_size=4), scale_factor=2, pad_token_id=0)
    if tied:
        own["tie_word_embeddings"] = True
    config = AutoConfig.for_model(kind, text_config=text, image_token_id=IMAGE, **own)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    for name, parameter in model.named_parameters() if kind == "qwen3_5" else ():
        if "norm" in name or "dt_bias" in name or "conv1d" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)


def _gated(layers: int) -> dict[str, Any]:
    """Every second layer has attention, whose positions rotate half of each head: time, height, width and time."""
    kinds = ["linear_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    return dict(
        head_dim=16, layer_types=[kinds[number % 2] for number in range(layers)], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
        rope_parameters=rope,
    )  # fmt: skip


def make_image_samples(kind: str, groups: int = 4, size: int = 2) -> list[Sample]:
    """Groups of one prompt: of one image, of two, of the first's tokens with another image, and of text alone."""
    random = np.random.default_rng(7)
    samples: list[Sample] = []
    for group in range(groups):
        count = (1, 2, 1, 0)[group % 4]
        prompt = [5, *[*[IMAGE] * TOKENS, 8] * count, 6, 7]
        pixels = random.normal(size=(count, 3, 16, 16)).astype(np.float32)
        inputs: dict[str, Any] = {"pixel_values": pixels}
        if kind in GRIDS:
            # A square of tokens, then a row of them.
            sizes = np.array([[1, 4, 4], [1, 2, 8]][:count], np.int64).reshape(-1, 3)
            patches = random.normal(size=(int(sizes.prod(1).sum()), 3 * 2 * 4 * 4)).astype(np.float32)
            inputs = {"pixel_values": patches, "image_grid_thw": sizes}
        elif kind != "llava":
            inputs["pixel_attention_mask"] = np.ones((count, 16, 16), np.int64)
        for member in range(size):
            response = random.integers(3, VOCAB, 4)
            samples.append(
                Sample(
                    index=len(samples), group_index=group, tokens=[*prompt, *response], response_length=4,
                    reward=float(member), rollout_log_probs=np.full(4, -3.0, np.float32),
                    multimodal_inputs={"image": [b"encoded"] * count} if count else None,
                    multimodal_train_inputs=inputs if count else None,
                    multimodal_train_input_id=f"images of {group}" if count else None,
                )
            )  # fmt: skip
    return samples
