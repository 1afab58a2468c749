"""Model families: for each, the names and layouts of its weights and the Megatron arguments of its config."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from slime.converters.families import config_json
from slime.converters.families.base import Config, Family
from slime.converters.families.config_values import check_values
from slime.converters.families.deepseek import DEEPSEEK_V3, GLM4_MOE_LITE, GLM_MOE_DSA
from slime.converters.families.glm import GLM4, GLM4_MOE
from slime.converters.families.llama import LLAMA
from slime.converters.families.mimo import MIMO
from slime.converters.families.minimax import MINIMAX_M2
from slime.converters.families.mtp import without_missing
from slime.converters.families.qwen import QWEN2, QWEN3, QWEN3_MOE, QWEN3_VL
from slime.converters.families.qwen_gated import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, with_layout, with_vision_of
from slime.converters.files.safetensors_dir import SafetensorsDir
from slime.converters.files.side_files import weight_map
from slime.types.errors import InvalidFile, MissingFile, NotAvailable

FAMILIES = (
    QWEN2, QWEN3, QWEN3_MOE, QWEN3_VL, QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, LLAMA, GLM4, GLM4_MOE, GLM4_MOE_LITE,
    GLM_MOE_DSA, DEEPSEEK_V3, MIMO, MINIMAX_M2,
)  # fmt: skip


def model_types() -> dict[str, Family]:
    """Returns every family by each `model_type` that it has in config.json."""
    return {model_type: family for family in FAMILIES for model_type in family.model_types}


def find_family(config: Config, *, model_name: str | None = None) -> Family:
    """Returns the family of config.json's `model_type`, or else the one whose type is part of `model_name`.

    Raises NotAvailable naming the known families.
    """
    by_type = model_types()
    model_type = config.get("model_type")
    if model_type is None and model_name is not None:
        found = [name for name in by_type if _bare(name) in _bare(model_name)]
        model_type = max(found, key=len, default=None)
    if model_type not in by_type:
        known = f"supported families are {', '.join(sorted(by_type))}"
        raise NotAvailable.unavailable(f"model_type {model_type!r}", known).at("config.json")
    return by_type[model_type]


def _bare(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def read_config(hf_dir: str | Path) -> dict[str, Any]:
    """Reads the object of `hf_dir`/config.json. Raises MissingFile, InvalidFile.

    Its `num_nextn_predict_layers` is 0 where the weights beside it have no such layer, and it says if they hold the
    experts of a layer in one tensor.
    """
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise MissingFile(f"no such file {path}", field="config.json", value=str(path))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidFile(f"{path}: {error}", field="config.json", value=str(path), expected="JSON") from None
    if not isinstance(config, dict):
        raise InvalidFile(f"{path}: not an object", field="config.json", value=str(path), expected="an object")
    check_values(path, config)
    if config.get("model_type") in QWEN3_5_MOE.model_types:
        config = with_layout(config, weight_map(path.parent) or _tensor_names(path.parent))
    names = _tensor_names(path.parent) if config_json.num_mtp_layers(config) else []
    return without_missing(config, names) if names else config


def with_vision_in(hf_dir: Path, config: Config) -> dict[str, Any]:
    """Returns `config` with what reads images as a part of a Qwen3.5, if the files in `hf_dir` have all of it."""
    return with_vision_of(config, _tensor_names(hf_dir))


def _tensor_names(directory: Path) -> list[str]:
    """Returns the names of the tensors in safetensors files; none without such files."""
    if not any(directory.glob("*.safetensors")):
        return []
    return list(SafetensorsDir(directory).tensors)
