"""mbridge as an oracle: its conversion of the weights of a Hugging Face directory, without a model or ranks.

mbridge knows the names that parameters have with Transformer Engine, and DeepSeek V3 with its 61 layers only.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from mbridge.core.bridge import _MODEL_REGISTRY
from mbridge.core.parallel_states import ParallelStates
from torch import Tensor

# With a multi-token-prediction layer; the number that mbridge insists on.
DEEPSEEK_LAYERS = 61
# Model types that mbridge does not know, and the one with the same names.
SAME = {"kimi_k2": "deepseek_v3", "glm4_moe_lite": "deepseek_v3"}


class Oracle:
    """config: of config.json; hf_config: the same as transformers has it; tensors: by Hugging Face name."""

    def __init__(self, config: dict[str, Any], hf_config: Any, tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors
        model_type = SAME.get(config["model_type"], config["model_type"])
        self.latent = model_type == "deepseek_v3"
        cls = _MODEL_REGISTRY[model_type]
        # Its __init__ builds a configuration of Megatron's, which no conversion of weights needs.
        self.bridge = object.__new__(cls)
        self.bridge.hf_config, self.bridge.dtype, self.bridge.mpu = hf_config, None, ParallelStates()
        self.bridge.make_vocab_size_divisible_by = None
        self.layers = DEEPSEEK_LAYERS if self.latent else config["num_hidden_layers"]
        self.bridge.config = SimpleNamespace(num_layers=self.layers, mtp_num_layers=1, gated_linear_unit=True)

    @staticmethod
    def has(config: dict[str, Any]) -> bool:
        # Delta nets have other modules here.
        return config["model_type"] in (*_MODEL_REGISTRY, *SAME) and "linear_num_value_heads" not in config

    def whole(self, name: str) -> Tensor:
        """The Megatron parameter `name`, by its name with local layers."""
        engine_name = self._engine_name(name)
        hf_names = self.bridge._weight_name_mapping_mcore_to_hf(engine_name)
        if name.startswith("mtp."):
            here = self.config["num_hidden_layers"]
            hf_names = [re.sub(rf"model\.layers\.{self.layers}\.", f"model.layers.{here}.", n) for n in hf_names]
        return self.bridge._weight_to_mcore_format(engine_name, [self.tensors[n] for n in hf_names])

    def shards(self, name: str, size: int, local_shape: tuple[int, ...]) -> list[Tensor]:
        """Returns the tensors of all tensor-parallel ranks."""
        shape = torch.empty(local_shape, device="meta")
        return list(self.bridge._weight_split_across_tp(self._engine_name(name), self.whole(name), shape, size))

    def _engine_name(self, name: str) -> str:
        layer = name.partition(".layers.")[2].partition(".")[0]
        if self.latent:
            name = name.replace("self_attention.q_layernorm.", "self_attention.linear_q_up_proj.layer_norm_")
            name = name.replace("self_attention.kv_layernorm.", "self_attention.linear_kv_up_proj.layer_norm_")
        else:
            name = name.replace(".input_layernorm.", ".self_attention.linear_qkv.layer_norm_")
        if not self._has_experts(name, int(layer or 0)):
            name = name.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
        return re.sub(r"experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight", r"experts.\2.weight\1", name)

    def _has_experts(self, name: str, layer: int) -> bool:
        if name.startswith("mtp."):
            layer += self.config["num_hidden_layers"]
        return f"model.layers.{layer}.mlp.gate.weight" in self.tensors
