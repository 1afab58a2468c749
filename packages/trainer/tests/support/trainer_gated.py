"""Models with gated attention and gated delta nets of a few thousand parameters: Qwen3-Next and Qwen3.5."""

from pathlib import Path
from typing import Any

import torch
from trainer_tiny import VOCAB

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4, "max_position_embeddings": 256,
    "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 12,
}  # fmt: skip
_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
# Names of configurations, and whether the model has experts, and reads images.
KINDS = {
    "Qwen3NextConfig": (True, False),
    "Qwen3_5TextConfig": (False, False),
    "Qwen3_5MoeTextConfig": (True, False),
    "Qwen3_5Config": (False, True),
    "Qwen3_5MoeConfig": (True, True),
}


def write_gated_model(path: Path, kind: str, seed: int = 0, **values: Any) -> str:
    """A Hugging Face directory. Layers 1 to 3 are gated delta nets; norms and biases are random, too."""
    import transformers
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    experts, images = KINDS[kind]
    text = _TEXT | (_EXPERTS if experts else {}) | values
    config_class = getattr(transformers, kind)
    config = config_class(text_config=text, vision_config=_VISION) if images else config_class(**text)
    torch.manual_seed(seed)
    model = (AutoModelForImageTextToText if images else AutoModelForCausalLM).from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "dt_bias" in name or "gate.weight" in name:
            parameter.data += 0.3 * torch.randn_like(parameter)
        if "conv1d" in name:
            parameter.data += 0.5
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text("{}")
    return str(path)
