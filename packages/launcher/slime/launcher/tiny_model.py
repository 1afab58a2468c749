"""A model of two layers with a character tokenizer, small enough to train from scratch on a CPU in a minute.

Its files are written directly: transformers' model classes take seconds to import, more than the rest of a run's start.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from slime.converters.files.safetensors_dir import disk_errors
from slime.types.directories import usual_mode, whole_directory
from slime.types.errors import InvalidSetting

SPECIAL = ("<pad>", "<eos>")
PAD, EOS = range(len(SPECIAL))
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 128, 2, 4, 2, 16
INITIALIZER_RANGE = 0.02


def write_model(directory: Path, characters: Iterable[str], seed: int, chat_template: str | None = None) -> Path:
    """Writes a randomly initialised Qwen3 of some 76,000 parameters in float32 as a Hugging Face directory.

    characters: the tokenizer's vocabulary besides <pad> and <eos>, ASCII, one token each.
    """
    from safetensors.numpy import save_file

    vocabulary = [*SPECIAL, *characters]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32",
        "vocab_size": len(vocabulary), "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM, "max_position_embeddings": 64, "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False, "pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None,
    }  # fmt: skip
    # pad_token etc. are what makes the two special: `skip_special_tokens` leaves them out.
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": SPECIAL[PAD], "eos_token": SPECIAL[EOS],
        "padding_side": "left", "clean_up_tokenization_spaces": False,
    }  # fmt: skip
    with disk_errors(directory), whole_directory(directory, "slime-quickstart", field="--output-dir") as partial:
        _write_json(partial / "config.json", config)
        _write_json(partial / "generation_config.json", {"pad_token_id": PAD, "eos_token_id": EOS})
        _write_json(partial / "tokenizer_config.json", tokenizer_config)
        (partial / "tokenizer.json").write_text(_tokenizer(vocabulary))
        if chat_template is not None:
            (partial / "chat_template.jinja").write_text(chat_template)
        weights = partial / "model.safetensors"
        save_file(_weights(len(vocabulary), seed), weights, metadata={"format": "pt"})
        # safetensors creates files that only their owner may read.
        weights.chmod(usual_mode(partial, of_file=True))
    return directory


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _tokenizer(vocabulary: list[str]) -> str:
    """A byte-level BPE without merges, the kind that llama.cpp reads, too. What it does not know becomes <pad>."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokens = [*SPECIAL, *(_byte_token(bytes_of, character) for character in vocabulary[len(SPECIAL) :])]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token=SPECIAL[PAD]))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = bytes_of
    return str(tokenizer.to_str(pretty=True))


def _byte_token(bytes_of: Any, character: str) -> str:
    """Returns how a byte-level BPE spells a character of one byte: itself, but for white space and the like."""
    ((token, _),) = bytes_of.pre_tokenize_str(character)
    if len(token) != 1:
        raise InvalidSetting.must_be("characters", "ASCII characters", got=character)
    return str(token)


def _weights(vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    """Matrices normal with a deviation of 0.02, as transformers initialises them; norms are 1, the row of <pad> 0."""
    generator = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, np.float32) * np.float32(INITIALIZER_RANGE)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float32)

    embedding = normal(vocab_size, HIDDEN)
    embedding[PAD] = 0
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": normal(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.self_attn.q_norm.weight": ones(HEAD_DIM),
            f"{prefix}.self_attn.k_norm.weight": ones(HEAD_DIM),
            f"{prefix}.post_attention_layernorm.weight": ones(HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(INTERMEDIATE, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(HIDDEN, INTERMEDIATE),
        }
    return weights | {"lm_head.weight": normal(vocab_size, HIDDEN)}
