"""This rank's parts of the tensors of a Hugging Face checkpoint: read into a model, and given out of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from slime.converters.convert.hf_source import HfSource
from slime.converters.families import find_family
from slime.converters.families.mapping import Parameter, Slice, copy
from slime.converters.files.rectangles import Index, Shape
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.converters.megatron.args import padded_vocab_size
from slime.trainer.backends.megatron.model.names import EMBEDDING, parameter_names, unwrapped
from slime.types.errors import InvalidFile

Chunks = Sequence[torch.nn.Module]
Config = Mapping[str, Any]
OUTPUT = "output_layer.weight"
# Set in the config of a critic: no model has this key.
_VALUE_HEAD = "slime_value_head"


def config_of_critic(config: Config) -> dict[str, Any]:
    """Returns the config of the same model with one value for each token in place of logits."""
    return {**config, "tie_word_embeddings": False, _VALUE_HEAD: True}


def has_value_head(config: Config) -> bool:
    return bool(config.get(_VALUE_HEAD))


def table(args: Mapping[str, Any], config: Config) -> dict[str, Parameter]:
    """Returns the parameters of the whole model that `args` describe, by name."""
    mtp = bool(args.get("mtp_num_layers"))
    parameters = find_family(config).parameters(config)
    found = {parameter.name: parameter for parameter in parameters if mtp or not parameter.name.startswith("mtp.")}
    if has_value_head(config):
        (block,) = found[OUTPUT].blocks
        found[OUTPUT] = copy(OUTPUT, block.name, (1, block.shape[1]))
    return found


def hf_shapes(args: Mapping[str, Any], config: Config) -> dict[str, Shape]:
    """Returns name and shape of every Hugging Face tensor that the parameters make, in the order of layers."""
    return {block.name: block.shape for parameter in table(args, config).values() for block in parameter.blocks}


def load_hf(chunks: Chunks, args: Mapping[str, Any], config: Config, hf_dir: str | Path) -> None:
    """Copies what this rank holds from the safetensors of `hf_dir`, slice by slice, converted to the model's dtypes.

    Rows of padding become zeros, and so does a value head if `hf_dir` has none; fp8 and int4 are converted back. Raises
    MissingFile, and InvalidFile naming the tensors that are missing, unexpected or of another shape.
    """
    parameters = table(args, config)
    rows = padded_vocab_size(args)
    source = HfSource(hf_dir, config)
    try:
        left_out = [re.escape(name) for name in hf_names_left_out(args, config)]
        without_head = has_value_head(config) and not _has_head(source, parameters[OUTPUT])
        if without_head:
            left_out += [re.escape(block.name) for block in parameters.pop(OUTPUT).blocks]
        source.check(parameters.values(), [*find_family(config).ignored(config), *left_out])
        for name, tensor in parameter_names(chunks):
            if name == OUTPUT and without_head:
                tensor.detach().zero_()
                continue
            parameter = _described(parameters, name)
            rank, size = _place(parameter, tensor)
            _check_shape(parameter, tensor, parameter.local_shape(size, rows))
            target = tensor.detach()
            if parameter.padded:
                target.zero_()
            for piece in parameter.slices(rank, size, rows):
                _read(source, piece, target[piece.index])
    finally:
        source.close()


def _has_head(source: HfSource, head: Parameter) -> bool:
    """Tells a critic's output layer from that of a language model."""
    tensors = source.tensors
    return all(block.name in tensors and tensors[block.name].shape == block.shape for block in head.blocks)


def hf_names_left_out(args: Mapping[str, Any], config: Config) -> list[str]:
    """Returns the names of the family's tensors that `args` leave out of the model: multi-token-prediction layers."""
    held = table(args, config)
    others = (parameter for parameter in find_family(config).parameters(config) if parameter.name not in held)
    return [block.name for parameter in others for block in parameter.blocks]


def hf_names_untrained(hf_dir: str | Path, config: Config) -> list[str]:
    """Returns the names of the tensors in `hf_dir` that are the model's and that no Megatron parameter is made of."""
    family = find_family(config)
    if not family.untrained:
        return []
    made = {block.name for parameter in family.parameters(config) for block in parameter.blocks}
    names = (name for name in SafetensorsDir(hf_dir).tensors if name not in made)
    return [name for name in names if any(re.fullmatch(pattern, name) for pattern in family.untrained)]


def _read(source: HfSource, piece: Slice, target: Tensor) -> None:
    if not target.is_cuda:
        source.read(piece.hf_name, piece.hf_index, target)
        return
    staged = torch.empty(target.shape, dtype=target.dtype)
    source.read(piece.hf_name, piece.hf_index, staged)
    target.copy_(staged)


def _check_shape(parameter: Parameter, tensor: Tensor, expected: Shape) -> None:
    if tuple(tensor.shape) != expected:
        raise InvalidFile(
            f"{parameter.name}: the model has {list(tensor.shape)}, config.json describes {list(expected)}",
            field=parameter.name,
            value=list(tensor.shape),
            expected=str(list(expected)),
        )


def _described(parameters: Mapping[str, Parameter], name: str) -> Parameter:
    if name not in parameters:
        raise InvalidFile(f"{name}: the model has it, config.json does not describe it", field=name)
    return parameters[name]


def _place(parameter: Parameter, tensor: Tensor) -> tuple[int, int]:
    """Returns (rank, size) of the group that shares the parameter; a copy on every rank is (0, 1)."""
    if parameter.is_expert:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    else:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    # Transformer Engine keeps the down projections of latent attention whole.
    whole = parameter.split is None or (size > 1 and not parameter.padded and tuple(tensor.shape) == parameter.shape)
    return (0, 1) if whole else (rank, size)


def export_slices(
    chunks: Chunks, args: Mapping[str, Any], config: Config, of: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Shape, Index, Tensor]]:
    """Yields (Hugging Face name, its shape, the part of it, that part): what this rank has to give, views of its
    parameters.

    Of ranks that hold the same, one gives it: all ranks together give every element once. of: what to give in place of
    a parameter, of its shape (its gradient, say).
    """
    parameters = table(args, config)
    rows = padded_vocab_size(args)
    for chunk in chunks:
        first_stage = unwrapped(chunk).pre_process
        for name, tensor in parameter_names([chunk]):
            parameter = _described(parameters, name)
            if (name == EMBEDDING and not first_stage) or not _gives(parameter, tensor):
                continue
            rank, size = _place(parameter, tensor)
            for piece in parameter.slices(rank, size, rows):
                yield piece.hf_name, piece.hf_shape, piece.hf_index, of(tensor).detach()[piece.index]


def _gives(parameter: Parameter, tensor: Tensor) -> bool:
    copied = _place(parameter, tensor) == (0, 1)
    if parameter.is_expert:
        first = parallel_state.get_expert_data_parallel_rank() == 0
        return first and (not copied or parallel_state.get_expert_tensor_parallel_rank() == 0)
    first = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    return first and (not copied or parallel_state.get_tensor_model_parallel_rank() == 0)
