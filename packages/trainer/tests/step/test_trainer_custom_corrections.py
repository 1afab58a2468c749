"""Answers of --custom-tis-function-path and --custom-pg-loss-reducer-function-path of another form are refused: torch
would broadcast them."""

from pathlib import Path
from typing import Any

import pytest
from trainer_tiny import Runner, make_settings

from slime.types.errors import PluginError

FUNCTIONS = """
import torch

def mean(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss.mean(), loss_masks, {}

def row(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss[None], loss_masks, {}

def short(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss, [mask[1:] for mask in loss_masks], {}

def of_samples(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"mine": torch.zeros(len(loss_masks))}

def pair(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks

def one_number(args, *, pg_loss, loss_masks, **kwargs):
    return pg_loss, loss_masks, {"mine": 0.25}

def tokens(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: x

def number(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda x: float(x.sum())
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    (tmp_path / "corrections.py").write_text(FUNCTIONS)
    return str(tmp_path / "corrections.py")


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mean", r"its pg_loss has shape \[\], expected \[\d+\]"),
        ("row", r"its pg_loss has shape \[1, \d+\], expected \[\d+\]"),
        ("short", r"its loss masks have shape \[\d+\], expected \[\d+\]"),
        ("of_samples", r"its metric 'mine' has shape \[\d+\], expected \[\d+\]"),
        ("pair", "it returned a tuple of 2, expected a tuple of 3: pg_loss, loss masks and metrics"),
    ],
)
def test_corrections_of_another_form_are_refused(model: str, path: str, backend: str, name: str, words: str):
    values: dict[str, Any] = {"use_tis": True, "train_backend": backend}
    runner = Runner(make_settings(model, custom_tis_function_path=f"{path}:{name}", **values))
    with pytest.raises(PluginError, match=f"^--custom-tis-function-path {path}:{name}: {words}"):
        runner.run()


def test_a_metric_of_a_correction_may_be_one_number(model: str, path: str):
    settings = make_settings(model, custom_tis_function_path=f"{path}:one_number", use_tis=True)
    assert Runner(settings).run()["train/mine"] == pytest.approx(0.25)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize(("name", "words"), [("tokens", r"shape \[\d+\]"), ("number", "a float")])
def test_reducers_that_return_no_loss_are_refused(model: str, path: str, backend: str, name: str, words: str):
    settings = make_settings(model, custom_pg_loss_reducer_function_path=f"{path}:{name}", train_backend=backend)
    with pytest.raises(
        PluginError, match=f"^--custom-pg-loss-reducer-function-path {path}:{name}: .*{words}.*expected"
    ):
        Runner(settings).run()
