"""Samples the next token of each sequence, with its log-prob.

B: sequences, R: sequences with top-k or top-p, V: vocabulary, S: blocks of the vocabulary, K: weights per row. Logits
are float32 [B, V].
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from slime.rollout.engines.embedded.model.params import SamplingParams

BLOCK = 256


def keyed_uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns float64 [B] in [0, 1) that depend only on the seeds and positions, both int64 [B].

    The finaliser of splitmix64 (Steele, Lea, Flood, OOPSLA 2014), applied to the seed and then to the position, so
    that a sequence draws the same numbers whatever else is in its batch.
    """
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds.astype(np.uint64)) + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = z + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def sample(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    generator: np.random.Generator,
    recorded: Collection[int] = (),
) -> tuple[torch.Tensor, torch.Tensor, dict[int, np.ndarray]]:
    """Returns (token ids int64 [B], log-probs float32 [B], nuclei) by inverse transform sampling.

    Overwrites the logits. The log-prob is over the whole vocabulary at the sequence's temperature (1 if it is greedy),
    as in SGLang: top-k and top-p restrict the choice but not the log-prob.

    positions: the length of each sequence so far, the counter of its keyed draws. recorded: indices of sequences whose
    nucleus is returned if they have top-k or top-p and are not greedy: the ids (int32) that these left. The log-prob of
    such a sequence is over its nucleus.
    """
    if any(p.temperature not in (0.0, 1.0) for p in params):
        logits_BV.div_(torch.tensor([[p.temperature or 1.0] for p in params], device=logits_BV.device))
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    likeliest = logits_BV[greedy].argmax(-1) if greedy else None
    weights_BV = logits_BV.sub_(logits_BV.amax(-1, keepdim=True)).exp_()
    sums_BS = _block_sums(weights_BV)
    nuclei: dict[int, np.ndarray] = {}
    log_probs_in_nuclei = logits_BV.new_zeros(0)
    if likeliest is not None and len(greedy) == len(params):
        ids = likeliest
    else:
        uniforms = torch.from_numpy(_uniforms(params, positions, generator)).to(logits_BV.device)
        ids = _draw(weights_BV, sums_BS, uniforms)
        if rows := [i for i, p in enumerate(params) if p.top_k != -1 or p.top_p < 1.0]:
            allowed_RV = _restrict(weights_BV[rows] / sums_BS[rows].sum(-1, keepdim=True), [params[i] for i in rows])
            sums_RS = _block_sums(allowed_RV)
            ids[rows] = _draw(allowed_RV, sums_RS, uniforms[rows])
            kept = [i for i, row in enumerate(rows) if row in recorded and params[row].temperature != 0]
            if kept:
                allowed_RV, sums_RS, kept_rows = allowed_RV[kept], sums_RS[kept], [rows[i] for i in kept]
                nuclei = dict(zip(kept_rows, _nonzero(allowed_RV), strict=True))
                log_probs_in_nuclei = allowed_RV.gather(-1, ids[kept_rows][:, None])[:, 0].double().log()
                log_probs_in_nuclei -= sums_RS.sum(-1).log()
        if likeliest is not None:
            ids[greedy] = likeliest
    log_probs = weights_BV.gather(-1, ids[:, None])[:, 0].double().log() - sums_BS.sum(-1).log()
    if nuclei:
        log_probs[list(nuclei)] = log_probs_in_nuclei
    return ids, log_probs.float(), nuclei


def _nonzero(allowed_RV: torch.Tensor) -> list[np.ndarray]:
    """Returns the ids of the tokens with a weight other than 0, int32, for each row."""
    row_and_id = allowed_RV.nonzero().cpu().numpy()
    counts = np.bincount(row_and_id[:, 0], minlength=len(allowed_RV))
    return np.split(row_and_id[:, 1].astype(np.int32), np.cumsum(counts)[:-1])


def _uniforms(params: Sequence[SamplingParams], positions: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    draws = generator.random(len(params))
    keyed = [i for i, p in enumerate(params) if p.sampling_seed is not None]
    if keyed:
        seeds = np.array([params[i].sampling_seed for i in keyed], dtype=np.int64)
        draws[keyed] = keyed_uniforms(seeds, np.array([positions[i] for i in keyed], dtype=np.int64))
    return draws


def _block_sums(weights_BV: torch.Tensor) -> torch.Tensor:
    """Returns float64 [B, S], the sums over blocks of BLOCK tokens; the last block may be shorter."""
    whole = weights_BV.shape[-1] // BLOCK * BLOCK
    blocks = [weights_BV[:, :whole].unflatten(-1, (-1, BLOCK)).sum(-1)] if whole else []
    if whole < weights_BV.shape[-1]:
        blocks.append(weights_BV[:, whole:].sum(-1, keepdim=True))
    return torch.cat(blocks, -1).double()


def _draw(weights_BV: torch.Tensor, sums_BS: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Returns one token id per sequence, int64 [B]: finds the block that a draw falls into, then the token in it, which
    is much cheaper than a cumulative sum over all tokens."""
    last = weights_BV.shape[-1] - 1
    block_B1, rest_B1 = _search(sums_BS, uniforms_B[:, None])
    tokens_BK = block_B1 * BLOCK + torch.arange(BLOCK, device=weights_BV.device)
    inside_BK = weights_BV.gather(-1, tokens_BK.clamp(max=last)).double().masked_fill_(tokens_BK > last, 0.0)
    return (block_B1 * BLOCK + _search(inside_BK, rest_B1)[0])[:, 0].clamp_(max=last)


def _search(weights_BK: torch.Tensor, uniforms_B1: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (the index that the draw falls on [B, 1], the fraction of its weight before the draw [B, 1])."""
    cumulative_BK = weights_BK.cumsum(-1)
    # The target stays below the sum, so that rounding cannot push a draw past the last weight that is not 0.
    target_B1 = uniforms_B1 * cumulative_BK[:, -1:] * (1 - 2.0**-50)
    index_B1 = torch.searchsorted(cumulative_BK, target_B1, right=True).clamp_(max=weights_BK.shape[-1] - 1)
    weight_B1 = weights_BK.gather(-1, index_B1)
    before_B1 = cumulative_BK.gather(-1, index_B1) - weight_B1
    return index_B1, ((target_B1 - before_B1) / weight_B1).clamp_(0.0, 1.0)


def _restrict(probs_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    vocabulary = probs_RV.shape[-1]
    ordered, order = probs_RV.sort(-1, descending=True)
    most = [vocabulary if p.top_k == -1 else min(p.top_k, vocabulary) for p in params]
    top_k = torch.tensor(most, device=order.device)
    top_p = torch.tensor([p.top_p for p in params], device=order.device)
    before = ordered.cumsum(-1) - ordered  # probability of the more likely tokens
    ranks = torch.arange(vocabulary, device=order.device)
    # The most likely token stays, even if float32 rounds top-p to 0.
    ordered[((ranks >= top_k[:, None]) | (before >= top_p[:, None])) & (ranks > 0)] = 0.0
    return torch.zeros_like(ordered).scatter_(-1, order, ordered)
