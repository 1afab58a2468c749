"""A model of two layers that learns to write digits backwards: "407>" becomes "704"."""

from __future__ import annotations

import argparse
import itertools
import random
from pathlib import Path

from slime.launcher.quickstart.rows import write_rows
from slime.types import Sample
from slime.types.directories import whole_directory

DIGITS = 3
HELD_OUT = 64
CHARACTERS = ("<pad>", "<eos>", *"0123456789", ">")


def write_data(directory: Path, seed: int) -> tuple[Path, Path]:
    """Writes train.jsonl and held_out.jsonl, disjoint, shuffled by `seed`; returns their paths."""
    numbers = ["".join(digits) for digits in itertools.product("0123456789", repeat=DIGITS)]
    random.Random(seed).shuffle(numbers)
    paths = directory / "train.jsonl", directory / "held_out.jsonl"
    for path, part in zip(paths, (numbers[HELD_OUT:], numbers[:HELD_OUT]), strict=True):
        write_rows(path, ({"prompt": f"{n}>", "label": n[::-1]} for n in part))
    return paths


def write_model(directory: Path, seed: int) -> Path:
    """Writes a randomly initialised Qwen3 of some 76,000 parameters and its character tokenizer as a HF directory."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(CHARACTERS), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(CHARACTERS)}, unk_token="<pad>"))
    core.decoder = decoders.Fuse()
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    with whole_directory(directory, "slime-quickstart", field="--output-dir") as partial:
        Qwen3ForCausalLM(config).save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return directory


async def reward(args: argparse.Namespace, sample: Sample, **kwargs: object) -> float:
    """1 for the answer and then EOS, otherwise half the fraction of positions (EOS included) that are right.

    The partial credit is what gives a random model a gradient: it is exactly right once in 28,561 tries.
    """
    answer = [*sample.label, "<eos>"]
    ended = sample.status is Sample.Status.COMPLETED
    response = [*sample.response, *(["<eos>"] if ended else [])]
    if response == answer:
        return 1.0
    right = sum(a == b for a, b in zip(response, answer, strict=False))
    return 0.5 * right / len(answer)
