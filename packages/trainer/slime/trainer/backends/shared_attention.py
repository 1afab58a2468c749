"""Attention over packed rows by FlashAttention; responses read the keys of a prompt that they share where they lie.

    T  tokens of the row      K  keys and values      h, g  heads of queries, of keys and values      d  width of a head

Every run attends to itself, causally. Where prompts are shared, the responses of each attend to all of it in a second
call. With o and lse the output and the log of the sum of exponentials of each call, both together are

    lse = log(exp(lse_1) + exp(lse_2))        o = exp(lse_1 - lse) o_1 + exp(lse_2 - lse) o_2

and the gradient of each call is what its backward kernel makes of the o and lse of both together: probabilities are
exp(logits - lse), wherever a key lies. One operator for torch: a compiled layer does not look inside, and is the same
for rows of any bounds, with shared prompts and without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slime.trainer.batching.runs import Runs, varies

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
    queries, keys = (_inside(x, len(causal[0]))[:, None, None] for x in (q_limits, k_limits))
    found = [
        (by_causal + torch.where(mask, by_prompt, 0.0)).contiguous()
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
    """Returns the output [T, h, d], and lse [h, T] float32."""
    longest_q, longest_k, shares, max_q, max_k = numbers.tolist()
    causal, causal_lse = _kernel(query, key, value, q_limits, k_limits, longest_q, longest_k, True, scale, window)
    if not shares:
        return causal, causal_lse
    prompt, prompt_lse = _kernel(query, key, value, shared_q_limits, shared_k_limits, max_q, max_k, False, scale)
    for tensor, dim in ((causal, 0), (causal_lse, 1), (prompt, 0), (prompt_lse, 1), (shared_q_limits, 0)):
        varies(tensor, dim)
    return _fused.merge(causal, causal_lse, prompt, prompt_lse, shared_q_limits)


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
    longest_q, longest_k, shares, max_q, max_k = numbers.tolist()
    saved = gradient.contiguous(), query, key, value, output, lse
    causal = _backward_kernel(*saved, q_limits, k_limits, longest_q, longest_k, True, scale, window)
    if not shares:
        return causal
    prompt = _backward_kernel(*saved, shared_q_limits, shared_k_limits, max_q, max_k, False, scale)
    for tensor in (*causal, *prompt, shared_q_limits, shared_k_limits):
        varies(tensor, 0)
    return _fused.add(causal, prompt, shared_q_limits, shared_k_limits)


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
