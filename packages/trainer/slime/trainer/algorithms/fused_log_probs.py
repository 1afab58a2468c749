"""Log-probs and entropies from logits, keeping one copy of the logits, which the gradient overwrites.

    J  rows        V  tokens of the vocabulary

The numbers are those of `logprobs` on the whole vocabulary; here both come from one reading of the logits, nothing of
[J, V] in float32 is written where the functions are compiled, and the backward pass knows its formula:

    d log_prob / dz = onehot - p        d entropy / dz = -p (log p + entropy)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def row_statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[J, V], [J] -> log-probs, entropies and log-sums, [J] float32 each."""
    scaled = logits.float() / temperature
    log_sum = torch.logsumexp(scaled, -1)
    chosen = scaled.gather(-1, targets[:, None])[:, 0]
    entropy = log_sum - ((scaled - log_sum[:, None]).exp() * scaled).sum(-1)
    return chosen - log_sum, entropy, log_sum


def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    log_sum: Tensor,
    entropy: Tensor,
    of_log_probs: Tensor,
    of_entropy: Tensor,
    temperature: float,
) -> None:
    """Overwrites `logits` [J, V] with their gradient. The other tensors are [J]; of_*: gradients of the outputs."""
    log_p = logits.float() / temperature - log_sum[:, None]
    p = log_p.exp()
    columns = torch.arange(logits.shape[-1], device=logits.device)
    chosen = torch.where(columns == targets[:, None], of_log_probs[:, None], 0.0)
    gradient = chosen - p * (of_log_probs + of_entropy * entropy)[:, None] - of_entropy[:, None] * p * log_p
    logits.copy_(gradient / temperature)


class FusedLogProbs:
    """Computes log-probs and entropies. compiled: wraps a function in one that computes the same, such as
    `torch.compile`."""

    def __init__(
        self, compiled: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function
    ) -> None:
        self._statistics = compiled(row_statistics)
        self._gradient = compiled(gradient_of_logits)

    def __call__(self, logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Returns (log-probs, entropies), [J] float32 each. The backward pass, if any, overwrites `logits`."""
        _rows_vary(logits, targets)
        if torch.is_grad_enabled() and logits.requires_grad:
            found: tuple[Tensor, Tensor] = _Fused.apply(logits, targets, temperature, self._statistics, self._gradient)
            return found
        log_probs, entropy, _ = self._statistics(logits, targets, temperature)
        return log_probs, entropy


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        statistics: Callable[..., Any],
        gradient: Callable[..., Any],
    ) -> tuple[Tensor, Tensor]:
        log_probs, entropy, log_sum = statistics(logits, targets, temperature)
        ctx.save_for_backward(targets, log_sum, entropy)
        # Not saved as the others are: the backward pass writes over it.
        ctx.logits, ctx.temperature, ctx.gradient = logits.detach(), temperature, gradient
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor, of_entropy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        targets, log_sum, entropy = ctx.saved_tensors
        logits, ctx.logits = ctx.logits, None
        _rows_vary(logits, targets, log_sum, entropy, of_log_probs, of_entropy)
        ctx.gradient(logits, targets, log_sum, entropy, of_log_probs, of_entropy, ctx.temperature)
        return logits, None, None, None, None


def _rows_vary(*tensors: Tensor) -> None:
    """Has torch.compile take any J from the start."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
