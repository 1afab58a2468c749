"""Micro-batches are packed one after the other, while a device computes those before."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from trainer_tiny import Runner, make_samples, make_settings

from slime.trainer.step import step
from slime.trainer.step.micro_batches import MicroBatches


def test_a_micro_batch_is_packed_once_when_it_is_asked_for() -> None:
    packed: list[int] = []

    def pack(number: int) -> Any:
        packed.append(number)
        return None if number == 1 else f"row {number}"

    batches = MicroBatches([lambda n=n: pack(n) for n in range(3)])  # type: ignore[misc]
    assert len(batches) == 3 and not packed
    assert batches[1] is None and packed == [1]
    assert list(batches) == ["row 0", None, "row 2"] and packed == [1, 0, 2]
    batches.pack_all()
    assert len(packed) == 3
    other: Any = "another"
    batches[2] = other
    assert batches[2] == "another"


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, ["pack", "train", "pack", "train"]),
        ({"use_rollout_logprobs": True}, ["pack", "train", "pack", "train"]),
        # The passes that only score are the first ones.
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": "model"}, ["pack", "score", "pack", "score"]),
        # Every micro-batch counts in the advantages of each.
        ({"normalize_advantages": True}, ["pack", "pack", "pack", "pack"]),
    ],
)
def test_rows_are_packed_between_passes(
    model: str, settings: dict[str, Any], first: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if settings.get("ref_load"):
        settings = settings | {"ref_load": model}
    runner = Runner(make_settings(model, use_dynamic_batch_size=False, micro_batch_size=2, **settings))
    events: list[str] = []

    def told(event: str, function: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            events.append(event)
            return function(*args, **more)

        return call

    passes: Any = runner.backend._passes  # type: ignore[attr-defined]
    monkeypatch.setattr(step, "pack", told("pack", step.pack))
    monkeypatch.setattr(passes, "forward_backward", told("train", passes.forward_backward))
    monkeypatch.setattr(passes, "outputs", told("score", passes.outputs))
    runner.run()
    if "score" not in first:
        # They make outputs, too.
        events = [event for event in events if event != "score"]
    assert events[:4] == first
    assert events.count("pack") == events.count("train") > 2


@pytest.mark.parametrize(
    "settings", [{}, {"train_backend": "megatron"}, {"use_dynamic_batch_size": False, "micro_batch_size": 2}]
)
def test_the_samples_of_a_step_are_freed_when_it_ends(model: str, settings: dict[str, Any]) -> None:
    runner, samples = Runner(make_settings(model, **settings)), make_samples()
    kept = [weakref.ref(sample) for sample in samples]
    gc.collect()
    gc.disable()
    try:
        runner.run(samples=samples)
        del samples
        assert not [reference for reference in kept if reference() is not None]
    finally:
        gc.enable()
