"""A model of two layers with a character tokenizer, small enough to train from scratch on a CPU in a minute."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from slime.types.directories import whole_directory

SPECIAL = ("<pad>", "<eos>")


def write_model(directory: Path, characters: Iterable[str], seed: int, chat_template: str | None = None) -> Path:
    """Writes a randomly initialised Qwen3 of some 76,000 parameters as a Hugging Face directory.

    characters: the tokenizer's vocabulary besides <pad> and <eos>, one token each.
    """
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    vocabulary = [*SPECIAL, *characters]
    config = Qwen3Config(
        vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(vocabulary)}, unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = chat_template
    with whole_directory(directory, "slime-quickstart", field="--output-dir") as partial:
        Qwen3ForCausalLM(config).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return directory
