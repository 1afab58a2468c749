"""Advantages of --custom-advantage-function-path are checked sample by sample; others may be anything."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_tiny import Runner, make_samples, make_settings

from slime.types.errors import PluginError

BACKENDS = ("fsdp", "megatron")
# Position of a sample that trains on some of its response tokens.
CHOSEN = 5
Change = Any


def plug_in(monkeypatch: pytest.MonkeyPatch, change: Change, name: str = "advantages") -> str:
    """Sets each advantage to 1, and those of one sample to what `change` makes of them and of their mask."""

    def function(args: Any, rollout_data: dict[str, Any]) -> None:
        ones = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]
        for key in {"advantages", name}:
            rollout_data[key] = [
                change(values, mask) if position == CHOSEN and key == name else values
                for position, values, mask in zip(
                    rollout_data["sample_positions"], ones, rollout_data["loss_masks"], strict=True
                )
            ]

    monkeypatch.setitem(sys.modules, "advantages_to_check", SimpleNamespace(function=function))
    return "advantages_to_check.function"


def samples() -> list[Any]:
    found = make_samples()
    for number, sample in enumerate(found):
        sample.index = 100 + number
    found[CHOSEN].loss_mask = [0] + [1] * (found[CHOSEN].response_length - 1)
    return found


LENGTH = samples()[CHOSEN].response_length


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values, mask: values[:-1], rf"shape \[{LENGTH - 1}\]"),
        (lambda values, mask: values[:, None], rf"shape \[{LENGTH}, 1\]"),
        (lambda values, mask: values / (1 - mask), "inf at response token 1"),
        (lambda values, mask: values * torch.nan, "nan at response token 1"),
        (lambda values, mask: None, "NoneType"),
    ],
)
def test_advantages_of_another_form_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, backend: str, change: Change, words: str
):
    path = plug_in(monkeypatch, change)
    runner = Runner(make_settings(model, custom_advantage_function_path=path, train_backend=backend))
    with pytest.raises(PluginError, match=words) as caught:
        runner.run(0, samples())
    message = str(caught.value)
    assert message.startswith(f"--custom-advantage-function-path {path}: ")
    assert f"sample {100 + CHOSEN}" in message
    assert f"expected a finite number for each of {LENGTH} response tokens" in message


@pytest.mark.parametrize("lists", [None, []])
def test_a_function_that_sets_no_advantages_is_refused(model: str, monkeypatch: pytest.MonkeyPatch, lists: Any):
    def function(args: Any, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = lists

    monkeypatch.setitem(sys.modules, "advantages_to_check", SimpleNamespace(function=function))
    runner = Runner(make_settings(model, custom_advantage_function_path="advantages_to_check.function"))
    with pytest.raises(PluginError, match=r"--custom-advantage-function-path .*advantages.*an entry for each of \d"):
        runner.run(0, samples())


def test_returns_of_another_form_are_refused(model: str, monkeypatch: pytest.MonkeyPatch):
    path = plug_in(monkeypatch, lambda values, mask: values[1:], "returns")
    runner = Runner(make_settings(model, custom_advantage_function_path=path, advantage_estimator="ppo"))
    with pytest.raises(PluginError, match=rf"returns.*sample {100 + CHOSEN}.*shape \[{LENGTH - 1}\]"):
        runner.run(0, samples())


@pytest.mark.parametrize(
    ("estimator", "normalized"), [("grpo", False), ("gspo", False), ("gspo", True), ("reinforce_plus_plus", True)]
)
def test_an_advantage_of_a_token_that_does_not_train_changes_nothing(
    model: str, monkeypatch: pytest.MonkeyPatch, estimator: str, normalized: bool
):
    values: dict[str, Any] = {"advantage_estimator": estimator, "normalize_advantages": normalized}
    found = []
    for masked in (1.0, torch.nan, torch.inf):
        path = plug_in(monkeypatch, lambda values, mask, masked=masked: values.where(mask > 0, masked) * 2)
        metrics = Runner(make_settings(model, custom_advantage_function_path=path, **values)).run(0, samples())
        found.append((metrics["train/grad_norm"], metrics["train/pg_loss"]))
    assert found[1] == found[2] == pytest.approx(found[0], rel=1e-6)
