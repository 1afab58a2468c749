"""Forward passes in an engine's arithmetic, with the gradients of the model's own layers.

    T  tokens of a row        U  scored ones        d  width of the model        V  tokens of the vocabulary

An engine and a trainer that compute a layer with different kernels round differently, and so differ in their log-probs.
Here the value of every layer comes from the engine's kernels, bit for bit what the engine sampled from. The backward
pass runs the model's own layer on the same input, and takes its gradient: the memory of recomputed activations, and
gradients that differ from plain ones by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slime.trainer.backends.fsdp.model import decoder_layers
from slime.trainer.batching.runs import Runs

# Float32 logits at a time.
_CHUNK = 1 << 26


class Kernels(Protocol):
    """The engine's arithmetic; tensors are in the type of the weights."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[T, n], [m, n] -> [T, m]"""

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """[..., n], [n] -> [..., n]"""

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """Returns the norm of x + residual, and that sum."""

    def rotate(self, query: Tensor, key: Tensor, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """[T, h, d], [T, g, d], [T] -> both, rotated. longest: no position is as large."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> Tensor:
        """[T, h, d], [K, g, d], [K, g, d] -> [T, h, d]"""

    def gated_silu(self, gate_and_up: Tensor) -> Tensor:
        """[T, 2 m] -> [T, m]"""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """[U, V] float32 -> [U, V] float32"""


class EngineForward:
    """Gives the layers of models the engine's values. Layers may have been compiled, and are not sharded."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        # The last layer's output, and the two tensors in the type of the weights that the engine has in its place: the
        # next norm adds them in float32.
        self._last: Tensor | None = None
        self._parts: tuple[Tensor, Tensor] | None = None

    def attach(self, model: Any) -> None:
        """Replaces the forward passes of layers, last norm and head of a model that `check_engine_layers` accepts."""
        for layer in decoder_layers(model):
            layer.forward = self._layer(layer, layer.forward)
        norm, head = model.get_decoder().norm, model.get_output_embeddings()
        norm.forward = self._last_norm(norm, norm.forward)
        head.forward = lambda hidden: _Linear.apply(self._kernels, hidden, head.weight)

    def token_log_probs(self, logits: Tensor, targets: Tensor, temperature: float, chunk: int) -> Tensor:
        """[U, V], [U] -> [U] float32, as the engine computes them. chunk: as in `logprobs.token_log_probs`."""
        rows = chunk if chunk > 0 else max(1, _CHUNK // logits.shape[-1])
        found: Tensor = _LogProbs.apply(self._kernels, logits, targets, temperature, rows)
        return found

    def _layer(self, layer: nn.Module, own: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, *, position_ids: Tensor, runs: Runs, **others: Any) -> Tensor:
            others |= {"position_ids": position_ids, "runs": runs}
            with torch.no_grad():
                x, residual = self._values(layer, *self._parts_of(hidden), position_ids[0], runs)
                self._parts = x, residual
                value = (x.float() + residual.float()).to(x.dtype)[None]
            self._last = _with_gradient(value, lambda h: own(h, **others), hidden, layer)
            return self._last

        return forward

    def _last_norm(self, norm: Any, own: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(hidden: Tensor) -> Tensor:
            with torch.no_grad():
                value, _ = self._normed(norm, *self._parts_of(hidden))
            self._last = self._parts = None
            return _with_gradient(value[None], own, hidden, norm)

        return forward

    def _parts_of(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._parts if self._parts is not None and hidden is self._last else (hidden[0], None)

    def _normed(self, norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return self._kernels.norm(x, norm.weight, norm.variance_epsilon), x
        return self._kernels.add_norm(x, residual, norm.weight, norm.variance_epsilon)

    def _values(
        self, layer: Any, x: Tensor, residual: Tensor | None, positions: Tensor, runs: Runs
    ) -> tuple[Tensor, Tensor]:
        """Returns what the MLP gives, and the residual that is added to it."""
        attention, mlp, kernels = layer.self_attn, layer.mlp, self._kernels
        x, residual = self._normed(layer.input_layernorm, x, residual)
        query, key, value = (
            kernels.linear(x, part.weight, part.bias).view(len(x), -1, attention.head_dim)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            query = kernels.norm(query, attention.q_norm.weight, attention.q_norm.variance_epsilon)
            key = kernels.norm(key, attention.k_norm.weight, attention.k_norm.variance_epsilon)
        query, key = kernels.rotate(query, key, positions, runs.max_k)
        if runs.keys is not None:
            key, value = key.index_select(0, runs.keys), value.index_select(0, runs.keys)
        mixed = kernels.attend(query, key, value, runs).reshape(len(x), -1)
        x = kernels.linear(mixed, attention.o_proj.weight, attention.o_proj.bias)
        x, residual = self._normed(layer.post_attention_layernorm, x, residual)
        both = torch.cat([kernels.linear(x, part.weight, None) for part in (mlp.gate_proj, mlp.up_proj)], -1)
        return kernels.linear(kernels.gated_silu(both), mlp.down_proj.weight, None), residual


def _with_gradient(value: Tensor, function: Callable[[Tensor], Tensor], hidden: Tensor, module: nn.Module) -> Tensor:
    """Returns `value`, which gets the gradients of function(hidden) for `hidden` and for the parameters of `module`."""
    if not torch.is_grad_enabled():
        return value
    found: Tensor = _OtherGradient.apply(value, function, hidden, *module.parameters())
    return found


class _OtherGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, function: Callable[[Tensor], Tensor], hidden: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(hidden, *parameters)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            hidden = hidden.detach().requires_grad_()
            output = ctx.function(hidden)
        trained = [hidden, *(p for p in parameters if p.requires_grad)]
        found = iter(torch.autograd.grad(output, trained, gradient, allow_unused=True))
        return None, None, next(found), *(next(found) if p.requires_grad else None for p in parameters)


class _Linear(torch.autograd.Function):
    """The head: [1, U, d], [V, d] -> [1, U, V]"""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return kernels.linear(hidden[0], weight, None)[None]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor | None]:  # type: ignore[override]
        hidden, weight = ctx.saved_tensors
        of_weight = gradient[0].t() @ hidden[0] if ctx.needs_input_grad[2] else None
        return None, gradient @ weight, of_weight


class _LogProbs(torch.autograd.Function):
    """log softmax(logits / temperature) at the targets."""

    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, logits: Tensor, targets: Tensor, temperature: float, rows: int
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(logits, targets)
        ctx.kernels, ctx.temperature, ctx.rows = kernels, temperature, rows
        parts = zip(logits.split(rows), targets.split(rows), strict=True)
        return torch.cat([_log_softmax(kernels, z, temperature).gather(1, ids[:, None])[:, 0] for z, ids in parts])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None, None]:  # type: ignore[override]
        logits, targets = ctx.saved_tensors
        of_logits = torch.empty_like(logits)
        parts = (tensor.split(ctx.rows) for tensor in (logits, targets, gradient / ctx.temperature, of_logits))
        for z, ids, g, out in zip(*parts, strict=True):
            found = _log_softmax(ctx.kernels, z, ctx.temperature).exp_().mul_(-g[:, None])
            out.copy_(found.scatter_add_(1, ids[:, None], g[:, None]))
        return None, of_logits, None, None, None


def _log_softmax(kernels: Kernels, logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float()
    return kernels.log_softmax(scaled if temperature == 1.0 else scaled / temperature)
