"""Compares the weights of the running model with an earlier copy, as SGLang's `/weights_checker` does."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from slime.rollout.engines.embedded.model.weights import ModelWeights
from slime.types.errors import InvalidField, WrongState, counted

ACTIONS = ("checksum", "compare", "reset_tensors", "snapshot")


class WeightChecker:
    """Shows that a weight update reaches every tensor: call snapshot, reset_tensors, update the weights, then compare.

    Not thread-safe: only the scheduler's thread calls it.
    """

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._snapshot: dict[str, torch.Tensor] | None = None

    def run(self, action: str) -> dict[str, Any]:
        """Runs one of ACTIONS and returns SGLang's answer.

        Raises InvalidField for an unknown action, or naming the tensors that differ; WrongState for compare without a
        snapshot.
        """
        if action not in ACTIONS:
            raise InvalidField("action", action, f"one of {', '.join(ACTIONS)}")
        tensors = self._weights.tensors
        if action == "snapshot":
            self._snapshot = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        elif action == "reset_tensors":
            self._weights.write({name: torch.rand(tensor.shape) for name, tensor in tensors.items()})
        elif action == "compare":
            self._compare(tensors)
        answer: dict[str, Any] = {"success": True, "message": "Success."}
        return answer | (_checksums(tensors) if action == "checksum" else {})

    def _compare(self, tensors: dict[str, torch.Tensor]) -> None:
        if self._snapshot is None:
            raise WrongState("nothing to compare with: no snapshot was taken", field="action", value="compare")
        different = [name for name, kept in self._snapshot.items() if not torch.equal(kept, tensors[name].cpu())]
        if different:
            raise InvalidField(
                different[0], f"different, with {counted(len(different) - 1, 'other')}", "what the snapshot has",
                f"check tensor equality failed: {', '.join(different[:10])}",
            )  # fmt: skip


def _checksums(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    checksums = {
        name: hashlib.sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }
    whole = hashlib.sha256("".join(name + checksums[name] for name in sorted(checksums)).encode()).hexdigest()
    place = dict.fromkeys(("tp_rank", "dp_rank", "pp_rank", "rank"), 0) | dict.fromkeys(
        ("tp_size", "dp_size", "pp_size", "size"), 1
    )
    rank = {"checksums": checksums, "per_gpu_checksum": whole, "parallelism_info": place}
    return {"ranks": [rank], "per_engine_checksum": hashlib.sha256(whole.encode()).hexdigest()}
