"""The turns that samples have in common are found, laid out once and read back, and nothing else changes."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_tiny import Turn, prefixes_of, prompt_lengths, sample_of, turn_samples

from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.batching.runs import Runs
from slime.trainer.batching.schedule import Lengths
from slime.trainer.batching.trunks import MOST_CUTS, Trunk, cuts_of, digests_at, prompt_digest, thinned
from slime.types import Sample


def laid(samples: Sequence[Sample], *, turns: bool = True, **options: Any) -> PackedBatch:
    trunks = prefixes_of(samples).trunks(range(len(samples))) if turns else {}
    numbers = [1.0] * len(samples)
    return pack(
        samples, range(len(samples)), numbers, numbers, trunks=[trunks.get(i) for i in range(len(samples))], **options
    )


def context_of(runs: Runs) -> list[list[int]]:
    """The tokens that each token of a row sees."""
    starts, keys = runs.q_limits.tolist(), runs.keys
    found = []
    for run, (count, prompt) in enumerate(zip(runs.q_lengths, runs.prompts(), strict=True)):
        first, width = int(runs.k_limits[run]), runs.k_lengths[run]
        seen = list(range(starts[run], starts[run] + count)) if keys is None else keys[first : first + width].tolist()
        before = len(seen) - count
        found += [[*prompt, *seen[: before + i + 1]] for i in range(count)]
    return found


def read_back(batch: PackedBatch) -> list[list[tuple[list[int], int]]]:
    """For each sample the trained tokens, each with the tokens from which it is predicted."""
    tokens, positions, seen = batch.tokens[0], batch.position_ids[0], context_of(batch.runs)
    scores = torch.arange(len(batch.rows), dtype=torch.float64) + 1
    by_token = [int(score) - 1 for score in batch.scatter(scores)]
    ends, found = list(itertools.accumulate(batch.lengths, initial=0)), []
    for start, end in itertools.pairwise(ends):
        of_sample = []
        for which in (w for w in by_token[start:end] if w >= 0):
            context = seen[int(batch.rows[which])]
            assert positions[context].tolist() == list(range(len(context)))
            of_sample.append((tokens[context].tolist(), int(batch.targets[which])))
        found.append(of_sample)
    return found


def expected(sample: Sample) -> list[tuple[list[int], int]]:
    tokens, mask = list(sample.tokens), list(sample.loss_mask or ())
    prompt = len(tokens) - sample.response_length
    return [(tokens[: prompt + i], tokens[prompt + i]) for i, written in enumerate(mask) if written]


# Few tokens and few lengths, so that samples often begin alike.
TURN = st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=2), st.integers(0, 1))
SAMPLES = st.lists(
    st.tuples(st.lists(st.integers(2, 3), min_size=1, max_size=3), st.lists(TURN, min_size=1, max_size=4)),
    min_size=1, max_size=7,
)  # fmt: skip


@settings(deadline=None)
@given(SAMPLES, st.booleans(), st.booleans(), st.integers(1, 8))
def test_every_sample_is_read_back_and_no_row_is_longer(
    drawn: list[tuple[list[int], list[Turn]]], share: bool, gather: bool, multiple: int
) -> None:
    samples = [sample_of(prompt, turns) for prompt, turns in drawn]
    batch = laid(samples, share_prompts=share, gather=gather, multiple=multiple)
    assert read_back(batch) == [expected(sample) for sample in samples]
    by_prompts = laid(samples, turns=False, share_prompts=share, gather=gather, multiple=multiple)
    assert batch.tokens.shape[1] <= by_prompts.tokens.shape[1]
    assert len(batch.rows) <= len(by_prompts.rows) == len(batch.trained)
    for name in ("trained", "mask", "weights", "segments", "rollout_log_probs"):
        torch.testing.assert_close(getattr(batch, name), getattr(by_prompts, name))
    if not share:
        assert torch.equal(batch.tokens, by_prompts.tokens) and torch.equal(batch.rows, by_prompts.rows)


@settings(deadline=None)
@given(SAMPLES.filter(lambda drawn: len(drawn) < 6))
def test_no_other_choice_of_trunks_leaves_fewer_tokens(drawn: list[tuple[list[int], list[Turn]]]) -> None:
    samples = [sample_of(prompt, turns) for prompt, turns in drawn]
    prefixes, total = prefixes_of(samples), [len(s.array("tokens")) for s in samples]
    trunks = prefixes.trunks(range(len(samples)))
    found = Lengths(total, trunks).cost(range(len(samples)))
    options = [[None, *zip(digests, prefixes.cuts[0], strict=False)] for digests in prefixes.digests.values()]
    every = (
        Lengths(total, {i: Trunk(*choice) for i, choice in enumerate(choices) if choice}).cost(range(len(samples)))
        for choices in itertools.product(*options)
    )
    assert found == min(every)
    for i, trunk in trunks.items():
        others = [j for j, other in trunks.items() if other == trunk and j != i]
        assert others and all(samples[j].tokens[: trunk.tokens] == samples[i].tokens[: trunk.tokens] for j in others)


@settings(deadline=None)
@given(
    st.lists(st.integers(2, 9), min_size=1, max_size=4),
    st.lists(st.lists(st.integers(2, 9), min_size=1, max_size=4), min_size=2, max_size=6),
    st.booleans(),
)
def test_where_prompts_alone_are_shared_nothing_changes(
    prompt: list[int], responses: list[list[int]], masked: bool
) -> None:
    samples = [Sample(tokens=prompt + response, response_length=len(response)) for response in responses]
    if masked:
        # Turns that differ in their first token.
        samples = [sample_of(prompt, [([10 + i], 1), (r, 0)]) for i, r in enumerate(responses)]
    prefixes = prefixes_of(samples)
    assert prefixes.lengthen(prompt_lengths(samples)) is None
    one, other = laid(samples), laid(samples, turns=False)
    assert one.scored is None
    for name in ("tokens", "position_ids", "rows", "targets", "trained"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.runs.q_lengths == other.runs.q_lengths


def test_four_common_turns_of_eight_samples_are_laid_out_once():
    prompt, random = [5] * 100, np.random.default_rng(0)
    common = [(random.integers(2, 9, size).tolist(), written) for size, written in ((60, 1), (40, 0), (50, 1), (50, 0))]
    samples = [sample_of(prompt, [*common, ([10 + i] * 50, 1)]) for i in range(8)]
    apart, by_prompts, by_turns = (
        laid(samples, turns=turns, share_prompts=share).tokens.shape[1]
        for turns, share in ((False, False), (False, True), (True, True))
    )
    # 349 tokens are fed of each sample; 300 of them are common, and 100 of these the prompt.
    assert (apart, by_prompts, by_turns) == (8 * 349, 100 + 8 * 249, 300 + 8 * 49)
    assert apart / by_turns == pytest.approx(4.03, abs=0.01)
    batch = laid(samples)
    # The 110 tokens of common turns are scored once; the first tokens after them and the others for each sample.
    assert len(batch.trained) == 8 * 160 and len(batch.rows) == 110 + 8 * 50
    longer = prefixes_of(samples).lengthen(prompt_lengths(samples))
    assert longer is not None and longer.cost(range(8)) == 300 + 8 * 50


def test_a_row_shares_the_turns_of_one_group_and_the_prompt_of_another():
    samples = [*turn_samples()[:4], *turn_samples()[8:]]
    prompts, of_turns = prompt_lengths(samples), prefixes_of(samples[:4])
    apart = sum(len(s.array("tokens")) for s in samples)
    assert prompts.cost(range(7)) == apart - 3 * 5 - 2 * 4
    # All four have the prompt, a turn and a tool's answer in common, 12 tokens, which saves more than 17 do for two.
    assert of_turns.cost(range(7), prompts) == apart - 3 * 12 - 2 * 4
    longer = of_turns.lengthen(prompts)
    assert longer is not None and longer.cost(range(7)) == apart - 3 * 12 - 2 * 4
    batch = pack(samples, range(7), [0.0] * 7, [1.0] * 7, trunks=[of_turns.trunks(range(7)).get(i) for i in range(7)])
    assert batch.tokens.shape[1] == apart - 7 - 3 * 12 - 2 * 4
    assert read_back(batch) == [expected(sample) for sample in samples]


def test_siblings_share_what_one_has_as_turns_and_another_as_prompt():
    samples = turn_samples()[4:7]
    trunks = prefixes_of(samples).trunks(range(3))
    # Prompt, first turn and tool's answer for two; the third has another answer, and would share 11 tokens of 13.
    assert [trunks[i].tokens for i in trunks] == [11, 11, 11]
    del samples[2]
    assert [trunk.tokens for trunk in prefixes_of(samples).trunks(range(2)).values()] == [13, 13]
    batch = laid(samples)
    assert batch.tokens.shape[1] == 13 + 3 + 4 and batch.lengths == [11, 5]
    assert read_back(batch) == [expected(sample) for sample in samples]


def test_other_experts_nuclei_or_images_are_not_shared():
    one, other = (sample_of([2, 3], [([4, 5], 1), ([6], 0), ([last, 8], 1)]) for last in (7, 9))
    for sample in (one, other):
        sample.rollout_routed_experts = np.zeros((6, 1, 2), np.int16)
    both = [one, other]
    # Experts of prompts do not count, those of turns do.
    one.rollout_routed_experts[1], one.rollout_routed_experts[3] = 1, 1
    assert [trunk.tokens for trunk in prefixes_of(both, 2).trunks([0, 1]).values()] == [2, 2]
    assert [trunk.tokens for trunk in prefixes_of(both).trunks([0, 1]).values()] == [5, 5]
    one.rollout_routed_experts[3] = 0
    assert [trunk.tokens for trunk in prefixes_of(both, 2).trunks([0, 1]).values()] == [5, 5]
    # A nucleus belongs to a sample's token: each token is scored with its own.
    for sample, size in ((one, 1), (other, 2)):
        ids = [[token, *([20] * (size - 1))] for token in sample.tokens[2:]]
        sample.rollout_top_p_token_ids = np.array(sum(ids, []), np.int32)
        sample.rollout_top_p_token_offsets = np.arange(0, 5 * size + 1, size)
    batch = laid(both, nuclei=True)
    assert batch.tokens.shape[1] == 5 + 2 and len(batch.rows) == len(batch.trained) == 8
    for sample, name in ((one, "a"), (other, "a")):
        sample.multimodal_train_inputs, sample.multimodal_train_input_id = {"pixel_values": np.zeros(1)}, name
    assert [trunk.tokens for trunk in prefixes_of(both).trunks([0, 1]).values()] == [5, 5]
    other.multimodal_train_input_id = "b"
    assert prefixes_of(both).trunks([0, 1]) == {}


def test_prompts_whose_images_are_not_known_differ_from_each_other_on_every_rank():
    def sample(images: float) -> Sample:
        return Sample(tokens=[1, 2, 3], response_length=1, multimodal_train_inputs={"pixel_values": np.full(1, images)})

    # Each sample is freed before the next one, as those of other ranks are not in this process: addresses repeat.
    digests = [prompt_digest(sample(position), position) for position in range(4)]
    assert len(set(digests)) == 4
    assert prompt_digest(sample(0.0), 0) == digests[0]


def test_a_loss_mask_that_changes_at_every_token_gives_few_cuts():
    sample = sample_of([1], [([2], i % 2) for i in range(5000)])
    cuts = cuts_of(sample)
    assert len(cuts) == MOST_CUTS and cuts == sorted(set(cuts)) and cuts[-1] == 5000
    assert thinned([3, 1, 3]) == [1, 3]
    # The digest of a prefix does not depend on how often it is looked at, and a cut behind the sample has none.
    assert digests_at([4, 9, 6000], sample)[0] == digests_at([4], sample)[0]
    assert len(digests_at([4, 9, 6000], sample)) == 2


def test_a_mask_of_another_length_is_left_to_the_check_that_names_it():
    assert cuts_of(Sample(tokens=[1, 2], response_length=1, loss_mask=[1, 0, 1, 0])) == []
    assert cuts_of(Sample(tokens=[1, 2], response_length=0)) == []
