"""Attention goes to cuDNN where it can, decided without a GPU; tests/gpu/test_packed_attention.py computes it."""

import logging
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime.trainer.backends import cudnn_attention
from slime.trainer.backends.cudnn_attention import AttentionShape, Bounds, find_plan


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU of that kind, and nothing left of the plans of other tests."""
    monkeypatch.setattr(cudnn_attention, "_wanted", lambda device: True)
    monkeypatch.setattr(cudnn_attention._Made, "any", False)
    monkeypatch.setattr(cudnn_attention._Made, "failed", False)
    cudnn_attention._plan.cache_clear()


QUERY, KEY = torch.zeros(64, 4, 128), torch.zeros(64, 2, 128)
BOUNDS = Bounds(3, 40, 40)


def test_a_cpu_has_no_plan():
    assert find_plan(QUERY, KEY, BOUNDS, True, None) is None


def test_a_library_that_makes_no_plan_is_asked_once_and_named(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    asked = []

    def pygraph(**settings: object) -> None:
        asked.append(settings)
        raise RuntimeError("CUDNN_ATTR_OPERATION_RESHAPE_MODE failed\nand more")

    library = SimpleNamespace(
        __version__="1.24.1", data_type=SimpleNamespace(HALF=0, BFLOAT16=1, FLOAT=2), pygraph=pygraph
    )
    monkeypatch.setattr(cudnn_attention, "_library", lambda: library)
    monkeypatch.setattr(cudnn_attention, "_handle", lambda device: 0)
    with caplog.at_level(logging.WARNING):
        for bounds in (BOUNDS, BOUNDS, Bounds(9, 500, 500)):
            assert find_plan(QUERY, KEY, bounds, True, None) is None
    (record,) = caplog.records
    assert len(asked) == 1
    assert "1.24.1" in record.getMessage() and record.getMessage().endswith("RESHAPE_MODE failed")


def test_a_shape_without_a_plan_leaves_those_of_others(
    on_hopper: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def plan(shape: AttentionShape) -> AttentionShape:
        if shape.bounds.runs > 4:
            raise RuntimeError("CUDNN_STATUS_NOT_SUPPORTED")
        return shape

    monkeypatch.setattr(cudnn_attention, "AttentionPlan", plan)
    monkeypatch.setattr(cudnn_attention, "_library", lambda: SimpleNamespace(__version__="1.22.1"))
    with caplog.at_level(logging.WARNING):
        found = [find_plan(QUERY, KEY, Bounds(runs, 40, 40), True, None) for runs in (3, 9, 3, 4)]
    assert [plan is None for plan in found] == [False, True, False, False]
    (record,) = caplog.records
    assert "rows of 64 tokens" in record.getMessage()


def test_deterministic_gradients_are_not_asked_of_cudnn(on_hopper: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert find_plan(QUERY, KEY, BOUNDS, True, None) is None


@pytest.mark.parametrize(
    ("error", "level"), [(ModuleNotFoundError("cudnn"), "INFO"), (AssertionError("two"), "WARNING")]
)
def test_a_library_that_cannot_be_loaded_is_named(
    error: Exception, level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(cudnn_attention.importlib, "import_module", fail)
    with caplog.at_level(logging.INFO):
        assert cudnn_attention._library.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelname == level and "cuDNN" in record.getMessage()


def test_rows_share_a_plan_unless_their_bounds_differ_much(on_hopper: None, monkeypatch: pytest.MonkeyPatch):
    made = []

    def plan(shape: AttentionShape) -> AttentionShape:
        made.append(shape)
        return shape

    monkeypatch.setattr(cudnn_attention, "AttentionPlan", plan)
    plans = [
        find_plan(QUERY, KEY, Bounds(runs, longest, longest), True, None) for runs, longest in ((33, 40), (40, 90))
    ]
    assert plans[0] is plans[1] and made[0].bounds == Bounds(40, 128, 128)
    assert find_plan(QUERY, KEY, Bounds(41, 40, 40), True, None) is not plans[0] and len(made) == 2


@pytest.mark.parametrize(
    ("query", "key"),
    [
        (torch.zeros(64, 4, 64), torch.zeros(64, 2, 64)),
        (QUERY, torch.zeros(80, 2, 128)),
        (torch.zeros(1, 1, 1).expand(2**19, 32, 128), torch.zeros(1, 1, 1).expand(2**19, 8, 128)),
    ],
)
def test_what_cudnn_does_not_take_goes_elsewhere(on_hopper: None, query: torch.Tensor, key: torch.Tensor):
    assert find_plan(query, key, BOUNDS, True, None) is None


@given(st.integers(1, 500), st.integers(1, 40_000), st.integers(1, 40_000))
def test_rounded_bounds_have_room_and_little_more(runs: int, max_q: int, max_k: int):
    bounds = Bounds(runs, max_q, max_k)
    rounded = bounds.rounded()
    assert rounded.rounded() == rounded
    for number, more, least in zip(bounds, rounded, (1, 128, 128), strict=True):
        assert number <= more <= max(1.25 * number, least)
