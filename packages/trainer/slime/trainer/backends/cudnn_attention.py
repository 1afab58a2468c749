"""Attention over the runs of padded rows by cuDNN, which on Hopper GPUs is faster than torch's FlashAttention 2.

    T  tokens of the row      h, g  heads of queries, of keys and values      d  width of a head      R  runs

cuDNN makes a plan for each shape, which takes a tenth of a second; so the bounds of a row are rounded up to few. Its
package for Python, nvidia-cudnn-frontend, has to suit the cuDNN that torch brings: where it does not, or is missing,
the log says so once and attention is FlashAttention's.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime.trainer.batching.runs import notch

log = logging.getLogger(__name__)

# The only architecture on which it was measured against FlashAttention, and the width of heads for which it is faster:
# with heads of 64, a step takes 1 % less for runs of one length, and 1 % more for ragged ones.
_HOPPER = 9
_WIDTH = 128
# Offsets into queries, keys and values are 32 bits wide.
_MAX_ELEMENTS = 2**31
# Queries and keys of a block: a smaller bound on the length of runs would gain nothing.
_BLOCK = 128

Gradients = tuple[Tensor, Tensor, Tensor]


class Bounds(NamedTuple):
    """Bounds of a call: the number of runs, and the longest run of queries and of keys."""

    runs: int
    max_q: int
    max_k: int

    def rounded(self) -> Bounds:
        return Bounds(notch(self.runs), *(notch(max(length, _BLOCK)) for length in self[1:]))


class AttentionShape(NamedTuple):
    """The numbers that a plan is made for; the sizes of query and key are T, h, d and g."""

    tokens: int
    heads: int
    groups: int
    width: int
    bounds: Bounds
    causal: bool
    scale: float
    dtype: torch.dtype
    device: int


def find_plan(query: Tensor, key: Tensor, bounds: Bounds, causal: bool, scale: float | None) -> AttentionPlan | None:
    """Returns what computes attention over query [T, h, d] and key [T, g, d]; None if FlashAttention has to."""
    tokens, heads, width = query.shape
    fits = width == _WIDTH and tokens * heads * width < _MAX_ELEMENTS and len(key) == tokens
    # Deterministic gradients would need memory for every pair of a query and a key that the bounds have room for.
    if not fits or torch.are_deterministic_algorithms_enabled() or not _wanted(query.device):
        return None
    scale = width**-0.5 if scale is None else scale
    shape = AttentionShape(
        tokens, heads, key.shape[1], width, bounds.rounded(), causal, scale, query.dtype, query.device.index
    )
    return _plan(shape)


@functools.cache
def _wanted(device: torch.device) -> bool:
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _HOPPER
    return on_hopper and _library() is not None


@functools.cache
def _library() -> Any:
    """Returns the module `cudnn`; None where it is missing or cannot be used."""
    try:
        return importlib.import_module("cudnn")
    except ModuleNotFoundError:
        log.info('attention is faster on this GPU with cuDNN: pip install "slime-trainer[cudnn]"')
    except Exception as error:  # it looks for libcudnn, and fails in ways of its own
        log.warning("attention goes without cuDNN: nvidia-cudnn-frontend: %s: %s", type(error).__name__, error)
    return None


class _Made:
    """Keeps whether any plan was made, and whether the first attempt failed, after which there is none."""

    any = False
    failed = False


@functools.cache
def _plan(shape: AttentionShape) -> AttentionPlan | None:
    if _Made.failed:
        return None
    try:
        plan = AttentionPlan(shape)
    except Exception as error:  # whatever the library raises: classes of its own, which differ between versions
        cudnn, (reason, *_) = _library(), (str(error).strip().splitlines() or [type(error).__name__])
        # Shapes that have a plan keep it, in passes with gradients and without.
        _Made.failed = not _Made.any
        rows = "attention" if _Made.failed else f"attention of rows of {shape.tokens} tokens, {shape.bounds}"
        log.warning(
            "%s goes without cuDNN %s, which nvidia-cudnn-frontend %s could not make a plan with: %s",
            rows, torch.backends.cudnn.version(), cudnn.__version__, reason,
        )  # fmt: skip
        return None
    if not _Made.any:
        log.info("attention of padded rows is computed by cuDNN %s", torch.backends.cudnn.version())
    _Made.any = True
    return plan


@functools.cache
def _handle(device: int) -> int:
    with torch.cuda.device(device):
        handle: int = _library().create_handle()
    return handle


class _Graph:
    """A graph of cuDNN, with its tensors for the limits of runs, in tokens and in elements."""

    def __init__(self, shape: AttentionShape) -> None:
        self.cudnn, self.shape = _library(), shape
        kinds = self.cudnn.data_type
        self.dtype = kinds.HALF if shape.dtype == torch.float16 else kinds.BFLOAT16
        self.graph = self.cudnn.pygraph(
            io_data_type=self.dtype, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT,
            handle=_handle(shape.device),
        )  # fmt: skip
        runs = shape.bounds.runs
        self.q_lengths, self.k_lengths = self._limits(runs), self._limits(runs)
        self.of_queries, self.of_keys, self.of_lse = (self._limits(runs + 1) for _ in range(3))
        self.masks = {
            "attn_scale": shape.scale, "use_padding_mask": True, "seq_len_q": self.q_lengths,
            "seq_len_kv": self.k_lengths, "use_causal_mask": shape.causal,
        }  # fmt: skip

    def _limits(self, number: int) -> Any:
        return self.graph.tensor(
            dim=[number, 1, 1, 1], stride=[1, 1, 1, 1], data_type=self.cudnn.data_type.INT32, name=""
        )

    def _layout(self, of_keys: bool) -> dict[str, list[int]]:
        """Returns sizes [R, heads, longest, d] of a tensor [T, heads, d] whose runs begin at their offsets."""
        runs, *longest = self.shape.bounds
        heads, width = self.shape.groups if of_keys else self.shape.heads, self.shape.width
        length = longest[of_keys]
        return {"dim": [runs, heads, length, width], "stride": [length * heads * width, width, heads * width, 1]}

    def tensor(self, of_keys: bool) -> Any:
        offsets = self.of_keys if of_keys else self.of_queries
        return self.graph.tensor(**self._layout(of_keys), data_type=self.dtype, ragged_offset=offsets, name="")

    def output(self, tensor: Any, of_keys: bool) -> None:
        layout = self._layout(of_keys)
        tensor.set_output(True).set_dim(layout["dim"]).set_stride(layout["stride"])
        tensor.set_ragged_offset(self.of_keys if of_keys else self.of_queries)

    @property
    def lse_layout(self) -> dict[str, list[int]]:
        runs, length, _ = self.shape.bounds
        heads = self.shape.heads
        return {"dim": [runs, heads, length, 1], "stride": [length * heads, 1, heads, 1]}

    def build(self) -> None:
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans([self.cudnn.heur_mode.A])
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace = max(1, self.graph.get_workspace_size())

    def run(self, q_limits: Tensor, k_limits: Tensor, tensors: dict[Any, Tensor]) -> None:
        heads, groups, width = self.shape.heads, self.shape.groups, self.shape.width
        q_limits, k_limits = (_filled(limits, self.shape.bounds.runs) for limits in (q_limits, k_limits))
        # [multiples, limits], in one kernel where queries and keys have the same limits.
        if q_limits.data_ptr() == k_limits.data_ptr():
            offsets = q_limits * _multiples(q_limits.device, heads * width, groups * width, heads)
            q_lengths = k_lengths = q_limits.diff()
        else:
            of_q = q_limits * _multiples(q_limits.device, heads * width, heads)
            of_k = k_limits * _multiples(k_limits.device, groups * width)
            offsets = torch.stack([of_q[0], of_k[0], of_q[1]])
            q_lengths, k_lengths = q_limits.diff(), k_limits.diff()
        of_limits = (self.of_queries, self.of_keys, self.of_lse)
        tensors = tensors | dict(zip(of_limits, offsets, strict=True))
        tensors |= {self.q_lengths: q_lengths, self.k_lengths: k_lengths}
        device = q_limits.device
        workspace = torch.empty(self.workspace, dtype=torch.uint8, device=device)
        handle = _handle(self.shape.device)
        self.cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        self.graph.execute(pointers, workspace.data_ptr(), handle=handle)


@functools.cache
def _multiples(device: torch.device, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)[:, None]


def _filled(limits: Tensor, runs: int) -> Tensor:
    """Returns limits [runs + 1], with runs without tokens at the end."""
    missing = runs + 1 - len(limits)
    return torch.cat([limits, limits[-1:].expand(missing)]) if missing else limits


class AttentionPlan:
    """Attention over rows of one shape, and its gradients. Raises what cuDNN raises if it cannot compute them."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        forward = _Graph(shape)
        self._inputs = [forward.tensor(of_keys) for of_keys in (False, True, True)]
        self._output, self._lse = forward.graph.sdpa(*self._inputs, is_inference=False, **forward.masks)
        forward.output(self._output, False)
        self._lse.set_output(True).set_data_type(forward.cudnn.data_type.FLOAT)
        self._lse.set_dim(forward.lse_layout["dim"]).set_stride(forward.lse_layout["stride"])
        self._lse.set_ragged_offset(forward.of_lse)
        forward.build()
        back = _Graph(shape)
        self._saved = [back.tensor(of_keys) for of_keys in (False, True, True, False, False)]
        lse = back.graph.tensor(
            **back.lse_layout, data_type=back.cudnn.data_type.FLOAT, ragged_offset=back.of_lse, name=""
        )
        self._saved.append(lse)
        self._gradients = back.graph.sdpa_backward(
            *self._saved, max_total_seq_len_q=shape.tokens, max_total_seq_len_kv=shape.tokens, **back.masks
        )  # fmt: skip
        for gradient, of_keys in zip(self._gradients, (False, True, True), strict=True):
            back.output(gradient, of_keys)
        back.build()
        self._forward, self._back = forward, back

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, q_limits: Tensor, k_limits: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Returns the output [T, h, d] and lse [T, h] float32; tokens of no run are not written."""
        output = torch.empty_like(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        names = (*self._inputs, self._output, self._lse)
        self._forward.run(q_limits, k_limits, dict(zip(names, (query, key, value, output, lse), strict=True)))
        return output, lse

    def backward(
        self,
        gradient: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        q_limits: Tensor,
        k_limits: Tensor,
    ) -> Gradients:
        """Returns the gradients of query [T, h, d], key and value [T, g, d]; those of tokens of no run are not written.

        gradient, output: [T, h, d]. lse: [T, h] float32.
        """
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        names, tensors = (*self._saved, *self._gradients), (query, key, value, output, gradient, lse, *found)
        self._back.run(q_limits, k_limits, dict(zip(names, tensors, strict=True)))
        return found
