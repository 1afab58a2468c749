"""Loads a model and its tokenizer from a Hugging Face directory."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from slime.rollout.engines.embedded.model.routing import RoutingRecorder
from slime.rollout.engines.embedded.options import EmbeddedOptions
from slime.rollout.prompts.media import Media
from slime.types.errors import InvalidFile, MissingFile, counted
from slime.types.models.vision import Vision, vision_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")


@dataclass
class Loaded:
    """A model with its tokenizer. vocab_size: rows of the model's embedding. eos_ids: tokens that end a response."""

    model: Any
    tokenizer: Any
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    vision: Vision | None = None
    routing: RoutingRecorder | None = None
    media: Callable[[], Media] | None = None
    """Returns the processor of a model that reads images; loads it on the first call."""


def check_directory(path: str) -> None:
    """Raises MissingFile for a missing directory, InvalidFile for a missing or invalid file; reads no weights."""
    directory = Path(path)
    if not directory.is_dir():
        raise MissingFile(f"--model-path: no such directory {path}", field="--model-path", value=path)
    for what, names in (("config.json", ("config.json",)), ("weights", WEIGHT_FILES), ("tokenizer", TOKENIZER_FILES)):
        if not any((directory / name).is_file() for name in names):
            raise InvalidFile(
                f"--model-path: {path} has no {what}: expected {' or '.join(names)}",
                field="--model-path", value=path, expected=" or ".join(names),
            )  # fmt: skip
    try:
        json.loads((directory / "config.json").read_text())
    except ValueError as error:
        raise InvalidFile(f"--model-path: {path}/config.json: {error}", field="--model-path", value=path) from None


def load(options: EmbeddedOptions) -> Loaded:
    """Loads the model and the tokenizer of `--model-path`. Raises MissingFile, InvalidFile."""
    check_directory(options.model_path)
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    try:
        config = AutoConfig.from_pretrained(options.model_path)
        tokenizer = AutoTokenizer.from_pretrained(options.model_path, padding_side="left")
        device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        dtype = getattr(torch, options.dtype) if options.dtype != "auto" else config.dtype or torch.float32
        vision = vision_of(config.to_dict())
        kind = AutoModelForCausalLM if vision is None else AutoModelForImageTextToText
        model, info = kind.from_pretrained(
            options.model_path, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidFile(
            f"--model-path: {options.model_path} does not load: {error}", field="--model-path", value=options.model_path
        ) from error
    if missing := sorted(info["missing_keys"]):
        others = counted(len(missing) - 1, "other")
        raise InvalidFile(
            f"--model-path: {options.model_path} has no weights for {missing[0]} and {others}",
            field="--model-path", value=options.model_path, expected=f"a tensor {missing[0]}",
        )  # fmt: skip
    model = model.to(device).eval().requires_grad_(False)
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None) or 1 << 20
    return Loaded(
        model=model,
        tokenizer=tokenizer,
        vocab_size=model.get_input_embeddings().num_embeddings,
        context_length=min(limit, options.context_length or limit),
        eos_ids=_eos_ids(model, tokenizer),
        vision=vision,
        routing=RoutingRecorder(model) if options.enable_return_routed_experts else None,
        media=None if vision is None else functools.cache(lambda: Media(options.model_path, "--model-path")),
    )


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (
        model.generation_config.eos_token_id,
        model.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        ids.update(source if isinstance(source, (list, tuple)) else [] if source is None else [source])
    return frozenset(ids)


def free_cached_memory() -> None:
    """Releases CUDA's cached blocks for other processes on the GPU; does nothing on a CPU."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
