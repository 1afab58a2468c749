"""A random model of two layers with a character tokenizer, as a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path

CHARACTERS = ("<pad>", "<eos>", *"0123456789", *"abcdefghijklmnopqrstuvwxyz", *" .:>")
CONTEXT = 48


def write_tiny_model(
    directory: Path, seed: int = 0, *, tied: bool = True, experts: int = 0, context: int = CONTEXT
) -> Path:
    """experts: in each layer, two of them for a token; 0 is a dense model."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

    torch.manual_seed(seed)
    kind = Qwen3MoeConfig if experts else Qwen3Config
    extra = dict(num_experts=experts, num_experts_per_tok=2, moe_intermediate_size=16) if experts else {}
    config = kind(
        vocab_size=len(CHARACTERS), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=context, tie_word_embeddings=tied,
        pad_token_id=0, eos_token_id=1, bos_token_id=None, initializer_range=0.3, **extra,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}:{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory
