"""Compares the flags of LoRA with the adapter in a directory, told from its adapter_config.json."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.converters.convert.quantization_config import quantization_of
from slime.converters.files.adapter import CONFIG_FILE, has_adapter, read_adapter
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable, errors_name

# The cache of the Hub's library has models--ORG--NAME/snapshots/COMMIT.
_CACHED = re.compile(r"/models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
# Variants of LoRA that peft has and that are not read here, each with the value that turns it off.
PLAIN = {
    "use_rslora": False, "use_dora": False, "bias": "none", "modules_to_save": None, "rank_pattern": {},
    "alpha_pattern": {}, "fan_in_fan_out": False,
}  # fmt: skip


def check_rank(rank: int, config: Mapping[str, Any]) -> None:
    """Raises InvalidSetting for adapters that no layer needs. config: a config.json."""
    width = (config.get("text_config") or config).get("hidden_size")
    if width is not None and rank > width:
        raise InvalidSetting.must_be(
            "--lora-rank", f"at most {width}", got=rank,
            reason="the model is as wide, and an update of a layer has no higher rank",
        )  # fmt: skip


def refuse_quantized_base(config: Mapping[str, Any], rank: int) -> None:
    """Raises NotAvailable for adapters of a quantized model. config: a config.json."""
    if quantization_of(config):
        raise NotAvailable.unavailable(
            f"--lora-rank {rank} for this model", "an update may be smaller than a step of its quantized weights",
            "the directory of the model in bfloat16",
        )  # fmt: skip


def refuse_adapter(path: str | Path, flag: str) -> None:
    """Raises InvalidSetting if `path`, given as a model, holds an adapter alone."""
    if has_adapter(path):
        raise InvalidSetting.requires(
            f"{flag} {path}", "the directory of a model",
            "it holds a LoRA adapter: give that as --load, and the model under it as --hf-checkpoint",
        )  # fmt: skip


def check_adapter(load: str, rank: int, alpha: float = 0.0) -> None:
    """Raises InvalidSetting where `--load` does not continue training with these flags, InvalidFile for a file that
    cannot be read. rank: 0 without LoRA."""
    if not has_adapter(load):
        if rank:
            raise InvalidSetting.conflict(
                f"--lora-rank {rank}", f"--load {load}",
                f"that directory has no {CONFIG_FILE}; a model to train with LoRA is given as --hf-checkpoint",
            )  # fmt: skip
        return
    saved_rank, saved_alpha = _read(Path(load))
    if not rank:
        alpha_too = "" if saved_alpha == alpha else f" --lora-alpha {saved_alpha:g}"
        raise InvalidSetting.requires(
            f"--load {load}", f"--lora-rank {saved_rank}{alpha_too}", "it holds a LoRA adapter"
        )
    for flag, own, saved in (("--lora-rank", rank, saved_rank), ("--lora-alpha", alpha, saved_alpha)):
        if own != saved:
            raise InvalidSetting.conflict(f"{flag} {own:g}", f"--load {load}", f"that adapter has {saved:g}")


def hub_name(path: str) -> tuple[str, str] | None:
    """Returns (ORG/NAME, commit) of a model in the cache of the Hub's library; None for other paths."""
    match = _CACHED.search(os.path.abspath(path))
    return (match["name"].replace("--", "/", 1), match["commit"]) if match else None


def other_base(load: str, base: str) -> str | None:
    """Returns a sentence where the adapter in `load` says that it belongs to another model than `base`."""
    try:
        saved = json.loads((Path(load) / CONFIG_FILE).read_text()).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        return None  # the checks of --load report the fault
    if not isinstance(saved, str) or not saved:
        return None
    names = [(hub_name(path) or (os.path.realpath(path),))[0] for path in (saved, base)]
    # A model keeps its name when it moves, and on the Hub it is ORG/NAME.
    if len({*names}) == 1 or len({Path(name).name.lower() for name in (*names, saved)} - {""}) == 1:
        return None
    return (
        f"--load {load} has a LoRA adapter of {saved}, and --hf-checkpoint is {base}: an adapter fits the weights that "
        "it was trained on, and no others of their shapes"
    )


def _read(path: Path) -> tuple[int, float]:
    """Returns rank and alpha. Raises MissingFile or InvalidFile naming --load."""
    with errors_name("--load"):
        about = read_adapter(path)
    place = f"--load: {path / CONFIG_FILE}: "
    rank, alpha = about.get("r"), about.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise InvalidFile.must_be(f"{place}r", "a whole number of at least 1", got=rank)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise InvalidFile.must_be(f"{place}lora_alpha", "a number", got=alpha)
    for name, plain in PLAIN.items():
        if about.get(name) not in (plain, None):
            raise InvalidFile(
                f"--load: {path / CONFIG_FILE}: expected {name} {plain}, got {about[name]}", field="--load", value=name,
                expected=str(plain),
            )  # fmt: skip
    return rank, float(alpha)
