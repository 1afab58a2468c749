"""Log-probs among the tokens that top-p and top-k sampling left, and what samples must have for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.algorithms.logprobs import token_log_probs
from slime.trainer.algorithms.nucleus import Nuclei, nucleus_log_probs
from slime.trainer.batching.nuclei import lay_nuclei
from slime.trainer.settings.checks import refuse_nuclei_without_gradient
from slime.types import Sample
from slime.types.errors import InvalidField, InvalidSetting

VOCABULARY = 11
NUCLEUS = st.sets(st.integers(0, VOCABULARY - 1), min_size=1)
ROWS = st.lists(st.tuples(NUCLEUS, st.integers(0, VOCABULARY - 1)), min_size=1, max_size=9)


def lay(rows: list[tuple[set[int], int]]) -> Nuclei:
    sample = Sample(
        index=0, tokens=[1, *(target for _, target in rows)], response_length=len(rows),
        rollout_top_p_token_ids=[token for nucleus, _ in rows for token in sorted(nucleus)],
        rollout_top_p_token_offsets=np.cumsum([0, *(len(nucleus) for nucleus, _ in rows)]),
    )  # fmt: skip
    return lay_nuclei([sample], [np.ones(len(rows), np.float32)], sample.array("tokens")[1:], "cpu")


@settings(deadline=None, max_examples=50)
@given(rows=ROWS, seed=st.integers(0, 2**32 - 1), temperature=st.sampled_from([0.6, 1.0, 1.7]))
def test_log_probs_and_gradients_are_those_of_the_masked_softmax_in_float64(
    rows: list[tuple[set[int], int]], seed: int, temperature: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 20 * torch.randn(len(rows), VOCABULARY, generator=generator)
    weights = torch.randn(len(rows), generator=generator)
    exact = logits.double().requires_grad_()
    outside = torch.tensor([[v not in nucleus | {target} for v in range(VOCABULARY)] for nucleus, target in rows])
    masked = (exact / temperature).masked_fill(outside, -torch.inf).log_softmax(-1)
    expected = masked[range(len(rows)), [target for _, target in rows]]
    (gradient,) = torch.autograd.grad((expected * weights).sum(), exact)

    leaf = logits.clone().requires_grad_()
    found = nucleus_log_probs(leaf, lay(rows), temperature)
    (found_gradient,) = torch.autograd.grad((found * weights).sum(), leaf)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found_gradient.double(), gradient, atol=1e-5, rtol=1e-4)


@settings(deadline=None, max_examples=50)
@given(rows=ROWS, seed=st.integers(0, 2**32 - 1))
def test_rows_that_are_taken_have_the_log_probs_that_they_had(rows: list[tuple[set[int], int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits, nuclei = torch.randn(len(rows), VOCABULARY, generator=generator), lay(rows)
    taken = torch.randperm(len(rows), generator=generator)[: max(1, len(rows) // 2)]
    torch.testing.assert_close(
        nucleus_log_probs(logits[taken], nuclei.take(taken)), nucleus_log_probs(logits, nuclei)[taken]
    )


def test_nuclei_take_four_bytes_for_each_id() -> None:
    nuclei = lay([({1, 2, 3}, 1), ({4}, 4)])
    assert {each.dtype for each in (nuclei.ids, nuclei.rows, nuclei.targets)} == {torch.int32}
    assert {each.dtype for each in vars(nuclei.take(torch.tensor([1]))).values()} == {torch.int32}


def test_the_whole_vocabulary_as_nucleus_gives_the_usual_log_probs() -> None:
    targets = [3, 0, 10]
    logits = torch.randn(3, VOCABULARY, generator=torch.Generator().manual_seed(0))
    nuclei = lay([(set(range(VOCABULARY)), target) for target in targets])
    torch.testing.assert_close(nucleus_log_probs(logits, nuclei), token_log_probs(logits, torch.tensor(targets)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rollout_top_p_token_ids": None, "rollout_top_p_token_offsets": None}, "append_response_tokens.*sample 0"),
        ({"rollout_top_p_token_offsets": np.zeros(3, np.int64)}, r"got 3, expected \d+ offsets"),
        ({"rollout_top_p_token_ids": "outside"}, r"expected ids in \[0, 32\)"),
        ({"rollout_top_p_token_offsets": "empty"}, r"offsets\[0\]: got an empty nucleus"),
    ],
    ids=["none", "another length", "outside the vocabulary", "empty"],
)
def test_a_sample_without_the_nucleus_of_a_trained_token_is_refused_by_name(
    model: str, change: dict[str, Any], message: str
) -> None:
    samples = make_samples(nuclei=True)
    for name, value in change.items():
        array = np.array(getattr(samples[0], name))
        if isinstance(value, str):
            array[0 if value == "outside" else 1] = 32 if value == "outside" else 0
            value = array
        setattr(samples[0], name, value)
    with pytest.raises(InvalidField, match=message):
        Runner(make_settings(model, rollout_top_p=0.9)).run(0, samples)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout_top_k": 1}, "--rollout-top-k must be -1 or more than 1, got 1: .*no gradient"),
        ({"rollout_top_p": 0.9, "use_opd": True, "opd_type": "sglang"}, "--rollout-top-p.*teacher"),
    ],
)
def test_settings_that_a_nucleus_leaves_nothing_to_learn_from_are_refused(
    model: str, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSetting, match=message):
        refuse_nuclei_without_gradient(make_settings(model, **values))


def test_a_step_refuses_what_a_nucleus_leaves_nothing_to_learn_from(model: str) -> None:
    with pytest.raises(InvalidSetting, match="--rollout-top-k must be -1 or more than 1, got 1"):
        Runner(make_settings(model, rollout_top_k=1)).run(0, make_samples(nuclei=True))


def test_samples_drawn_from_nuclei_are_refused_by_a_trainer_that_scores_the_whole_vocabulary(model: str) -> None:
    with pytest.raises(InvalidField, match="rollout_top_p_token_ids.*--rollout-top-p.*sample 0"):
        Runner(make_settings(model)).run(0, make_samples(nuclei=True))
