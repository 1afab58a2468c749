"""Keys of Megatron's parameters in a torch_dist checkpoint.

Megatron stacks what is alike: where all layers are of one kind, `decoder.layers.7.mlp.linear_fc2.weight` is row 7 of
the tensor `decoder.layers.mlp.linear_fc2.weight` [num_layers, ...]; where they are not (`moe_layer_freq` is a list, or
above 1, or there is a `linear_attention_freq`), and in MTP layers, each layer keeps keys of its own. Experts are always
stacked, behind their layers. A norm before a linear layer goes by that layer's name, as Transformer Engine fuses the
two:

    decoder.layers.7.input_layernorm.weight      decoder.layers.self_attention.linear_qkv.layer_norm_weight [7]
    ...mlp.experts.local_experts.3.linear_fc1.weight       ...mlp.experts.experts.linear_fc1.weight [layer, 3]

Norms of queries and keys over all heads together (MiniMax-M2) are `q_norm` and `k_norm` in the original.

With multi-latent attention, norms keep their own names in megatron-core's local spec, and Transformer Engine's fuses
those of q and kv with the up projections instead. A tensor therefore has one key that is ours and may have others.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slime.converters.files.rectangles import Shape
from slime.types.errors import InvalidSetting

_LAYER = re.compile(r"(decoder\.layers|mtp\.layers)\.(\d+)\.(.*)")
_ACROSS_HEADS = re.compile(r"(?<=\.self_attention)\.([qk])_layernorm\.")
_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(.*)")
# Modules of megatron-core that save an `_extra_state`, an object of None here: linear layers, and with Transformer
# Engine norms and core attention too.
_HAS_STATE = re.compile(r".*\.(linear_\w+|eh_proj|\w*norm|wq_b|wk|weights_proj)")


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of a parameter: index `lead` of the tensor `key`, of shape `lead_shape` + the parameter's."""

    key: str
    lead: Shape = ()
    lead_shape: Shape = ()


@dataclasses.dataclass(frozen=True)
class Layout:
    """The arguments on which the keys depend.

    stacked: all decoder layers are of one kind, one tensor for all of them.
    latent: multi-latent attention, whose layers keep the names of their norms.
    across_heads: queries and keys have norms over all heads together.
    """

    num_layers: int
    num_experts: int | None
    stacked: bool
    latent: bool
    across_heads: bool = False

    @classmethod
    def of(cls, args: Mapping[str, Any]) -> Layout:
        """Makes a layout from Megatron arguments."""
        frequency = args.get("moe_layer_freq", 1)
        # Delta nets in some of the layers have parameters of their own.
        stacked = isinstance(frequency, int) and frequency <= 1 and not args.get("linear_attention_freq")
        return cls(
            args["num_layers"], args.get("num_experts"), stacked, bool(args.get("multi_latent_attention", False)),
            bool(args.get("qk_layernorm_across_heads", False)),
        )  # fmt: skip

    def place(self, name: str) -> Place:
        """Returns the place where megatron-core's local spec saves and looks for the parameter."""
        return self._stack(self._norms(name, fused=not self.latent))

    def aliases(self, name: str) -> list[Place]:
        """Returns the names of Transformer Engine or the original by which the tensor may be saved or looked for."""
        place = self.place(name)
        others = [
            self._stack(self._norms(name, fused=True)),
            self._stack(self._norms(name, fused=False)),
        ]
        if self.across_heads:
            others.append(self._stack(_ACROSS_HEADS.sub(r".\1_norm.", name)))
        return [other for number, other in enumerate(others) if other != place and other not in others[:number]]

    def candidates(self, name: str) -> Iterator[Place]:
        """Yields every place where some version of Megatron saves the parameter, ours first."""
        yield self.place(name)
        yield from self.aliases(name)
        other = dataclasses.replace(self, stacked=not self.stacked)
        yield other.place(name)
        yield from other.aliases(name)

    def _norms(self, name: str, *, fused: bool) -> str:
        if not fused:
            return name
        if self.latent:
            name = re.sub(r"\.(q|kv)_layernorm\.(\w+)$", r".linear_\1_up_proj.layer_norm_\2", name)
        else:
            name = re.sub(r"\.input_layernorm\.(\w+)$", r".self_attention.linear_qkv.layer_norm_\1", name)
        return re.sub(r"\.pre_mlp_layernorm\.(\w+)$", r".mlp.linear_fc1.layer_norm_\1", name)

    def _stack(self, name: str) -> Place:
        lead: Shape = ()
        shape: Shape = ()
        layer = _LAYER.fullmatch(name)
        if layer and self.stacked and layer[1] == "decoder.layers":
            name, lead, shape = f"{layer[1]}.{layer[3]}", (int(layer[2]),), (self.num_layers,)
        expert = _EXPERT.fullmatch(name)
        if expert:
            if self.num_experts is None:
                raise InvalidSetting.required("--num-experts", f"the model has {name}")
            name = f"{expert[1]}.experts.{expert[3]}"
            lead, shape = (*lead, int(expert[2])), (*shape, self.num_experts)
        return Place(name, lead, shape)


def other_keys(key: str, *, latent: bool, across_heads: bool = False) -> list[str]:
    """Returns the other keys of the tensor of `key`, or of its optimizer states, when layers are made of other modules.

    A norm is a module of its own or a part of the linear layer behind it. latent: multi-latent attention; across_heads:
    queries and keys have norms over all heads together.
    """
    pairs = [(".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_")]
    if latent:
        pairs += [(f".{of}_layernorm.", f".linear_{of}_up_proj.layer_norm_") for of in ("q", "kv")]
    else:
        pairs.append((".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"))
    if across_heads:
        pairs += [(f".self_attention.{of}_layernorm.", f".self_attention.{of}_norm.") for of in ("q", "k")]
    both = [*pairs, *((fused, apart) for apart, fused in pairs)]
    return [key.replace(name, other) for name, other in both if name in key]


def singletons(name: str) -> tuple[str, ...]:
    """Returns keys of a checkpoint saved with `singleton_local_shards`: nothing stacked, gate and up projection apart.

    One key, or two whose tensors lie one above the other.
    """
    name = re.sub(r"\.local_experts\.(\d+)\.", r".experts.\1.", name)
    return (f"{name}_w", f"{name}_v") if ".linear_fc1." in name else (name,)


def extra_states(shapes: Mapping[str, Shape]) -> Iterator[str]:
    """Yields the keys of the objects that Megatron looks for beside a model's tensors, whatever its layers are made of.

    shapes: of the model's tensors by key; others are passed over.
    """
    for key, shape in shapes.items():
        module, _, kind = key.rpartition(".")
        if kind != "weight" or not _HAS_STATE.fullmatch(module) or not key.startswith(("decoder.", "mtp.")):
            continue
        lead = shape[: _num_stacked(key)]
        modules = [module]
        if module.endswith(".self_attention.linear_proj"):
            modules.append(f"{module.rpartition('.')[0]}.core_attention")
        for name, index in itertools.product(modules, itertools.product(*map(range, lead))):
            at = ".".join(map(str, index)) or "0"
            yield f"{name}._extra_state/shard_{at}_{'.'.join(map(str, lead)) or '1'}"


def _num_stacked(key: str) -> int:
    """Counts leading dimensions that do not belong to the parameter."""
    layers = key.startswith("decoder.layers.") and not _LAYER.fullmatch(key)
    experts = re.search(r"\.experts\.experts\.(?!\d)", key)
    return int(layers) + int(experts is not None)
