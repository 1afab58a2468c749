"""Operations by compiled loops, each in one pass over the tokens, where torch makes several."""

from __future__ import annotations

import torch
from torch import Tensor

from slime.rollout.engines.embedded.dense.loops import compile_loops
from slime.rollout.engines.embedded.dense.matrices import Matrix
from slime.rollout.engines.embedded.dense.ops import Heads, Ops, Places
from slime.rollout.engines.embedded.dense.products import PanelMatrix, Products, multiplies_pairs


class LoopOps(Ops):
    """Operations of compiled loops; the first ones of a machine take seconds to compile."""

    def __init__(self, heads: Heads, eps: float, dtype: torch.dtype) -> None:
        super().__init__(heads, eps, dtype)
        loops = compile_loops(dtype, heads.size, heads.queries // heads.kv)
        self._norm, self._gate, self._rotate, self._attend = loops
        self._products = Products() if dtype == torch.bfloat16 and multiplies_pairs() else None
        self._kept: dict[str, Tensor] = {}
        self._eps_1 = torch.tensor([eps], dtype=torch.float32)
        self._scale_1 = torch.tensor([heads.scale], dtype=torch.float32)

    def _packed(self, weight_OI: Tensor, bias_O: Tensor | None) -> Matrix:
        if self._products is None or weight_OI.shape[1] % 2:
            return super()._packed(weight_OI, bias_O)
        return PanelMatrix(self._products, weight_OI, bias_O)

    def normed(self, hidden_NE: Tensor, added_NE: Tensor | None, weight_E: Tensor) -> Tensor:
        count, width = hidden_NE.shape
        out_NE = self._memory("norm", count, width)
        self._norm(count, hidden_NE, added_NE, weight_E, self._eps_1, out_NE, width)
        return out_NE

    def gated(self, gate_up_NI: Tensor) -> Tensor:
        count, width = len(gate_up_NI), gate_up_NI.shape[1] // 2
        out_NI = self._memory("gate", count, width)
        self._gate(count, gate_up_NI, out_NI, width)
        return out_NI

    def rotated(self, qkv_NE: Tensor, norms_HD: Tensor | None, kv_R2KCD: Tensor, places: Places) -> Tensor:
        heads, count = self.heads, len(qkv_NE)
        query_NHD = self._memory("query", count, heads.queries * heads.size).view(count, heads.queries, heads.size)
        self._rotate(
            count, qkv_NE, places.cosines, places.sines, norms_HD, self._eps_1, places.rows, places.positions,
            kv_R2KCD, kv_R2KCD.stride(0), heads.queries, heads.kv, kv_R2KCD.shape[3], heads.size, query_NHD,
        )  # fmt: skip
        return query_NHD

    def attended(self, query_BHD: Tensor, kv_R2KCD: Tensor, places: Places) -> Tensor:
        heads, count = self.heads, places.decoding
        out_BE = self._memory("seen", count, heads.queries * heads.size)
        self._attend(
            count * heads.kv, query_BHD, places.positions, self._scale_1, kv_R2KCD, kv_R2KCD.stride(0), heads.queries,
            heads.kv, kv_R2KCD.shape[3], places.longest, out_BE,
        )  # fmt: skip
        return out_BE

    def _memory(self, name: str, count: int, width: int) -> Tensor:
        """Returns a tensor [count, width] whose contents last until the next call with the same name."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < count or kept.shape[1] != width:
            kept = self._kept[name] = torch.empty(count, width, dtype=self.dtype)
        return kept[:count]
