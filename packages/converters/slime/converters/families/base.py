"""The parts of a model family: a table from Megatron parameters to Hugging Face tensors, and its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slime.converters.families.mapping import Parameter

# The object of a config.json, as transformers 4 or 5 writes it.
Config = Mapping[str, Any]


def ignored_always(config: Config) -> tuple[str, ...]:
    """Returns patterns for any family: rotary frequencies, and copies of a tied output layer."""
    tied = (r"lm_head\.weight",) if config.get("tie_word_embeddings") else ()
    return (r".*rotary_emb\.inv_freq", *tied)


@dataclass(frozen=True)
class Family:
    """A model family: its names in config.json, and the functions that describe its models.

    model_types: the `model_type`s of config.json.
    arguments(config): the model as Megatron's arguments describe it, {"num_layers": 36, "swiglu": True, ...}, by the
        names of attributes of Megatron-LM's `args`; those that keep Megatron's default are left out.
    parameters(config): every parameter of the whole model, embedding first, then layer by layer; a tied output layer
        has none.
    ignored(config): patterns (`re.fullmatch`) of Hugging Face tensors that a checkpoint may hold and Megatron has no
        parameter for (`rotary_emb.inv_freq`, copies of the embedding beside an MTP layer).
    untrained: those of `ignored` that belong to the model all the same, and are written again as they were.
    """

    name: str
    model_types: tuple[str, ...]
    arguments: Callable[[Config], dict[str, Any]]
    parameters: Callable[[Config], Iterator[Parameter]]
    ignored: Callable[[Config], tuple[str, ...]] = ignored_always
    untrained: tuple[str, ...] = ()
