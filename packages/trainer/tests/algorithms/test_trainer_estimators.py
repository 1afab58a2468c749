"""The table of advantage estimators: values of each, and everything else that derives from an entry."""

import ast
import dataclasses
import inspect
import statistics
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trainer_tiny import Runner, make_samples, make_settings

import slime.trainer
from slime.trainer.algorithms.estimators import (
    ESTIMATORS,
    PolicyTerms,
    Rewards,
    find_estimator,
    leave_one_out_mean,
)
from slime.trainer.algorithms.policy_loss import sequence_mean
from slime.trainer.algorithms.rewards import normalize_rewards
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting

# By estimator, of the numbers below: training rewards, advantages, losses, and where the ratio was clipped.
VALUES: dict[str, tuple[list[float], list[float], list[float], list[float]]] = {
    "grpo": (
        [-0.7258643798641804, 1.1406440255008552, -1.3480338483191923, 0.5184745570458433, 0.0, 0.0],
        [0.5, 0.5, 0.5, -1.25, -1.25],
        [-0.475614712250357, -0.6, -0.4093653765389909, 1.375, 1.23756229218646],
        [0.0, 1.0, 0.0, 0.0, 0.0],
    ),
    "gspo": (
        [-0.7258643798641804, 1.1406440255008552, -1.3480338483191923, 0.5184745570458433, 0.0, 0.0],
        [0.5, 0.5, 0.5, -1.25, -1.25],
        [-0.44124845129229767, -0.44124845129229767, -0.44124845129229767, 1.375, 1.375],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ),
    "cispo": (
        [-0.7258643798641804, 1.1406440255008552, -1.3480338483191923, 0.5184745570458433, 0.0, 0.0],
        [0.5, 0.5, 0.5, -1.25, -1.25],
        [0.475614712250357, 1.2, 0.225, -0.375, -3.71268687655938],
        [0.0, 1.0, 1.0, 1.0, 0.0],
    ),
    "reinforce_plus_plus": (
        [0.25, 1.0, 0.0, 0.75, 0.1, 0.1],
        [0.3707, 0.423, 0.47, -1.166, -1.29],
        [-0.475614712250357, -0.6, -0.4093653765389909, 1.375, 1.23756229218646],
        [0.0, 1.0, 0.0, 0.0, 0.0],
    ),
    "reinforce_plus_plus_baseline": (
        [-0.29166666666666663, 0.45833333333333337, -0.5416666666666666, 0.20833333333333337, 0.0, 0.0],
        [0.49, 0.52, 0.47, -1.255, -1.29],
        [-0.475614712250357, -0.6, -0.4093653765389909, 1.375, 1.23756229218646],
        [0.0, 1.0, 0.0, 0.0, 0.0],
    ),
    # delta: -0.01 + 0.9 * -0.1 - 0.2, 0.47 + 0.1; -0.005 + 0.9 * 0.3 - 0.4, -1.29 - 0.3.
    "ppo": (
        [0.25, 1.0, 0.0, 0.75, 0.1, 0.1],
        [-0.3 + 0.72 * 0.57, 0.0, 0.57, -0.135 + 0.72 * -1.59, -1.59],
        [-0.475614712250357, -0.6, -0.4093653765389909, 1.375, 1.23756229218646],
        [0.0, 1.0, 0.0, 0.0, 0.0],
    ),
    "rloo": (
        [-0.4375, 0.6875, -0.625, 0.125, 0.0, 0.0],
        [0.5, 0.5, 0.5, -1.25, -1.25],
        [-0.475614712250357, -0.6, -0.4093653765389909, 1.375, 1.23756229218646],
        [0.0, 1.0, 0.0, 0.0, 0.0],
    ),
}


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_keeps_its_values(name: str):
    row, (rewards, advantages, losses, clipped) = ESTIMATORS[name], VALUES[name]
    # Samples 2 and 3 of the first group are one trajectory.
    raw, groups, trajectories = [0.25, 1.0, 0.0, 0.75, 0.1, 0.1], [0, 0, 0, 0, 1, 1], [5, 6, 7, 7, 8, 9]
    assert normalize_rewards(raw, groups, trajectories, baseline=row.baseline, scale=row.scale) == rewards
    mask, segments = f64(1, 0, 1, 1, 1), torch.tensor([0, 0, 0, 1, 1])
    x = Rewards(
        f64(0.5, -1.25), f64(0.1, -0.2, 0.3, 0.05, 0.4), mask, [3, 2], kl_coef=0.1, gamma=0.9, lambd=0.8,
        values=f64(0.2, 0.0, -0.1, 0.4, 0.3),
    )  # fmt: skip
    assert row.advantages(x).tolist() == pytest.approx(advantages, rel=1e-14)
    terms = PolicyTerms(
        ppo_kl=f64(0.05, -0.3, 0.2, -0.4, 0.01), log_probs=f64(-1.0, -2.0, -0.5, -0.25, -3.0),
        advantages=f64(0.5, 0.5, 0.5, -1.25, -1.25), eps_clip=0.1, eps_clip_high=0.2, eps_clip_c=1.1,
        sample_mean=lambda values: sequence_mean(values, mask, segments, 2),
    )  # fmt: skip
    loss, was_clipped = row.loss(terms)
    assert loss.tolist() == pytest.approx(losses, rel=1e-14)
    assert was_clipped.tolist() == clipped


@given(st.lists(st.integers(-50, 50), min_size=2, max_size=9))
def test_the_leave_one_out_baseline_is_that_of_the_formula(rewards: list[int]):
    n, total = len(rewards), sum(rewards)
    expected = [Fraction(total - r, n - 1) for r in rewards]
    assert leave_one_out_mean([float(r) for r in rewards]) == pytest.approx([float(b) for b in expected], abs=1e-12)
    # n / (n - 1) times the reward less the mean of the whole group.
    centred = normalize_rewards(rewards, [0] * n, range(n), baseline=leave_one_out_mean, scale=False)
    assert centred == pytest.approx([float(Fraction(n * r - total, n - 1)) for r in rewards], abs=1e-11)


@pytest.mark.parametrize("name", [name for name, row in ESTIMATORS.items() if row.baseline is not None])
@given(reward=st.floats(-1e6, 1e6, allow_nan=False), n=st.integers(1, 17))
def test_rewards_that_are_all_equal_give_exact_zeros(name: str, reward: float, n: int):
    row = ESTIMATORS[name]
    assert normalize_rewards([reward] * n, [0] * n, range(n), baseline=row.baseline, scale=row.scale) == [0.0] * n


def test_choices_and_help_of_the_flag_are_those_of_the_table():
    field = next(f for f in dataclasses.fields(TrainerSettings) if f.name == "advantage_estimator")
    assert field.metadata["choices"] == tuple(ESTIMATORS)
    for name in ESTIMATORS:
        assert f"{name}: {ESTIMATORS[name].help}" in field.metadata["help"]


def test_an_unknown_estimator_is_refused_with_the_nearest_name():
    with pytest.raises(InvalidSetting, match="--advantage-estimator must be one of grpo.*'rlo'; did you mean rloo"):
        TrainerSettings(hf_checkpoint="unused", advantage_estimator="rlo")
    with pytest.raises(InvalidSetting, match="did you mean cispo"):
        find_estimator("cisp")


def test_estimators_are_named_in_their_table_alone():
    """To add one takes one file: nothing else of the trainer knows an estimator by name, save the default's."""
    root = Path(slime.trainer.__path__[0])
    named = {
        (path.relative_to(root).as_posix(), node.value)
        for path in root.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and node.value in ESTIMATORS
    }
    assert {path for path, _ in named} == {"algorithms/estimators.py", "settings/algorithm.py"}
    assert {name for path, name in named if path == "settings/algorithm.py"} == {"grpo"}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_estimator_is_fifty_lines_of_one_file(name: str):
    """The formulas at the top, its entry, which states every part, and the functions that the entry names."""
    path = Path(inspect.getfile(find_estimator))
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    table = next(
        node.value for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict)
    )
    entry = next(v for k, v in zip(table.keys, table.values, strict=True) if ast.literal_eval(k) == name)
    parts = {keyword.arg: keyword.value for keyword in entry.keywords}
    assert parts.keys() >= {"baseline", "scale", "whiten", "advantages", "loss"}
    named = [functions[value.id] for value in parts.values() if isinstance(value, ast.Name)]
    assert len(named) >= 2
    lines = sum(node.end_lineno - node.lineno + 1 for node in (tree.body[0], entry, *named))
    assert lines <= 50, f"docs/trainer.md says that {name} is at most 50 lines, counted {lines}"


def test_a_new_entry_of_the_table_trains(model: str, monkeypatch: pytest.MonkeyPatch):
    """The worked example of CONTRIBUTING.md: an entry, and a pure function for what no other estimator does."""

    def median(rewards):
        return [statistics.median(rewards)] * len(rewards)

    row = dataclasses.replace(ESTIMATORS["rloo"], help="reward minus the median of its group", baseline=median)
    monkeypatch.setitem(ESTIMATORS, "median", row)
    runner = Runner(make_settings(model, advantage_estimator="median"))
    samples = make_samples(groups=1)
    for sample, reward in zip(samples, (0.0, 1.0, 1.0, 5.0), strict=True):
        sample.reward = reward
    plan = runner.plan(0, samples)
    assert plan["rewards"] == [-1.0, 0.0, 0.0, 4.0]
    assert plan["updates"][0]["skipped"] == [1, 2]
    assert runner.step(plan, samples)["train/grad_norm"] > 0
