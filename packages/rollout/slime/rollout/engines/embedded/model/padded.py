"""A batch that decodes through `transformers`, for any model that it can load.

U: distinct prompts of the batch, B: sequences still running, P: length of the longest prompt, T: P plus the decoded
tokens. Prompts are padded on the left. Samples of one prompt share its prefill: U rows are computed and copied to B.
Keys and values are a rectangle of B x T tokens; a recurrent state counts as the tokens that take its memory. When they
exceed the planned memory, the shortest sequences leave, and continue from their tokens in a later batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from slime.rollout.engines.embedded.dense.kv_cache import tokens_in_memory
from slime.rollout.engines.embedded.model.decode import Batch
from slime.rollout.engines.embedded.model.images import embed_images, grid_positions
from slime.rollout.engines.embedded.model.loading import Loaded
from slime.rollout.engines.embedded.model.response import Response
from slime.types.models.vision import fed_to_layers

# Finished sequences are dropped from the cache once they are this fraction of its rows: each copy costs about a step.
COMPACT_FRACTION = 0.25
# When rows have to leave, this fraction of those that would fit leaves too, so that not every step copies the cache.
SLACK_FRACTION = 0.125
_RECURRENT = "linear_attention"


class PaddedBatch(Batch):
    """All sequences join before the first step."""

    joinable = False

    def __init__(
        self, loaded: Loaded, rng: np.random.Generator, max_tokens: int | None = None, fraction: float = 0.5
    ) -> None:
        """max_tokens: the most tokens of the rectangle; None: as many as `fraction` of the memory holds."""
        super().__init__(loaded, rng)
        self._model = loaded.model
        self.max_tokens = max_tokens or tokens_in_memory(token_bytes(self._model), fraction, self._model.device)
        self._state_tokens = state_tokens(self._model)
        self._vision = loaded.vision
        self._routing = loaded.routing
        self._device = next(self._model.parameters()).device
        self._rows: list[Response] = []
        self._cache: Any = None
        self._mask: torch.Tensor | None = None
        # [B, 1]: how far positions are ahead of the number of earlier tokens, because an image counts by its grid.
        self._ahead: torch.Tensor | None = None

    @property
    def running(self) -> list[Response]:
        return [s for s in self._rows if s.finish_reason is None]

    @property
    def free_tokens(self) -> int:
        return self.max_tokens

    @property
    def used_tokens(self) -> int:
        mask = self._mask
        return 0 if mask is None else mask.numel() + len(mask) * self._state_tokens

    def add(self, responses: Sequence[Response]) -> None:
        assert self._cache is None
        self._rows += responses

    @torch.inference_mode()
    def step(self) -> None:
        logits_BV = self._prefill() if self._cache is None else self._decode()
        self._emit(self._rows, logits_BV.to(torch.float32, copy=True))

    def _prefill(self) -> torch.Tensor:
        index: dict[tuple[str, tuple[int, ...]], int] = {}
        rows: list[int] = []
        firsts: list[Response] = []
        for s in self._rows:
            key = s.key
            s.cached_tokens = len(key[1]) if key in index else 0
            if key not in index:
                firsts.append(s)
            rows.append(index.setdefault(key, len(index)))
        prompts = [prompt for _, prompt in index]
        longest = max(map(len, prompts))
        ids_UP = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask_UP = torch.zeros(len(prompts), longest, dtype=torch.long)
        for i, prompt in enumerate(prompts):
            ids_UP[i, longest - len(prompt) :] = torch.tensor(prompt)
            mask_UP[i, longest - len(prompt) :] = 1
        ids_UP, mask_UP = ids_UP.to(self._device), mask_UP.to(self._device)
        inputs: dict[str, torch.Tensor] = {"input_ids": ids_UP}
        feeding: AbstractContextManager[None] = nullcontext()
        if self._vision is not None and any(s.media for s in firsts):
            seen = embed_images(self._model, self._vision, ids_UP, firsts)
            inputs = {"inputs_embeds": seen.embedded}
            feeding = fed_to_layers(self._model, seen.places, seen.in_layers)
        positions = _positions(mask_UP)
        if self._vision is not None and self._vision.grids:
            positions, ahead_U1 = grid_positions(self._vision, positions, firsts)
            self._ahead = ahead_U1[torch.tensor(rows, device=self._device)]
        inputs |= {"attention_mask": mask_UP, "position_ids": positions}
        with feeding:
            output = self._model(**inputs, use_cache=True, logits_to_keep=1)
        self._cache = output.past_key_values
        self._mask = mask_UP
        if self._routing is not None:
            experts = self._routing.take(len(prompts))
            for s, row in zip(self._rows, rows, strict=True):
                s.add_experts(experts[row, longest - len(prompts[row]) :])
        logits_UV = output.logits[:, -1]
        if rows == list(range(len(prompts))):
            return logits_UV
        chosen = torch.tensor(rows, device=self._device)
        _select(self._cache, chosen)
        self._mask = mask_UP[chosen]
        return logits_UV[chosen]

    def _decode(self) -> torch.Tensor:
        self._compact()
        assert self._mask is not None
        ids_B1 = torch.tensor([[s.output_ids[-1]] for s in self._rows], device=self._device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self._rows), 1)], dim=1)
        positions_B1 = self._mask.sum(1, keepdim=True) - 1
        output = self._model(
            input_ids=ids_B1,
            attention_mask=self._mask,
            position_ids=positions_B1 if self._ahead is None else positions_B1 + self._ahead,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._cache = output.past_key_values
        if self._routing is not None:
            for s, experts in zip(self._rows, self._routing.take(len(self._rows)), strict=True):
                if s.finish_reason is None:
                    s.add_experts(experts)
        return output.logits[:, -1]

    def _compact(self) -> None:
        assert self._mask is not None
        kept = [i for i, s in enumerate(self._rows) if s.finish_reason is None]
        fitting = max(1, self.max_tokens // (self._mask.shape[1] + 1 + self._state_tokens))
        if len(kept) > fitting:
            # The shortest sequences cost least to compute again, and the others are closer to their end.
            longest = sorted(kept, key=lambda i: len(self._rows[i].key[1]), reverse=True)
            staying = max(1, fitting - int(SLACK_FRACTION * fitting))
            self._left += [self._rows[i] for i in longest[staying:]]
            kept = sorted(longest[:staying])
        elif len(self._rows) <= fitting and len(self._rows) - len(kept) < max(1, COMPACT_FRACTION * len(self._rows)):
            return
        chosen = torch.tensor(kept, device=self._device)
        _select(self._cache, chosen)
        self._mask = self._mask[chosen]
        if self._ahead is not None:
            self._ahead = self._ahead[chosen]
        self._rows = [self._rows[i] for i in kept]


def token_bytes(model: Any) -> int:
    """Returns the bytes of a token's keys and values in all layers, computed from the model's configuration."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    numbers = 2 * heads * head_dim
    if getattr(text, "kv_lora_rank", None):
        # Latent attention keeps one compressed vector for all heads, and its indexer, if it has one, another.
        numbers = text.kv_lora_rank + text.qk_rope_head_dim + (getattr(text, "index_head_dim", None) or 0)
    recurrent = (getattr(text, "layer_types", None) or ()).count(_RECURRENT)
    return (int(text.num_hidden_layers) - recurrent) * numbers * model.dtype.itemsize


def state_tokens(model: Any) -> int:
    """Returns how many tokens' keys and values take the memory of a sequence's recurrent state, rounded up."""
    text = model.config.get_text_config()
    layers = (getattr(text, "layer_types", None) or ()).count(_RECURRENT)
    if not layers:
        return 0
    # States are float32; the last inputs of the convolution, a few vectors, are in the model's type.
    state = text.linear_num_value_heads * text.linear_key_head_dim * text.linear_value_head_dim * 4
    return -(-layers * state // max(1, token_bytes(model)))


def _select(cache: Any, rows: torch.Tensor) -> None:
    """Keeps these rows of a cache, each as often as it occurs."""
    for layer in cache.layers:
        # Recurrent states have no batch_select_indices, but the reordering of beam search is the same.
        select = getattr(layer, "batch_select_indices", None) or layer.reorder_cache
        select(rows)


def _positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_(min=0)
