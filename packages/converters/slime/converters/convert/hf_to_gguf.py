"""Converts a Hugging Face directory into a GGUF file, llama.cpp's format, in the data type of its weights.

The `gguf` package has the format and the names of tensors; here are the layout of each architecture and of tokenizers
by byte-level BPE, which all of these models have.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.converters.families import config_json, find_family, read_config
from slime.converters.files.safetensors_dir import SafetensorsDir, disk_errors
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable, counted, errors_name
from slime.types.files import check_own_file, no_directory
from slime.types.scratch import ScratchDirectory

if TYPE_CHECKING:
    import torch

# model_type of config.json -> (llama.cpp's name of the architecture, whether it rotates neighbouring pairs of a head)
ARCHITECTURES: Mapping[str, tuple[str, bool]] = {
    "llama": ("llama", True),
    "qwen2": ("qwen2", False),
    "qwen3": ("qwen3", False),
}
# Keys of config.json without which nothing can be written.
REQUIRED = (
    "num_hidden_layers", "max_position_embeddings", "hidden_size", "intermediate_size", "num_attention_heads",
    "vocab_size",
)  # fmt: skip
# Where config.json has no such key, transformers' classes of these models have these values.
RMS_NORM_EPS = 1e-6
HEAD_DIM = {"qwen3": 128}
# Two NUL bytes as byte-level BPE spells them.
NO_MERGE = "\u0100 \u0100"
LAST_OF_ASCII = "\x7f"
# llama.cpp knows pre-tokenizers by name: parts of the regular expression in tokenizer.json identify them.
PRE_TOKENIZERS = (("\\p{N}{1,3}", "llama-bpe"), ("]?\\p{L}+|\\p{N}| ?", "qwen2"))

Progress = Callable[[str], None]


def convert(
    hf_checkpoint: str | Path, output: str | Path, *,
    progress: Progress = lambda text: None, argument: str = "--hf-checkpoint",
) -> Path:  # fmt: skip
    """Writes the file `output`, which appears complete or not at all; returns it. The weights are in memory meanwhile.

    argument: the argument of a command that errors about the model name.
    Raises MissingFile, InvalidFile, NotAvailable for another architecture, tokenizer or scaling of positions,
    InvalidSetting for an `output` that is something else than a GGUF file, OutOfSpace.
    """
    source, target = Path(hf_checkpoint), Path(output)
    check_own_file(target, b"GGUF", "GGUF file", field="--output")
    if not target.parent.is_dir():
        raise InvalidSetting.must_be("--output", "a file in a directory that exists", got=str(target))
    if not source.is_dir():
        raise no_directory(source, argument)
    with errors_name(argument):
        config = read_config(source)
        architecture, rotates_pairs = _architecture(config)
        for key in REQUIRED:
            config_json.required(config, key)
        tokenizer = _tokenizer(source)
        weights = _checked_weights(source, config)

    import gguf

    names = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config["num_hidden_layers"]
    )
    # The next conversion to this file removes what a killed one leaves.
    with disk_errors(target), closing(ScratchDirectory(f".{target.name}.", str(target.parent))) as scratch:
        partial = scratch.path / target.name
        writer = gguf.GGUFWriter(partial, architecture)
        _add_model(writer, source.resolve().name, config)
        _add_tokenizer(writer, source, config, tokenizer)
        progress(f"writing {counted(len(weights.tensors), 'tensor')} of a {architecture}")
        for name, tensor in _tensors(weights, config, rotates_pairs):
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if known is None:
                raise InvalidFile(f"{source}: llama.cpp's {architecture} has no tensor {name}", value=name)
            _add_tensor(writer, gguf, known, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(partial, target)
    progress(f"wrote {target}")
    return target


def _checked_weights(source: Path, config: Mapping[str, Any]) -> SafetensorsDir:
    """Returns the weights, whose names, shapes and dtypes fit config.json. Raises MissingFile, InvalidFile."""
    # Imports torch, which the checks before need not wait for.
    from slime.converters.convert.hf_source import HfSource

    family, held = find_family(config), HfSource(source, config)
    held.check(family.parameters(config), family.ignored(config))
    return held.weights


def _architecture(config: Mapping[str, Any]) -> tuple[str, bool]:
    kind = str(config.get("model_type"))
    if kind not in ARCHITECTURES:
        raise NotAvailable.unavailable(f"GGUF of a model_type {kind!r}", f"known are {', '.join(ARCHITECTURES)}")
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling != "default":
        raise NotAvailable.unavailable(
            "GGUF of this model", f"its positions are scaled ({scaling}); llama.cpp's convert_hf_to_gguf.py writes it"
        )
    return ARCHITECTURES[kind]


def _add_model(writer: Any, name: str, config: Mapping[str, Any]) -> None:
    head_dim = config_json.head_dim(config, HEAD_DIM.get(config["model_type"]))
    writer.add_name(name)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config_json.query_groups(config))
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(RMS_NORM_EPS if config.get("rms_norm_eps") is None else config["rms_norm_eps"])
    writer.add_rope_freq_base(float(config_json.rope(config)["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])


def _tokenizer(source: Path) -> dict[str, Any]:
    """Returns tokenizer.json with `pre_name`, llama.cpp's name of its pre-tokenizer. Raises NotAvailable."""
    path = source / "tokenizer.json"
    try:
        tokenizer: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidFile(f"{path}: {error}", value=str(path), expected="the tokenizer of a model") from None
    tokenizer = _by_bytes(tokenizer)
    pre = json.dumps(tokenizer.get("pre_tokenizer"), ensure_ascii=False)
    kind = tokenizer.get("model", {}).get("type")
    if kind != "BPE" or '"ByteLevel"' not in pre:
        raise NotAvailable.unavailable(
            "GGUF of this model", f"its tokenizer ({kind}) is not a byte-level BPE, which llama.cpp needs here",
            "llama.cpp's convert_hf_to_gguf.py, which knows others",
        )  # fmt: skip
    patterns = re.findall(r'"Regex": "((?:[^"\\]|\\.)*)"', pre)
    text = json.loads(f'"{"".join(patterns)}"')
    known = next((name for part, name in PRE_TOKENIZERS if part in text), None)
    if known is None and not text:
        known = "smollm" if '"Digits"' in pre else "gpt-2"
    if known is None:
        raise NotAvailable.unavailable("GGUF of this model", f"llama.cpp has no name for its pre-tokenizer: {text}")
    return tokenizer | {"pre_name": known}


def _by_bytes(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Turns a tokenizer with one token for each ASCII character, as small models of slime had, into the byte-level BPE
    without merges that gives the same tokens. Returns others as they are."""
    model, pre = tokenizer.get("model") or {}, tokenizer.get("pre_tokenizer") or {}
    by_character = pre.get("type") == "Split" and pre.get("pattern") == {"Regex": "."} and not pre.get("invert")
    if model.get("type") != "WordLevel" or not by_character or pre.get("behavior") != "Isolated":
        return tokenizer
    added = {token["content"] for token in tokenizer.get("added_tokens", ())}
    if any(token not in added and (len(token) != 1 or token >= LAST_OF_ASCII) for token in model["vocab"]):
        return tokenizer
    # Byte-level BPE spells white space and control characters by letters beyond those of one byte.
    vocabulary = {
        token if token in added or token > " " else chr(256 + ord(token)): number
        for token, number in model["vocab"].items()
    }
    return tokenizer | {
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        "pre_tokenizer": {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False, "trim_offsets": True},
    }


def _add_tokenizer(writer: Any, source: Path, config: Mapping[str, Any], tokenizer: Mapping[str, Any]) -> None:
    from gguf import TokenType

    vocabulary = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    kinds = dict.fromkeys(vocabulary, TokenType.NORMAL)
    for added in tokenizer.get("added_tokens", ()):
        vocabulary[added["id"]] = added["content"]
        kinds[added["id"]] = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
    size = config["vocab_size"]
    # GGUF has no empty lists, and llama.cpp wants this one. It takes such a pair apart again: no token is spelled so.
    merges = tokenizer["model"]["merges"] or [NO_MERGE]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer["pre_name"])
    # The embedding may have more rows than the tokenizer has tokens.
    writer.add_token_list([vocabulary.get(number, f"[PAD{number}]") for number in range(size)])
    writer.add_token_types([kinds.get(number, TokenType.UNUSED) for number in range(size)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])

    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(source)
    for name in ("bos", "eos", "unk", "pad"):
        number = getattr(loaded, f"{name}_token_id")
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    if isinstance(loaded.chat_template, str):
        writer.add_chat_template(loaded.chat_template)


def _tensors(
    weights: SafetensorsDir, config: Mapping[str, Any], rotates_pairs: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    heads = {"q_proj": config["num_attention_heads"]}
    heads["k_proj"] = config.get("num_key_value_heads") or heads["q_proj"]
    for name in sorted(weights.tensors):
        tensor = weights.load(name)
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        part = name.split(".")[-2]
        if rotates_pairs and part in heads:
            # transformers rotates the two halves of a head, llama.cpp neighbouring pairs.
            tensor = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
        yield name, tensor.contiguous()


def _add_tensor(writer: Any, gguf: Any, name: str, tensor: torch.Tensor) -> None:
    import torch

    # llama.cpp computes norms and biases in float32.
    if tensor.ndim == 1 or tensor.dtype == torch.float32:
        writer.add_tensor(name, tensor.float().numpy())
    elif tensor.dtype == torch.bfloat16:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, tensor.view(torch.uint8).numpy(), raw_dtype=kind)
    else:
        writer.add_tensor(name, tensor.half().numpy())
