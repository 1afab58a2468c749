"""Names the samples and parameters that made the gradient of an update infinite or not a number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from slime.trainer.backends.base import Backend, NonFiniteGradient
from slime.trainer.process.collective import Ranks
from slime.trainer.step.targets import Work

_MOST_NAMED = 3


def find_cause(error: NonFiniteGradient, work: Work, backend: Backend, ranks: Ranks) -> str:
    """Says which samples and which parameters are not finite on any rank. Collective.

    The policy's log-probs are computed once more, one forward pass for each micro-batch.
    """
    local_causes = {"samples": list(_samples(work, backend)), "parameters": error.parameters}
    samples: list[str] = []
    parameters: list[str] = []
    for found in ranks.gather(local_causes):
        samples += [sample for sample in found["samples"] if sample not in samples]
        parameters += [name for name in found["parameters"] if name not in parameters]
    causes = [_listed(samples)] if samples else ["every sample's log-probs and advantages are finite"]
    if parameters:
        causes.append(f"the gradient of {_listed(parameters)} is not finite")
    return "; ".join(causes)


def _samples(work: Work, backend: Backend) -> Iterator[str]:
    for number, outputs in enumerate(backend.scores(work.batches)):
        batch, targets = work.batches[number], work.target(number)
        if batch is None:
            continue
        values: dict[str, Tensor | None] = {"the policy's log-probs": None if outputs is None else outputs.log_probs}
        if targets is not None:
            values |= {
                "advantages": targets.advantages,
                "old log-probs": targets.old_log_probs,
                "reference log-probs": targets.ref_log_probs,
                "rollout_log_probs": batch.rollout_log_probs,
            }
        for name, tensor in values.items():
            if tensor is None:
                continue
            finite = (tensor.isfinite() | (batch.mask == 0)).split(batch.lengths)
            for position, part in zip(batch.positions, finite, strict=True):
                sample = work.samples[position]
                absent = name == "rollout_log_probs" and sample.rollout_log_probs is None
                if not absent and not bool(part.all()):
                    yield f"sample {sample.index} (micro-batch {number}) has {name} that are not finite"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
