"""The gated delta rule and its short convolution over packed rows, in plain torch: both begin anew with every run.

    T  tokens of the row       R  runs         C  tokens of a chunk     N  chunks of all runs
    h  heads of values         g  heads of queries and keys, h a multiple of g
    d  width of a head of queries and keys     v  of a head of values

With q and k of length 1 (q times d ** -0.5), the state S [d, v] of a head starts at 0 and goes, token by token,

    S = exp(decay) S        S = S + k (beta (value - k^T S))^T        output = q^T S

(Yang, Kautz, Hatamizadeh: Gated Delta Networks, 2024). Inside a chunk the updates are one triangular system, and the
states go from chunk to chunk, for all runs at once. All of it is at least float32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slime.trainer.batching.runs import Runs
from slime.types.errors import NotAvailable

CHUNK = 64
# As in the kernels that these models were trained with.
_EPSILON = 1e-6


def check_runs(runs: Runs) -> None:
    """Raises NotAvailable for rows whose runs see other runs: a state holds what came before in its own run."""
    if runs.shared is not None or runs.keys is not None:
        raise NotAvailable("layers with a recurrent state cannot read a prompt that samples share", field="runs")


def causal_convolution(values: Tensor, weight: Tensor, runs: Runs) -> Tensor:
    """Returns the weighted sum of each token and those before it in its run; the last weight is for the token itself.

    values: [T, channels], weight: [channels, taps] -> [T, channels].
    """
    taps = weight.shape[1]
    places = torch.arange(len(values), device=values.device)
    limits = runs.q_limits.to(places.dtype)
    # The last limit that is not behind the token: empty runs at the end of a padded row start where others do.
    firsts = limits[torch.searchsorted(limits, places, right=True) - 1]
    total = values * weight[:, -1]
    for back in range(1, taps):
        earlier = F.pad(values, (0, 0, back, 0))[: len(values)]
        inside = (places - back >= firsts)[:, None]
        total = total + torch.where(inside, earlier, 0.0) * weight[:, -1 - back]
    return total


@torch.compiler.disable
def gated_delta_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, runs: Runs) -> Tensor:
    """[T, g, d], [T, g, d], [T, h, v], [T, h] at most 0, [T, h] from 0 to 1 -> [T, h, v]. Not compiled: the number of
    chunks is another one for each row. Computed again in the backward pass, which would have to keep twenty times its
    inputs otherwise."""
    check_runs(runs)
    if torch.is_grad_enabled():
        arguments = query, key, value, decay, beta, runs
        output: Tensor = checkpoint(_rule, *arguments, use_reentrant=False, preserve_rng_state=False)
        return output
    return _rule(query, key, value, decay, beta, runs)


def _rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, runs: Runs) -> Tensor:
    dtype, groups = value.dtype, value.shape[1] // key.shape[1]
    exact = torch.promote_types(dtype, torch.float32)
    chunks = _Chunks.of(runs, value.device)
    query, key = (_unit(t.to(exact)).repeat_interleave(groups, 1) for t in (query, key))
    q, k, v = (chunks.cut(t) for t in (query * query.shape[-1] ** -0.5, key, value.to(exact)))
    beta_, decay_ = (chunks.cut(t.to(exact)[..., None]) for t in (beta, decay))
    # [N, h, C, 1]: the log of the decay from the start of the chunk.
    passed = decay_.cumsum(2)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=value.device).triu(1)
    # [N, h, C, C]: from token j to token i. Masked before exp, which would overflow.
    between = (passed - passed.transpose(2, 3)).masked_fill(later, float("-inf")).exp()
    keys_beta = k * beta_
    system = keys_beta @ k.transpose(2, 3) * between
    right = torch.cat([v * beta_, keys_beta * passed.exp()], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    new_values, read_by = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = q @ k.transpose(2, 3) * between
    q_from_start, to_end = q * passed.exp(), (passed[:, :, -1:] - passed).exp() * k
    over_chunk = passed[:, :, -1:].exp()
    outputs = []
    state = value.new_zeros((len(chunks.firsts), *value.shape[1:2], k.shape[-1], v.shape[-1]), dtype=exact)
    for number, active in enumerate(chunks.active):
        at = chunks.firsts[:active] + number
        state = state[:active]
        new = new_values[at] - read_by[at] @ state
        outputs.append(q_from_start[at] @ state + inside[at] @ new)
        state = state * over_chunk[at] + to_end[at].transpose(2, 3) @ new
    return chunks.join(torch.cat(outputs)).to(dtype)


def _unit(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + _EPSILON)


class _Chunks(NamedTuple):
    """Runs cut into chunks; the last of a run is padded.

    places: [T] the place of each token in the chunks laid end to end. firsts: [R] the first chunk of each run, the runs
    with most chunks first. active: how many runs have a first, second, ... chunk. total: N. order: [N] chunks in the
    order of the outputs: first, second, ... of the active runs.
    """

    places: Tensor
    firsts: Tensor
    active: list[int]
    total: int
    order: Tensor

    @staticmethod
    def of(runs: Runs, device: torch.device) -> _Chunks:
        lengths = np.array(runs.q_lengths or runs.q_limits.diff().tolist(), dtype=np.int64)
        lengths = lengths[lengths > 0]
        counts = -(-lengths // CHUNK)
        firsts, starts = np.cumsum(counts) - counts, np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(firsts * CHUNK - starts, lengths)
        longest_first = np.argsort(-counts, kind="stable")
        active = [int((counts > number).sum()) for number in range(counts.max(initial=0))]
        order = np.concatenate([firsts[longest_first[:n]] + number for number, n in enumerate(active)])
        return _Chunks(
            torch.from_numpy(places).to(device), torch.from_numpy(firsts[longest_first]).to(device), active,
            int(counts.sum()), torch.from_numpy(order).to(device),
        )  # fmt: skip

    def cut(self, tensor: Tensor) -> Tensor:
        """[T, h, x] -> [N, h, C, x], with zeros where there is no token."""
        padded = tensor.new_zeros((self.total * CHUNK, *tensor.shape[1:])).index_copy(0, self.places, tensor)
        return padded.unflatten(0, (self.total, CHUNK)).transpose(1, 2)

    def join(self, outputs: Tensor) -> Tensor:
        """[N, h, C, x] in the order of the outputs -> [T, h, x]."""
        ordered = outputs.new_empty(outputs.shape).index_copy(0, self.order, outputs)
        return ordered.transpose(1, 2).flatten(0, 1)[self.places]
