"""The plan of an iteration: everything that depends on all of its samples, as a JSON object that the buffer stores.

    format, step, num_samples, num_rollouts     integers
    raw_rewards, rewards [S]                    float64; rewards are the training rewards
    lengths, response_lengths [S]               tokens
    groups [S]                                  group indexes; samples of a group mostly have the same prompt
    weights [S]                                 per-token weight of each sample in its update's loss
    dropped                                     positions of trailing trajectories that fill no update
    updates[u].num_rollouts                     trajectories whose mean is the loss
    updates[u].train, .skipped                  positions that need a forward pass; that provably add no gradient
    updates[u].num_tokens                       tokens with loss mask 1, at least one for each sample
    updates[u].skipped_weight                   sum over the skipped ones of weight * tokens with loss mask 1

A position is an index into the samples of a sealed step. The plan knows no rank: `assign` cuts an update for any number
of them, so a step that was planned by two ranks can be replayed by one. The buffer stores it `packed`.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime.trainer.algorithms.aggregation import sample_weights
from slime.trainer.algorithms.estimators import find_estimator
from slime.trainer.algorithms.rewards import normalize_rewards
from slime.trainer.batching.schedule import Lengths, MicroBatch, schedule
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.clients.buffer import SealedStep
from slime.types.errors import InvalidField, InvalidSetting, counted
from slime.types.sample.summary import SampleSummary

FORMAT, PACKED_FORMAT = 1, 2
_FLOATS = dict.fromkeys(("raw_rewards", "rewards", "weights"), "<f8")
_INTEGERS = dict.fromkeys(("lengths", "response_lengths", "groups", "dropped", "train", "skipped"), "<i8")
_PACKED = _FLOATS | _INTEGERS


@dataclasses.dataclass(frozen=True)
class Planner:
    """Plans steps according to one trainer's settings; `plan` is a pure function of its arguments.

    feeds_all: do not skip any sample, see `Backend.needs_every_sample`.
    """

    settings: TrainerSettings
    feeds_all: bool = False

    def plan(
        self,
        step: int,
        summaries: Sequence[SampleSummary],
        processed: tuple[Sequence[float], Sequence[float]] | None = None,
        rollout_mask_sums: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        """Plans a step.

        processed: (raw rewards, training rewards) from a custom function, which replace the built-in ones.
        rollout_mask_sums: for each sample, the divisor of its trajectory's mean, instead of the sum of loss masks.

        Raises InvalidField for a reward that is not a finite number, InvalidSetting if there are too few samples for an
        update.
        """
        groups, removed = _column(summaries, "group_index"), _column(summaries, "remove_sample")
        rollouts = [_rollout_key(id_, i) for i, id_ in enumerate(_column(summaries, "rollout_id"))]
        raw, rewards = processed or self.rewards(summaries, groups, rollouts, removed)
        masked = zip(_column(summaries, "loss_mask_sum"), removed, strict=True)
        mask_sums = [0 if is_removed else int(mask_sum) for mask_sum, is_removed in masked]
        per_rollout: dict[Any, int] = {}
        for key, mask_sum in zip(rollouts, mask_sums, strict=True):
            per_rollout[key] = per_rollout.get(key, 0) + mask_sum
        if rollout_mask_sums is not None:
            per_rollout = {key: int(total) for key, total in zip(rollouts, rollout_mask_sums, strict=True)}
        split = self.split_rollouts(list(per_rollout))
        update_of = {key: number for number, keys in enumerate(split) for key in keys}
        dropped: list[int] = []
        positions_of: list[list[int]] = [[] for _ in split]
        for i, key in enumerate(rollouts):
            number = update_of.get(key)
            (dropped if number is None else positions_of[number]).append(i)
        weights = [0.0] * len(summaries)
        updates, trained = [], 0
        skips, skips_zeros = self._skips()
        for keys, positions in zip(split, positions_of, strict=True):
            own_sums = [mask_sums[i] for i in positions]
            of_update = sample_weights(
                [per_rollout[rollouts[i]] for i in positions],
                own_sums,
                len(keys),
                per_token=self.settings.calculate_per_token_loss,
                divisor=self.settings.loss_divisor,
            )
            for position, weight in zip(positions, of_update, strict=True):
                weights[position] = weight
            train: list[int] = []
            skipped: list[int] = []
            for i, mask_sum in zip(positions, own_sums, strict=True):
                useless = skips and (mask_sum == 0 or (skips_zeros and rewards[i] == 0.0))
                (skipped if useless else train).append(i)
            tokens = sum(own_sums)
            trained += tokens
            updates.append({
                "num_rollouts": len(keys), "num_tokens": tokens + own_sums.count(0), "train": train, "skipped": skipped,
                "skipped_weight": sum(weights[i] * mask_sums[i] for i in skipped),
            })  # fmt: skip
        if self.settings.normalize_advantages and not trained:
            raise InvalidField("loss_mask", 0, f"a token to train in step {step}, for --normalize-advantages")
        return {
            "format": FORMAT, "step": step, "num_samples": len(summaries), "num_rollouts": len(per_rollout),
            "raw_rewards": list(raw), "rewards": list(rewards), "weights": weights,
            "lengths": _column(summaries, "total_length"),
            "response_lengths": _column(summaries, "response_length"),
            "groups": groups,
            "dropped": dropped, "updates": updates,
        }  # fmt: skip

    def rewards(
        self,
        summaries: Sequence[SampleSummary],
        groups: Sequence[int],
        rollouts: Sequence[Any],
        removed: Sequence[bool],
    ) -> tuple[list[float], list[float]]:
        """Returns (raw, training) rewards, [S] each. A removed sample counts if it has a reward."""
        raw: list[float | None] = [
            value if type(value) is float and math.isfinite(value) else self._reward(value, removed[i], summaries, i)
            for i, value in enumerate(_column(summaries, "reward"))
        ]
        scored = [i for i, value in enumerate(raw) if value is not None]
        estimator = find_estimator(self.settings.advantage_estimator)
        normalized = normalize_rewards(
            [value for value in raw if value is not None],
            [groups[i] for i in scored],
            [rollouts[i] for i in scored],
            baseline=estimator.baseline if self.settings.rewards_normalization else None,
            scale=self.settings.grpo_std_normalization and estimator.scale,
            over_iteration=self.settings.grpo_std_scope == "batch",
        )
        training = [0.0] * len(raw)
        for i, reward in zip(scored, normalized, strict=True):
            training[i] = reward
        return [0.0 if value is None else value for value in raw], training

    def _reward(self, value: Any, removed: bool, summaries: Sequence[SampleSummary], position: int) -> float | None:
        key = self.settings.reward_key
        if key is not None and isinstance(value, dict):
            if key not in value:
                raise InvalidField("reward", sorted(value), f"a key {key!r} (sample {summaries[position].index})")
            value = value[key]
        if value is None and (removed or self.settings.loss_type == "sft_loss"):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            index = summaries[position].index
            raise InvalidField("reward", value, f"a finite number (sample {index}; see --reward-key)")
        return float(value)

    def split_rollouts(self, keys: list[Any]) -> list[list[Any]]:
        """Divides trajectories, in order of first occurrence, into updates; leaves out those that fill no update."""
        size = self.settings.global_batch_size
        if self.settings.use_dynamic_global_batch_size and keys:
            return [keys]
        if self.settings.num_steps_per_rollout:
            fitting = len(keys) // self.settings.num_steps_per_rollout
            size = fitting if size is None else min(size, fitting)
        size = len(keys) if size is None else size
        if not keys or not size or len(keys) < size:
            raise InvalidSetting(
                f"--global-batch-size {self.settings.global_batch_size}, --num-steps-per-rollout "
                f"{self.settings.num_steps_per_rollout}: the {counted(len(keys), 'trajectory')} of the "
                "iteration cannot fill an update",
                field="--global-batch-size", value=size, expected=f"at most {len(keys)}",
            )  # fmt: skip
        updates = [keys[i : i + size] for i in range(0, len(keys) - size + 1, size)]
        return updates[: self.settings.num_steps_per_rollout]

    def _skips(self) -> tuple[bool, bool]:
        """Returns whether samples are skipped if every term of their loss has a gradient of exactly zero, whatever the
        policy is: those without tokens to train; and, if the second is True too, those with a reward of zero."""
        s = self.settings
        if (
            self.feeds_all
            or s.custom_advantage_function_path
            or s.custom_pg_loss_reducer_function_path
            or s.rollout_data_postprocess_path
            # A custom loss may compare samples, and depend on more than the formulas here.
            or s.loss_type == "custom_loss"
            # The entropy term is a mean over every sample.
            or s.use_rollout_entropy
        ):
            return False, False
        return True, s.advantages_alone_train and not s.normalize_advantages


def _column(summaries: Sequence[SampleSummary], name: str) -> list[Any]:
    """Returns one attribute of all summaries. Those of a sealed step need not be decoded for it."""
    if isinstance(summaries, SealedStep):
        return summaries.column(name)
    return [getattr(summary, name) for summary in summaries]


def _rollout_key(rollout_id: int | None, position: int) -> int | tuple[str, int]:
    # A tuple for each of thousands of samples would take a tenth of the time of planning.
    return position if rollout_id is None else ("rollout", rollout_id)


def packed(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan with its lists of numbers as text: little-endian float64 or int64 in base64.

    To write and check such a plan takes a tenth of the time.
    """
    return _packed(plan) | {"format": PACKED_FORMAT, "updates": [_packed(update) for update in plan["updates"]]}


def _packed(values: dict[str, Any]) -> dict[str, Any]:
    lists = {name: np.asarray(value, _PACKED[name]) for name, value in values.items() if name in _PACKED}
    return values | {name: base64.b64encode(array.tobytes()).decode() for name, array in lists.items()}


def unpacked(plan: dict[str, Any]) -> dict[str, Any]:
    """Returns a plan that the buffer has stored, packed or, by an earlier version, not.

    Raises InvalidField for a plan of another format, and for lists that do not have it.
    """
    if plan.get("format") == FORMAT:
        return plan
    if plan.get("format") != PACKED_FORMAT:
        expected = f"a plan of format {FORMAT} or {PACKED_FORMAT} (step {plan.get('step')})"
        raise InvalidField("plan_json", plan.get("format"), expected)
    return _unpacked(plan) | {"format": FORMAT, "updates": [_unpacked(update) for update in plan["updates"]]}


def _unpacked(values: dict[str, Any]) -> dict[str, Any]:
    lists = {}
    for name in values.keys() & _PACKED.keys():
        try:
            lists[name] = np.frombuffer(base64.b64decode(values[name]), _PACKED[name]).tolist()
        except (TypeError, ValueError) as error:
            raise InvalidField(f"plan_json.{name}", type(values[name]).__name__, f"packed numbers ({error})") from None
    return values | lists


def lengths_of(plan: dict[str, Any], *, share_prompts: bool = True) -> Lengths:
    """Returns the tokens that the plan's samples take in rows.

    An estimate: samples may turn out to share no prompt, or more than a prompt.
    Plans that an earlier version stored have no groups.
    """
    total = plan["lengths"]
    prompts = {}
    if share_prompts:
        for i, group in enumerate(plan.get("groups", ())):
            prompt = total[i] - plan["response_lengths"][i]
            prompts[i] = (group, prompt), prompt
    return Lengths(total, prompts)


def assign(
    plan: dict[str, Any],
    update: int,
    replicas: int,
    settings: TrainerSettings,
    hidden_size: int,
    multiple: int = 1,
    lengths: Lengths | None = None,
) -> list[list[MicroBatch]]:
    """Returns the micro-batches of one update as [replica][i]; every replica gets the same number, a multiple of
    `multiple`.

    lengths: tokens of each sample in a row; None: no prompt is shared.
    """
    return schedule(
        plan["updates"][update]["train"],
        lengths or lengths_of(plan, share_prompts=False),
        replicas,
        multiple=multiple,
        micro_batch_size=settings.micro_batch_size,
        max_tokens=settings.max_tokens_per_gpu if settings.use_dynamic_batch_size else None,
        balance=settings.balance_data,
        form_by_cost=settings.balance_by_flops,
        # Matrices cost length * 12 h^2 a layer, attention length^2 * 2 h.
        cost=lambda length: length * (6 * hidden_size + length),
    )
