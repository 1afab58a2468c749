"""The loss of --loss-type custom_loss: a function of the user over packed rows.

    fn(args, batch, sum_of_sample_mean) -> (loss, metrics)            runs on every layout, compiled
    fn(args, batch, logits, sum_of_sample_mean) -> (loss, metrics)    needs a rank that has the whole vocabulary

    S  samples of the row    K  their response tokens, end to end    J  those with loss mask 1    V  vocabulary

`batch` is a dictionary of lists with one entry for each sample: what `rollout_data.as_lists` has, and

    policy_log_probs    [R] with gradient: of the policy as it is now; 0 where the loss mask is 0
    policy_entropy      [R] with gradient, with --entropy-coef other than 0, else None
    unconcat_tokens     ids of prompt and response
    sample_indices, group_indices

`log_probs` there are those of the old policy. `logits` are [J, V], and sum_of_sample_mean maps [K] to the sum over
samples of their weighted mean. The trainer divides the loss and the metrics of a row by the number of trajectories of
the update (of its tokens with --calculate-per-token-loss) and adds up rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slime.trainer.algorithms.aggregation import weighted_sum
from slime.trainer.backends.base import Outputs
from slime.trainer.batching.packing import PackedBatch
from slime.trainer.settings.trainer import TrainerSettings
from slime.trainer.step import rollout_data
from slime.types.errors import PluginError
from slime.types.plugin_contracts import CONTRACTS
from slime.types.plugins import load_setting
from slime.types.sample import Sample

if TYPE_CHECKING:
    from slime.trainer.step.loss import Targets

FLAG = "--custom-loss-function-path"


class CustomLoss:
    """The function that the settings name, loaded and checked."""

    def __init__(self, settings: TrainerSettings, args: Any) -> None:
        """args: what plug-ins receive."""
        self._function = load_setting(settings, "custom_loss_function_path")
        self._path = settings.custom_loss_function_path
        self._args = args
        assert self._function is not None
        self.takes_logits = "logits" in CONTRACTS[FLAG].alternative(self._function)

    def __call__(
        self,
        batch: PackedBatch,
        outputs: Outputs,
        targets: Targets | None,
        samples: Sequence[Sample],
        denominator: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of one row, and its metrics. Raises PluginError for an answer of another form."""
        assert self._function is not None

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            return weighted_sum(values, batch.weights) * denominator

        data = _data(batch, outputs, targets, samples)
        inputs = [data, outputs.logits] if self.takes_logits else [data]
        answer = self._function(self._args, *inputs, sum_of_sample_mean)
        loss, metrics = self._checked(answer)
        of_row = {name: torch.as_tensor(value).detach() / denominator for name, value in metrics.items()}
        return loss / denominator, of_row

    def _checked(self, answer: Any) -> tuple[Tensor, Mapping[str, Any]]:
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], Mapping):
            raise self._error(f"it returned {_described(answer)}", "(loss, metrics): a tensor and a dictionary")
        loss, metrics = answer
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise self._error(f"its loss is {_described(loss)}", "a tensor of one number, with a gradient")
        for name, value in metrics.items():
            if torch.as_tensor(value).numel() != 1:
                raise self._error(f"its metric {name!r} is {_described(value)}", "one number")
        return loss.reshape(()), metrics

    def _error(self, problem: str, expected: str) -> PluginError:
        return PluginError(
            f"{FLAG} {self._path}: {problem}, expected {expected}", field=FLAG, value=self._path, expected=expected
        )


def _data(batch: PackedBatch, outputs: Outputs, targets: Targets | None, samples: Sequence[Sample]) -> dict[str, Any]:
    data = rollout_data.as_lists(batch, targets)
    if data["log_probs"] is None:
        # In the first update since the samples were generated, the old policy is this one.
        data["log_probs"] = list(outputs.log_probs.detach().split(batch.lengths))
    entropy = None if outputs.entropy is None else list(outputs.entropy.split(batch.lengths))
    return data | {
        "policy_log_probs": list(outputs.log_probs.split(batch.lengths)),
        "policy_entropy": entropy,
        "unconcat_tokens": [torch.as_tensor(s.array("tokens")).to(batch.mask.device, torch.int64) for s in samples],
        "sample_indices": [sample.index for sample in samples],
        "group_indices": [sample.group_index for sample in samples],
    }


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}" + ("" if value.requires_grad else " without a gradient")
    return f"a {type(value).__name__}"
