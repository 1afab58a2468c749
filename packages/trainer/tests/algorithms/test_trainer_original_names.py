"""`slime.utils.ppo_utils` and `slime.backends.megatron_utils`, as plug-ins written for slime use them."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import cp_utils, loss
from slime.utils import ppo_utils

NUM_GPUS = 0

MASKS = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0])]
OLD = [torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-0.3, -0.7])]
NEW = [torch.tensor([-0.9, -9.0, -0.7]), torch.tensor([-0.3, -0.2])]
CLIPS = SimpleNamespace(tis_clip_low=0.5, tis_clip=1.3, opsm_delta=0.01)


def test_responses_are_whole_so_that_nothing_is_gathered_or_cut() -> None:
    values = torch.arange(4.0)
    assert cp_utils.all_gather_with_cp(values, 9, 4) is values
    assert cp_utils.slice_log_prob_with_cp(values, 9, 4) is values
    with pytest.raises(ValueError, match="got 4 values of a response of 3 tokens"):
        cp_utils.all_gather_with_cp(values, 9, 3)


def test_a_sum_of_sample_means_and_a_sum_of_tokens() -> None:
    values = torch.cat([torch.tensor([2.0, 100.0, 4.0]), torch.tensor([10.0, 20.0])])
    assert cp_utils.get_sum_of_sample_mean([5, 4], [3, 2], MASKS)(values) == pytest.approx(3.0 + 15.0)
    assert cp_utils.get_sum_of_sample_mean([5, 4], [3, 2], MASKS, True)(values) == pytest.approx(6.0 + 30.0)


@pytest.mark.parametrize(("name", "bound"), [("vanilla_tis_function", 1.3), ("icepop_function", 0.0)])
def test_weights_of_the_mismatch_outside_of_their_bounds(name: str, bound: float) -> None:
    pg_loss, masks, metrics = getattr(loss, name)(
        CLIPS, pg_loss=torch.ones(5), train_log_probs=NEW, rollout_log_probs=OLD, loss_masks=MASKS,
        total_lengths=[5, 4], response_lengths=[3, 2],
    )  # fmt: skip
    assert masks is MASKS and metrics["tis"].shape == (5,)
    assert pg_loss.tolist() == pytest.approx([math.exp(0.1), 1.0, math.exp(-0.2), 1.0, bound])


def test_gspo_takes_the_masked_mean_of_a_sample_for_each_token() -> None:
    means = ppo_utils.compute_gspo_kl(NEW, OLD, NEW, MASKS)
    assert means.tolist() == pytest.approx([0.05] * 3 + [-0.25] * 2)


def test_opsm_drops_tokens_of_samples_that_moved_away() -> None:
    weights, share = ppo_utils.compute_opsm_mask(
        CLIPS, NEW, OLD, [torch.tensor([1.0, -1.0, -1.0]), -torch.ones(2)], MASKS
    )
    assert weights.tolist() == [1.0, 0.0, 0.0, 1.0, 1.0] and share == pytest.approx(0.4)


def test_returns_have_a_tensor_for_each_sample() -> None:
    zeros = [torch.zeros(3), torch.zeros(2)]
    rewards = torch.tensor([2.0, -1.0])
    assert [r.tolist() for r in ppo_utils.get_grpo_returns(rewards, zeros)] == [[2.0] * 3, [-1.0] * 2]
    returns = ppo_utils.get_reinforce_plus_plus_returns(rewards, zeros, MASKS, [3, 2], [5, 4], 0.1, 0.5)
    assert [r.tolist() for r in returns] == [[0.5, 1.0, 2.0], [-0.5, -1.0]]
    baseline = ppo_utils.get_reinforce_plus_plus_baseline_advantages(rewards, [z + 1 for z in zeros], MASKS, 0.5)
    assert [r.tolist() for r in baseline] == [[1.5] * 3, [-1.5] * 2]


def test_log_probs_and_entropies_of_logits() -> None:
    logits, tokens = torch.tensor([[0.0, 0.0], [1.0, -1.0]]), torch.tensor([1, 0])
    expected = torch.log_softmax(logits.double(), -1)
    log_probs, entropy = ppo_utils.calculate_log_probs_and_entropy(logits, tokens, with_entropy=True)
    assert log_probs.shape == (2, 1) and entropy is not None
    torch.testing.assert_close(log_probs[:, 0].double(), expected[[0, 1], tokens], atol=1e-6, rtol=0)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-6, rtol=0)
    torch.testing.assert_close(ppo_utils.compute_log_probs(logits, tokens), log_probs)
    torch.testing.assert_close(ppo_utils.compute_entropy_from_logits(logits), entropy)
    assert ppo_utils.calculate_log_probs_and_entropy(logits, tokens)[1] is None


def test_losses_and_kl_are_those_of_the_trainer() -> None:
    loss_of_tokens, clipped = ppo_utils.compute_policy_loss(torch.tensor([-0.5, 0.0]), torch.ones(2), 0.2, 0.28)
    assert loss_of_tokens.tolist() == pytest.approx([-1.28, -1.0]) and clipped.tolist() == [1.0, 0.0]
    assert ppo_utils.compute_approx_kl(NEW[0], OLD[0], "k1").tolist() == pytest.approx([0.1, -7.0, -0.2])
