"""Plans, schedules and packed rows, without a model."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.trainer.batching.packing import check_ids, check_sample, pack
from slime.trainer.batching.plan import Planner, assign, packed, unpacked
from slime.trainer.batching.runs import Runs
from slime.trainer.batching.schedule import Lengths, partition, schedule
from slime.trainer.settings.trainer import TrainerSettings
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting
from slime.types.sample.summary import SampleSummary


def summary(index: int, group_index: int, reward: Any, **fields: Any) -> SampleSummary:
    lengths = {"total_length": 10, "response_length": 4, "loss_mask_sum": 4}
    return SampleSummary(index, group_index, reward=reward, **(lengths | fields))


def planner(**settings: Any) -> Planner:
    return Planner(TrainerSettings(hf_checkpoint="unused", **settings))


def summaries(*rewards: Any, group_size: int = 2, **fields: Any) -> list[SampleSummary]:
    return [summary(i, i // group_size, r, **fields) for i, r in enumerate(rewards)]


def test_a_plan_is_json_and_skips_what_adds_no_gradient():
    plan = planner().plan(3, summaries(1.0, 0.0, 0.1, 0.1))
    assert json.loads(json.dumps(plan)) == plan
    (update,) = plan["updates"]
    assert (update["train"], update["skipped"]) == ([0, 1], [2, 3])
    # Skipping changes no denominator.
    assert plan["weights"] == [1 / (4 * 4)] * 4
    assert plan["rewards"][2:] == [0.0, 0.0]


def test_a_plan_is_stored_packed_to_the_last_bit_and_read_back_as_earlier_versions_stored_it():
    plan = planner(global_batch_size=2).plan(3, summaries(0.1, -0.0, 1 / 3, 1e9, 0.5, group_size=5))
    stored = json.loads(json.dumps(packed(plan)))
    assert not any(isinstance(value, list) for value in (stored | {"updates": None}).values())
    assert repr(unpacked(stored)) == repr(plan)
    assert unpacked(plan) is plan
    with pytest.raises(InvalidField, match="a plan of format 1 or 2 .step 3.") as error:
        unpacked(plan | {"format": 9})
    for odd in (3, None, "x", "AAAA", [1.0]):
        with pytest.raises(InvalidField, match="plan_json.rewards: got .*, expected packed numbers"):
            unpacked(stored | {"rewards": odd})
    assert error.value.field == "plan_json"


@pytest.mark.parametrize(
    "settings",
    [
        {"use_kl_loss": True},
        {"entropy_coef": 0.1},
        {"custom_advantage_function_path": "a.b"},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        {"normalize_advantages": True},
        {"loss_type": "sft_loss"},
    ],
)
def test_nothing_is_skipped_where_another_term_has_a_gradient(settings: dict[str, Any]):
    plan = planner(**settings).plan(0, summaries(1.0, 1.0))
    assert plan["updates"][0]["train"] == [0, 1]


def test_removed_samples_normalise_but_do_not_train():
    first, *others = summaries(1.0, 0.0, 0.0, group_size=3)
    removed = dataclasses.replace(first, remove_sample=True)
    plan = planner().plan(0, [removed, *others])
    assert plan["rewards"][1] < 0
    assert plan["updates"][0]["skipped"] == [0]
    assert plan["updates"][0]["num_rollouts"] == 3
    plan = planner().plan(0, [dataclasses.replace(removed, reward=None), *others])
    assert plan["rewards"] == [0.0, 0.0, 0.0]


def test_rollouts_of_several_samples_share_a_denominator():
    items = [
        summary(0, 0, 1.0, rollout_id=5),
        summary(0, 0, 1.0, rollout_id=5, loss_mask_sum=6),
        summary(1, 0, 0.0, rollout_id=6),
    ]
    plan = planner().plan(0, items)
    assert plan["num_rollouts"] == 2
    assert plan["weights"] == pytest.approx([1 / (2 * 10), 1 / (2 * 10), 1 / (2 * 4)])


def test_updates_and_the_rollouts_that_fill_none():
    plan = planner(global_batch_size=2).plan(0, summaries(*[0.0, 1.0] * 2, 0.5, group_size=5))
    assert [u["train"] for u in plan["updates"]] == [[0, 1], [2, 3]]
    assert plan["dropped"] == [4]
    assert [
        u["num_rollouts"]
        for u in planner(num_steps_per_rollout=2).plan(0, summaries(*range(6), group_size=6))["updates"]
    ] == [3, 3]
    with pytest.raises(InvalidSetting, match="the 2 trajectories of the iteration cannot fill an update"):
        planner(global_batch_size=3).plan(0, summaries(1.0, 0.0))


@pytest.mark.parametrize("reward", [None, float("nan"), "1", True, {"other": 1.0}])
def test_a_reward_that_is_no_number_is_named(reward: Any):
    with pytest.raises(InvalidField, match="sample 1"):
        planner(reward_key="score").plan(0, summaries(1.0, reward))


def test_the_reward_key_chooses():
    assert planner(reward_key="score").plan(0, summaries({"score": 2}, {"score": 1.0}))["raw_rewards"] == [2.0, 1.0]


@given(
    st.lists(st.integers(1, 500), min_size=0, max_size=40),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(1, 9),
)
def test_every_sample_is_scheduled_once_and_ranks_keep_in_step(
    lengths: list[int], world_size: int, dynamic: bool, balance: bool, micro_batch_size: int
):
    positions = [3 * i for i in range(len(lengths))]
    ranks = schedule(
        positions,
        Lengths(dict(zip(positions, lengths, strict=True))),
        world_size,
        micro_batch_size=micro_batch_size,
        max_tokens=600 if dynamic else None,
        balance=balance,
    )
    assert len(ranks) == world_size
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(p for rank in ranks for bin in rank for p in bin) == positions
    length_of = dict(zip(positions, lengths, strict=True))
    for rank in ranks:
        for bin in rank:
            assert sum(length_of[p] for p in bin) <= 600 if dynamic else len(bin) <= micro_batch_size


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.integers(1, 6))
def test_karmarkar_karp_partitions(costs: list[int], parts: int):
    lists = partition(costs, parts)
    assert sorted(i for items in lists for i in items) == list(range(len(costs)))
    sums = [sum(costs[i] for i in items) for items in lists]
    assert max(sums) - min(sums) <= max(costs)
    padded = costs + [1] * (-len(costs) % parts)
    assert {len(items) for items in partition(padded, parts, equal_size=True)} == {len(padded) // parts}


def test_karmarkar_karp_balances_better_than_greedy():
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in items) for items in partition([8, 7, 6, 5, 4], 2)) == [14, 16]


def test_a_plan_is_cut_for_any_number_of_ranks():
    settings = TrainerSettings(hf_checkpoint="unused", use_dynamic_batch_size=True, max_tokens_per_gpu=20)
    plan = Planner(settings).plan(0, summaries(*[0.0, 1.0] * 3))
    assert assign(plan, 0, 1, settings, 64) == [[[0, 1], [2, 3], [4, 5]]]
    two = assign(plan, 0, 2, settings, 64)
    assert [len(rank) for rank in two] == [2, 2]
    everything_skipped = Planner(settings).plan(0, summaries(1.0, 1.0))
    assert assign(everything_skipped, 0, 2, settings, 64) == [[], []]


def sample(prompt: list[int], response: list[int], **fields: Any) -> Sample:
    return Sample(tokens=prompt + response, response_length=len(response), **fields)


def visible(runs: Runs) -> torch.Tensor:
    """[T, T] bool: whether the second token is seen by the first."""
    total = int(runs.q_limits[-1])
    keys = torch.arange(total) if runs.keys is None else runs.keys
    seen = torch.zeros(total, total, dtype=torch.bool)
    for start, count, first, width, prompt in zip(
        runs.q_limits.tolist(), runs.q_lengths, runs.k_limits.tolist(), runs.k_lengths, runs.prompts(), strict=False
    ):
        for i in range(count):
            seen[start + i, keys[first : first + width - count + i + 1]] = True
            seen[start + i, prompt.start : prompt.stop] = True
    return seen


def test_runs_of_one_shape_are_put_together():
    order = Runs.sharing([2, 1, 2], [[3, 1], [3], [1, 0, 3]], [2, 1], "cpu").by_shape
    assert order.shapes == [(3, 2, 2), (2, 1, 1), (2, 3, 5), (2, 1, 3), (1, 3, 4)]
    assert order.queries is not None and order.keys is not None and order.back is not None
    prompts, alone, short, longer = [0, 1, 3, 4, 16, 17], [2, 18], [8, 12], [5, 6, 7, 13, 14, 15]
    assert order.queries.tolist() == [*prompts, *alone, *longer, *short, 9, 10, 11]
    assert order.keys.tolist()[8:18] == [0, 1, 5, 6, 7, 3, 4, 13, 14, 15]
    assert order.queries[order.back].tolist() == list(range(19))
    gathered = Runs.gathered([2, 1, 1], [np.array(keys) for keys in ([0, 1], [0, 1, 2], [0, 1, 3])], "cpu").by_shape
    assert gathered.shapes == [(1, 2, 2), (2, 1, 3)]
    assert gathered.queries is None and gathered.back is None and gathered.keys is not None
    assert gathered.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3]
    assert Runs.apart([3, 2], "cpu").by_shape[1:] == (None, None, None)


# The first row of a process imports torch's compiler, which takes seconds.
@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=8),
    st.booleans(),
    st.booleans(),
    st.integers(1, 8),
)
def test_a_token_sees_its_prompt_and_what_came_before_it_in_its_response(
    layout: list[tuple[int, int]], share: bool, gather: bool, multiple: int
):
    # Prompt p is p, p, ... of length p + 1; what a token is tells whose it is.
    samples = [sample([p] * (p + 1), [10 + i] * r) for i, (p, r) in enumerate(layout)]
    batch = pack(
        samples, range(len(samples)), [0.0] * len(samples), [1.0] * len(samples), share_prompts=share, gather=gather,
        multiple=multiple,
    )  # fmt: skip
    tokens, positions, seen = batch.tokens[0].tolist(), batch.position_ids[0].tolist(), visible(batch.runs)
    row = iter(batch.rows.tolist())
    for i, (p, r) in enumerate(layout):
        for j in range(r):
            place = next(row)
            context = seen[place].nonzero().flatten().tolist()
            assert [tokens[c] for c in context] == [p] * (p + 1) + [10 + i] * j
            assert [positions[c] for c in context] == list(range(p + 1 + j))


def test_equal_prompts_are_laid_out_once():
    samples = [sample([1, 2, 3], [4, 5], loss_mask=[1, 0]), sample([1, 2, 3], [6]), sample([7], [8, 9, 10])]
    batch = pack(samples, [0, 1, 2], [1.0, 0.0, 0.0], [0.5, 0.25, 0.1])
    assert batch.tokens.tolist() == [[1, 2, 3, 4, 7, 8, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    # The first token of a response is predicted by the last of the prompt; a masked token by none.
    assert batch.rows.tolist() == [2, 2, 4, 5, 6]
    assert batch.targets.tolist() == [4, 6, 8, 9, 10]
    assert batch.trained.tolist() == [0, 2, 3, 4, 5]
    assert batch.weights.tolist() == pytest.approx([0.5, 0.0, 0.25, 0.1, 0.1, 0.1])
    seen = visible(batch.runs)
    assert seen[3].tolist() == [True] * 4 + [False] * 3
    assert seen[4].tolist() == [False] * 4 + [True] + [False] * 2
    plain = pack(samples, [0, 1, 2], [0.0] * 3, [1.0] * 3, share_prompts=False)
    assert plain.runs.keys is None and plain.runs.q_limits.tolist() == [0, 4, 7, 10]
    assert plain.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1, 2]]


def test_responses_of_one_prompt_do_not_see_each_other():
    batch = pack([sample([1], [2, 3, 4]), sample([1], [5, 6, 7])], [0, 1], [0.0] * 2, [1.0] * 2)
    assert visible(batch.runs).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 0, 0, 1, 0],
        [1, 0, 0, 1, 1],
    ]


def test_removed_samples_have_no_weight_and_absent_log_probs_are_nan():
    kept = sample([1], [2], rollout_log_probs=[-0.5])
    removed = sample([1], [3], rollout_log_probs=[-0.1], remove_sample=True)
    batch = pack([kept, removed], [0, 1], [1.0, 1.0], [1.0, 1.0])
    assert batch.weights.tolist() == [1.0, 0.0]
    torch.testing.assert_close(batch.rollout_log_probs, torch.tensor([-0.5, -0.1]))
    without = sample([1], [4])
    mixed = pack([kept, without], [0, 1], [0.0] * 2, [1.0] * 2).rollout_log_probs
    torch.testing.assert_close(mixed, torch.tensor([-0.5, float("nan")]), equal_nan=True)
    assert pack([without], [0], [0.0], [1.0]).rollout_log_probs is None


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (Sample(index=7, tokens=np.array([1, 2], np.int32), response_length=2), "response_length"),
        (Sample(index=7, tokens=np.array([1, 99], np.int32), response_length=1), "tokens[1]"),
        (Sample(index=7, tokens=np.array([1, 50], np.int32), response_length=1), "tokens[1]"),
        (Sample(index=7, tokens=np.array([-1, 1], np.int32), response_length=1), "tokens[0]"),
        (
            Sample(index=7, tokens=np.array([1, 2], np.int32), response_length=1, rollout_log_probs=[0.0, 0.0]),
            "rollout_log_probs",
        ),
    ],
)
def test_a_sample_that_cannot_be_fed_is_named(bad: Sample, field: str):
    with pytest.raises(InvalidField, match="sample 7") as caught:
        check_ids([sample([1], [2]), bad], 50)
        check_sample(bad)
    assert caught.value.field == field
    with pytest.raises(InvalidField, match="rollout_log_probs"):
        check_sample(sample([1], [2]), needs_log_probs=True)
    for outside in (-5, 50):
        with pytest.raises(InvalidField, match=rf"tokens\[1\]: got {outside}, expected ids in \[0, 50\)"):
            check_ids([sample([1], [2]), sample([1, outside], [2])], 50)
