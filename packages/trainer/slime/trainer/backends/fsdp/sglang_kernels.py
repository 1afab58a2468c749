"""The arithmetic of SGLang with --enable-deterministic-inference and FlashAttention 3, for dense models on one GPU.

There matrix products, means and log-softmax do not depend on the other rows of a batch, and attention is not split.
Residuals are added in float32 and kept in bfloat16; a norm reads the sum before it is rounded.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from slime.trainer.batching.runs import Runs
from slime.trainer.settings.on_policy import head_width
from slime.types.errors import NotAvailable


class SglangKernels:
    """Raises NotAvailable without SGLang, and for a release of it that has these kernels elsewhere."""

    def __init__(self, config: Any, device: torch.device) -> None:
        """config: of a model in transformers that `check_engine_layers` accepts."""
        text = config.get_text_config()
        self._width = head_width(text.to_dict())
        rope: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
        theta: Any = rope.get("rope_theta") or getattr(text, "rope_theta", 10000.0)
        self._theta = float(theta)
        self._device = device
        self._angles = torch.empty((0, self._width), device=device)
        invariant = _module("sglang.srt.batch_invariant_ops.batch_invariant_ops")
        self._matmul, self._rms_norm = invariant.matmul_persistent, invariant.rms_norm_batch_invariant
        self._mean, self._log_softmax = invariant.mean_dim, invariant.log_softmax
        self._flash = _module("sgl_kernel.flash_attn").flash_attn_varlen_func
        self._silu_and_mul = _module("sglang.kernels.ops.activation.activation").silu_and_mul
        self._rotate = _module("sglang.kernels.ops.attention.rope").apply_rope_with_cos_sin_cache_inplace

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = self._matmul(x, weight.t(), bias)
        return product

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        normed: Tensor = self._rms_norm(x.contiguous(), weight, epsilon)
        return normed

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        added = x.float() + residual.float()
        scaled = added * torch.rsqrt(self._mean(added.pow(2), -1, True) + epsilon)
        return (scaled * weight).to(x.dtype), added.to(x.dtype)

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        if len(self._angles) < longest:
            self._angles = self._cos_sin(longest)
        query, key = query.contiguous(), key.contiguous()
        self._rotate(q=query, k=key, cos_sin_cache=self._angles, positions=positions, is_neox=True)
        return query, key

    def attend(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
        mixed = self._flash(
            query, key, value, runs.q_limits, runs.k_limits, runs.max_q, runs.max_k,
            softmax_scale=self._width**-0.5, causal=True, num_splits=1,
        )  # fmt: skip
        output: Tensor = mixed[0] if isinstance(mixed, tuple) else mixed
        return output

    def gated_silu(self, gate_and_up: Tensor) -> Tensor:
        activated = gate_and_up.new_empty((len(gate_and_up), gate_and_up.shape[1] // 2))
        self._silu_and_mul(gate_and_up, activated)
        return activated

    def log_softmax(self, logits: Tensor) -> Tensor:
        found: Tensor = self._log_softmax(logits)
        return found

    def _cos_sin(self, longest: int) -> Tensor:
        """Returns cosines and sines, [positions, d] float32, for twice the positions that are needed."""
        with torch.device(self._device):
            steps = torch.arange(0, self._width, 2, dtype=torch.float) / self._width
            angles = torch.arange(2 * longest, dtype=torch.float)[:, None] * (1.0 / self._theta**steps)
            return torch.cat((angles.cos(), angles.sin()), -1)


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotAvailable.unavailable(
            "--true-on-policy-mode on a GPU", f"{name} of SGLang is missing: {error}"
        ) from error
