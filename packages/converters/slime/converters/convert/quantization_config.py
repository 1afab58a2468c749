"""The quantization_config in a model's config.json: how its weights are quantized.

Read and written: FP8 in blocks and INT4 in groups, by `fp8.py`, `int4.py` and `quantized.py`. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime.types.errors import InvalidFile, NotAvailable

# Values of fmt in config.json for e4m3; MiniMax-M2 has torch's name.
E4M3 = (None, "e4m3", "float8_e4m3fn")
# Values of scale_fmt in config.json: of factors, and whether they are powers of two.
SCALE_FORMATS = {"None": False, "float": False, "ue8m0": True}


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the quantization_config of a model, or of the language model in it; None for a plain model.

    Raises InvalidFile if it is not an object.
    """
    found = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config") or None
    if found is not None and not isinstance(found, Mapping):
        raise InvalidFile.must_be("quantization_config", "an object", got=found).at("config.json")
    return found


def block_size(quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the size of the blocks; None for another quantization than FP8 in blocks."""
    block = quantization.get("weight_block_size")
    if quantization.get("quant_method") != "fp8" or not isinstance(block, list) or len(block) != 2:
        return None
    return (block[0], block[1]) if all(type(size) is int and size > 0 for size in block) else None


def group_size(quantization: Mapping[str, Any]) -> int | None:
    """Returns the size of the groups of symmetric INT4 as compressed-tensors' `pack-quantized` has it, one for all
    layers; None for another quantization."""
    groups = quantization.get("config_groups")
    if quantization.get("quant_method") != "compressed-tensors" or not isinstance(groups, Mapping) or not groups:
        return None
    sizes = {_group_size(group, quantization.get("format")) for group in groups.values()}
    return sizes.pop() if len(sizes) == 1 else None


def _group_size(group: Any, form: Any) -> int | None:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        return None
    size = weights.get("group_size")
    known = (
        (group.get("format") or form) == "pack-quantized"
        and (weights.get("num_bits"), weights.get("type", "int")) == (4, "int")
        and weights.get("symmetric", True) is True
        and weights.get("strategy") in ("group", None)
        and not weights.get("actorder")
        and not weights.get("dynamic")
        and not group.get("input_activations")
        and not group.get("output_activations")
    )
    return size if known and type(size) is int and size > 0 and size % 8 == 0 else None


@dataclass(frozen=True)
class Fp8Blocks:
    """A kind of FP8 in blocks. power_of_two: whether factors are rounded up to powers of two."""

    block: tuple[int, int]
    power_of_two: bool = False


@dataclass(frozen=True)
class Int4Groups:
    """INT4 with a scale for each `group` columns of a row."""

    group: int


def updatable(config: Mapping[str, Any], what: str) -> Fp8Blocks | Int4Groups | None:
    """Returns the quantization that new weights of a model get; None for a plain model.

    what: the checkpoint, for the error. Raises NotAvailable for a quantization that weights cannot be brought into.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return None
    group = group_size(quantization)
    if group is not None:
        return Int4Groups(group)
    block, method = block_size(quantization), quantization.get("quant_method")
    power_of_two = SCALE_FORMATS.get(str(quantization.get("scale_fmt")))
    if block is None:
        size = f" with weight_block_size {quantization.get('weight_block_size')}" if method == "fp8" else ""
        reason = (
            "weight updates are quantized to FP8 in blocks or to symmetric INT4 in groups, not to "
            f"{quantization.get('format') or method}{size}{_groups(quantization)}"
        )
    elif quantization.get("fmt") not in E4M3 or power_of_two is None:
        reason = (
            f"weight updates are quantized to e4m3 with factors in float or ue8m0, not as {dict(quantization)} has it"
        )
    elif quantization.get("activation_scheme") not in (None, "dynamic"):
        reason = "its activations have constant factors, which would not suit the weights after training"
    else:
        return Fp8Blocks(block, power_of_two)
    raise NotAvailable.unavailable(
        f"{what} with quantization_config ({method})", reason, "the directory of the model in bfloat16"
    )


def _groups(quantization: Mapping[str, Any]) -> str:
    """Describes the groups of compressed-tensors' layers, for an error."""
    groups = quantization.get("config_groups")
    return "" if groups is None else f" with config_groups {groups}"
