"""Attention over packed rows by one kernel; responses read the keys of a prompt that they share where they lie.

    T  tokens of the row      K  keys and values      h, g  heads of queries, of keys and values      d  width of a head

Every run attends to itself, causally. Where prompts are shared, the responses of each attend to all of it in a second
call. With o and lse the output and the log of the sum of exponentials of each call, both together are

    lse = log(exp(lse_1) + exp(lse_2))        o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2

and the gradient of each call is what its backward kernel makes of the o and lse of both together: probabilities are
exp(logits - lse), wherever a key lies. One operator for torch: a compiled layer does not look inside, and is the same
for rows of any bounds, with shared prompts and without. The kernels are cuDNN's for padded rows where it has them
(cudnn_attention.py), and FlashAttention's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.trainer.backends.cudnn_attention import AttentionPlan, Bounds, find_plan
from slime.trainer.batching.runs import Operands, Runs, varies

Gradients = tuple[Tensor, Tensor, Tensor]


def attend_runs(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None, window: int | None = None
) -> Tensor:
    """[T, h, d], [K, g, d], [K, g, d] -> [T, h, d], on CUDA in bfloat16 or float16.

    window: keys that a query sees at most, in rows without shared prompts.
    """
    output: Tensor = _attend(
        query.contiguous(), key.contiguous(), value.contiguous(), *runs.operands, scale, window,
    )[0]  # fmt: skip
    return output


def _inside(limits: Tensor, tokens: int) -> Tensor:
    """[T] bool: tokens from the first limit to the last. Outside of them, kernels do not write their output."""
    places = torch.arange(tokens, device=limits.device)
    return (places >= limits[0]) & (places < limits[-1])


def _seen(q_limits: Tensor, k_limits: Tensor, tokens: int) -> Tensor:
    """[T] bool: tokens of prompts that any query follows. Kernels need not write the gradients of others."""
    places = torch.arange(tokens, device=k_limits.device, dtype=k_limits.dtype)
    prompts = torch.searchsorted(k_limits, places, right=True) - 1
    followed = q_limits.diff() > 0
    return _inside(k_limits, tokens) & followed[prompts.clamp(0, len(followed) - 1)]


def merge(
    causal: Tensor, causal_lse: Tensor, prompt: Tensor, prompt_lse: Tensor, q_limits: Tensor
) -> tuple[Tensor, Tensor]:
    """o [T, h, d] and lse [h, T] of both calls together."""
    inside = _inside(q_limits, len(causal))
    prompt_lse = torch.where(inside & prompt_lse.isfinite(), prompt_lse, float("-inf"))
    lse = torch.logaddexp(causal_lse, prompt_lse)
    weights = (prompt_lse - lse).exp().float().t()[..., None]
    # Masked, not multiplied by 0: outside lies whatever was in memory, which may be NaN.
    prompt = torch.where(inside[:, None, None], prompt, 0.0)
    output = torch.lerp(causal.float(), prompt.float(), weights).to(causal.dtype)
    # A compiler may choose another layout, but callers of the operator are promised the layout of the queries.
    return output.contiguous(), lse.contiguous()


def add(causal: Gradients, prompt: Gradients, q_limits: Tensor, k_limits: Tensor) -> Gradients:
    """Adds up the gradients of queries, keys and values by both calls."""
    queries, keys = _inside(q_limits, len(causal[0])), _seen(q_limits, k_limits, len(causal[0]))
    found = [
        (by_causal + torch.where(mask[:, None, None], by_prompt, 0.0)).contiguous()
        for by_causal, by_prompt, mask in zip(causal, prompt, (queries, keys, keys), strict=True)
    ]
    return found[0], found[1], found[2]


class _Fused:
    """Puts the results of kernels together: `merge` and `add`, or their compiled forms."""

    def __init__(self) -> None:
        self.merge: Callable[..., tuple[Tensor, Tensor]] = merge
        self.add: Callable[..., Gradients] = add


_fused = _Fused()


def fuse(compiled: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Compiles `merge` and `add` into one kernel each, a quarter of the memory traffic; not the operator itself."""
    _fused.merge, _fused.add = compiled(merge), compiled(add)


@torch.library.custom_op("slime::packed_attention", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_limits: Tensor,
    k_limits: Tensor,
    shared_q_limits: Tensor,
    shared_k_limits: Tensor,
    numbers: Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """Returns the output [T, h, d], and lse float32: [h, T], or if cuDNN computes it [T, h] in that shape, as the
    gradients need it."""
    calls = _calls(query, key, Operands(q_limits, k_limits, shared_q_limits, shared_k_limits, numbers), scale, window)
    found = [call.forward(query, key, value, scale) for call in calls]
    output, lse = found[0]
    if len(found) > 1:
        prompt, prompt_lse = found[1]
        for tensor, dim in ((output, 0), (lse, 1), (prompt, 0), (prompt_lse, 1), (shared_q_limits, 0)):
            varies(tensor, dim)
        output, lse = _fused.merge(output, lse, prompt, prompt_lse, shared_q_limits)
    return output, lse if calls[0].plan is None else lse.t().contiguous().view_as(lse)


@_attend.register_fake
def _(query: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    lse = query.new_empty((query.shape[1], query.shape[0]), dtype=torch.float32)
    return torch.empty_like(query), lse


@torch.library.custom_op("slime::packed_attention_backward", mutates_args=())
def _gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    q_limits: Tensor,
    k_limits: Tensor,
    shared_q_limits: Tensor,
    shared_k_limits: Tensor,
    numbers: Tensor,
    scale: float | None,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    calls = _calls(query, key, Operands(q_limits, k_limits, shared_q_limits, shared_k_limits, numbers), scale, window)
    gradient = gradient.contiguous()
    found = [call.backward(gradient, query, key, value, output, lse, scale) for call in calls]
    if len(found) == 1:
        return found[0]
    for tensor in (*found[0], *found[1], shared_q_limits, shared_k_limits):
        varies(tensor, 0)
    return _fused.add(*found, shared_q_limits, shared_k_limits)


@_gradients.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, scale, window = inputs
    ctx.save_for_backward(*tensors[:3], *output, *tensors[3:])  # type: ignore[attr-defined]
    ctx.constants = scale, window  # type: ignore[attr-defined]


def _backward(ctx: object, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    found = _gradients(gradient, *ctx.saved_tensors, *ctx.constants)  # type: ignore[attr-defined]
    return (*found, *[None] * 7)


_attend.register_autograd(_backward, setup_context=_setup)


class _Call(NamedTuple):
    """A call of a kernel: runs of queries, and the keys of each. plan: cuDNN's; None for FlashAttention."""

    q_limits: Tensor
    k_limits: Tensor
    max_q: int
    max_k: int
    causal: bool
    window: int | None = None
    plan: AttentionPlan | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
        """Returns the output [T, h, d], and lse [h, T]."""
        if self.plan is None:
            return _kernel(query, key, value, *self[:5], scale, self.window)
        output, lse = self.plan.forward(query, key, value, self.q_limits, self.k_limits)
        return output, lse.t()

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        scale: float | None,
    ) -> Gradients:
        """Returns the gradients of query, key and value. lse: as the operator returned it."""
        if self.plan is None:
            return _backward_kernel(gradient, query, key, value, output, lse, *self[:5], scale, self.window)
        lse = lse.view(query.shape[:2])
        return self.plan.backward(gradient, query, key, value, output, lse, self.q_limits, self.k_limits)


def _calls(query: Tensor, key: Tensor, row: Operands, scale: float | None, window: int | None) -> list[_Call]:
    """Returns the call for the runs of a row, and the one for shared prompts if it has them."""
    longest_q, longest_k, padded, shares, max_q, max_k = row.numbers.tolist()
    calls = [_Call(row.q_limits, row.k_limits, longest_q, longest_k, True, window)]
    if shares:
        calls.append(_Call(row.shared_q_limits, row.shared_k_limits, max_q, max_k, False))
    if not padded or window is not None:
        return calls
    plans = [find_plan(query, key, Bounds(len(c.q_limits) - 1, c.max_q, c.max_k), c.causal, scale) for c in calls]
    # Both or none: the results of two calls are put together.
    return calls if None in plans else [c._replace(plan=plan) for c, plan in zip(calls, plans, strict=True)]


def _sides(window: int | None) -> dict[str, int]:
    """Returns the keys before and behind its own that a query may see, as the kernels take them."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    q_limits: Tensor,
    k_limits: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    output, lse, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, q_limits, k_limits, max_q, max_k, 0.0, causal and window is None, False, scale=scale,
        **_sides(window),
    )  # fmt: skip
    return output, lse


def _backward_kernel(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    q_limits: Tensor,
    k_limits: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float | None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    # The random state of dropout, which is off.
    random = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.empty(0, device=query.device)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        gradient, query, key, value, output, lse, q_limits, k_limits, max_q, max_k, 0.0, causal and window is None,
        random, unused, scale=scale, **_sides(window),
    )  # fmt: skip
    return found
