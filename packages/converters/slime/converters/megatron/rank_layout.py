"""Megatron's parallel layout: the sizes of groups, the place of each rank, and the layers of each pipeline stage.

All of it follows from Megatron's arguments, without torch. Ranks count up along tensor, context, data and pipeline
parallelism, in this order; for the experts, along expert tensor, expert, expert data and pipeline parallelism.

Everything that lays out ranks uses this module, so the checks before a run, the dry run, the trainer and the converters
refuse a layout in the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slime.converters.families.mapping import Parameter
from slime.types.errors import InvalidField, InvalidSetting, NotAvailable, counted
from slime.types.setting_values import flag_name

Args = Mapping[str, Any]

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
CONTEXT = "context_parallel_size"
EXPERT, EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
LAYERS_PER_VIRTUAL, VIRTUAL = "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
PLACEHOLDERS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
RANKS = "--actor-num-nodes x --actor-num-gpus-per-node"


@dataclass(frozen=True)
class Sizes:
    """Sizes of the parallel groups.

    expert_data: the ranks that hold copies of the same experts; virtual: pipeline stages of one rank, 1 without
    interleaving.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    expert_data: int = 1
    virtual: int = 1

    @property
    def ranks(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def coordinates(self, rank: int) -> Coordinates:
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        rest, expert_tensor = divmod(rank, self.expert_tensor)
        rest, expert = divmod(rest, self.expert)
        expert_data = rest % self.expert_data
        return Coordinates(tensor, pipeline, context, data, expert, expert_tensor, expert_data)


@dataclass(frozen=True)
class Coordinates:
    """The place of one rank in each of its groups, counted from 0."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int


def ranks_needed(args: Args) -> int:
    """Returns the smallest number of ranks that the parallel sizes fit on."""
    return math.lcm(*(math.prod(_size(args, name) for name in group) for group in _groups(args)))


def check_ranks(args: Args, ranks: int) -> None:
    """Raises InvalidSetting unless `ranks` trainer ranks divide into the parallel groups."""
    for group in _groups(args):
        sizes = {flag_name(name): _size(args, name) for name in group}
        product = math.prod(sizes.values())
        if ranks % product:
            factors = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
            words = factors if factors.endswith(f" {product}") else f"{factors} = {product}"
            raise InvalidSetting.must_be(RANKS, f"a multiple of {words}", got=ranks)


def check_model_split(args: Args) -> None:
    """Raises InvalidSetting where heads, experts or layers of a model cannot be shared as the sizes say.

    args: Megatron's arguments, the model's and the user's.
    """
    if args.get("num_attention_heads"):
        _check_divisor(args, TENSOR, args["num_attention_heads"], "attention heads")
    if args.get("num_experts"):
        _check_divisor(args, EXPERT, args["num_experts"], "experts")
    elif _size(args, EXPERT) > 1:
        raise InvalidSetting.requires(f"{flag_name(EXPERT)} {_size(args, EXPERT)}", "a model with experts")
    if args.get("num_layers"):
        _places_of_stages(args)
        virtual_stages(args)


def check_parameters(args: Args, parameters: Iterable[Parameter]) -> None:
    """Raises InvalidSetting naming the first parameter that its tensor-parallel ranks cannot share.

    parameters: those of the whole model, those with a padded vocabulary in their padded shape.
    """
    for parameter in parameters:
        name = EXPERT_TENSOR if parameter.is_expert and args.get(EXPERT_TENSOR) is not None else TENSOR
        try:
            parameter.local_shape(_size(args, name))
        except InvalidField as error:
            raise InvalidSetting(
                f"{flag_name(name)} {_size(args, name)}: {error}", field=flag_name(name), value=_size(args, name)
            ) from None


def check_images(args: Args, config: Mapping[str, Any], sizes: Sizes, *, own_model: bool) -> None:
    """Raises where a model that reads images, and perhaps feeds them to its first layers, cannot be laid out as `args`
    say.

    config: the object of config.json. own_model: whether --custom-model-provider-path makes the model.
    """
    kind, fed = config.get("model_type"), len((config.get("vision_config") or {}).get("deepstack_visual_indexes") or ())
    if own_model:
        raise NotAvailable.unavailable(
            f"--custom-model-provider-path with a {kind}", "what reads images is built beside the family's own layers"
        )
    held = len(layers_of_stages(args, sizes)[0][0])
    if held < fed:
        raise InvalidSetting(
            f"{flag_name(PIPELINE)} {sizes.pipeline}: the first pipeline stage has {counted(held, 'layer')}, and the "
            f"first {counted(fed, 'layer')} of a {kind} see images: use {flag_name(FIRST)}, or fewer stages",
            field=flag_name(PIPELINE), value=sizes.pipeline, expected=f"{fed} layers in the first stage",
        )  # fmt: skip


def sizes_of(args: Args, ranks: int) -> Sizes:
    """Returns the sizes of the groups that `ranks` trainer ranks form.

    args: Megatron's arguments, the model's and the user's. Raises InvalidSetting where ranks or model do not divide.
    """
    check_ranks(args, ranks)
    check_model_split(args)
    tensor, pipeline, context = _size(args, TENSOR), _size(args, PIPELINE), _size(args, CONTEXT)
    experts = bool(args.get("num_experts"))
    expert, expert_tensor = (_size(args, EXPERT), _size(args, EXPERT_TENSOR)) if experts else (1, tensor)
    return Sizes(
        tensor,
        pipeline,
        context,
        ranks // (tensor * pipeline * context),
        expert,
        expert_tensor,
        ranks // (expert * expert_tensor * pipeline) if experts else 1,
        virtual_stages(args),
    )


def virtual_stages(args: Args) -> int:
    """Returns the pipeline stages of one rank, 1 without interleaving.

    Raises InvalidSetting where the layers of a stage cannot be cut so.
    """
    layers, virtual = args.get(LAYERS_PER_VIRTUAL), args.get(VIRTUAL)
    if layers is not None and virtual is not None:
        raise InvalidSetting.conflict(
            f"{flag_name(LAYERS_PER_VIRTUAL)} {layers}", f"{flag_name(VIRTUAL)} {virtual}", "they set the same number"
        )
    if layers is None and virtual is None:
        return 1
    name = LAYERS_PER_VIRTUAL if virtual is None else VIRTUAL
    size = int(args[name])
    if _size(args, PIPELINE) == 1:
        raise InvalidSetting.requires(f"{flag_name(name)} {size}", f"{flag_name(PIPELINE)} 2 or more")
    counts = _places_of_stages(args)
    if virtual is None and len(set(counts)) > 1:
        raise InvalidSetting.conflict(
            f"{flag_name(name)} {size}",
            flag_name(FIRST if args.get(FIRST) is not None else LAST),
            f"stages of different lengths take {flag_name(VIRTUAL)}",
        )
    for count in counts:
        if count % size:
            raise InvalidSetting.must_be(
                flag_name(name), f"a divisor of the {count} layers of a pipeline stage", got=size
            )
    return counts[0] // size if virtual is None else size


def layers_of_stages(args: Args, sizes: Sizes) -> list[list[list[int]]]:
    """Returns the numbers of the decoder's layers by [stage][virtual stage].

    Layers go through virtual stage 0 of every stage, then through virtual stage 1.
    """
    places = _places_of_stages(args)
    counts = [count // sizes.virtual for _ in range(sizes.virtual) for count in places]
    counts[0] -= bool(args.get(PLACEHOLDERS[0]))
    counts[-1] -= bool(args.get(PLACEHOLDERS[1]))
    layers: list[list[list[int]]] = [[] for _ in places]
    first = 0
    for number, count in enumerate(counts):
        layers[number % sizes.pipeline].append(list(range(first, first + count)))
        first += count
    return layers


def _size(args: Args, name: str) -> int:
    """Returns a parallel size; the experts' tensor parallelism is that of the rest of the model by default."""
    size = args.get(name)
    if name == EXPERT_TENSOR and size is None:
        size = args.get(TENSOR)
    # A value of a wrong type is refused later, where its setting is read.
    return size if type(size) is int and size > 0 else 1


def _groups(args: Args) -> list[tuple[str, ...]]:
    """Returns the sizes whose products must divide the number of ranks: of the model, and of its experts."""
    experts = bool(args.get("num_experts")) or _size(args, EXPERT) > 1
    return [(TENSOR, PIPELINE, CONTEXT), *([(EXPERT_TENSOR, EXPERT, PIPELINE)] if experts else [])]


def _check_divisor(args: Args, name: str, count: int, noun: str, reason: str = "") -> None:
    if count % _size(args, name):
        expected = f"a divisor of the model's {count} {noun}"
        raise InvalidSetting.must_be(flag_name(name), expected, got=_size(args, name), reason=reason)


def _places_of_stages(args: Args) -> list[int]:
    """Returns the places for layers in each stage; embedding and loss take one each, where they are accounted for."""
    stages, layers = _size(args, PIPELINE), int(args["num_layers"])
    ends = {name: int(args[name]) for name in (FIRST, LAST) if args.get(name) is not None}
    if not ends:
        places = layers + sum(bool(args.get(name)) for name in PLACEHOLDERS)
        noun = "layers" if places == layers else "layers, with those that stand for embedding and loss"
        reason = f"see {flag_name(FIRST)} and {flag_name(LAST)}"
        each = -(-layers // stages)
        last = layers - (stages - 1) * each
        if places == layers and last > 0 and not any(args.get(name) for name in (LAYERS_PER_VIRTUAL, VIRTUAL)):
            reason = f"{flag_name(LAST)} {last} leaves {counted(each, 'layer')} for each of the others"
        _check_divisor(args, PIPELINE, places, noun, reason)
        return [places // stages] * stages
    flags = " and ".join(f"{flag_name(name)} {count}" for name, count in ends.items())
    if stages == 1:
        raise InvalidSetting.requires(flags, f"{flag_name(PIPELINE)} 2 or more")
    rest, other_stages = layers - sum(ends.values()), stages - len(ends)
    if rest < other_stages or rest % max(1, other_stages) or (rest and not other_stages):
        name, count = next(iter(ends.items()))
        raise InvalidSetting(
            f"{flags} of {layers} layers: the other {other_stages} pipeline stages cannot share {rest} layers evenly",
            field=flag_name(name),
            value=count,
            expected=f"{other_stages or 'no'} layers or a multiple left for the other stages",
        )
    middle = [rest // other_stages] * other_stages if other_stages else []
    return [*([ends[FIRST]] if FIRST in ends else []), *middle, *([ends[LAST]] if LAST in ends else [])]
