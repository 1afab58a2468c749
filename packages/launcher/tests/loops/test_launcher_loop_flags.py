"""Flags of the training loop: what they imply, and what they conflict with."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.launcher.cli import main
from slime.launcher.config import run_config
from slime.launcher.config.advice import advice
from slime.launcher.config.checks.loop import check_asynchronous, check_synchronous
from slime.launcher.placement.plan import plan_placement
from slime.types.errors import ConfigError, InvalidSetting

HELD = ("--eval-prompt-data", "held", "f")


def parse(*more: str, count: bool = True) -> run_config.RunConfig:
    words = ["--hf-checkpoint", "m", "--prompt-data", "p", *(("--num-rollout", "4") if count else ()), *more]
    return run_config.parse(words, check=False, environment={})


@pytest.mark.parametrize(
    "more, message",
    [
        (("--num-epoch", "2"), "--num-epoch 2 and --num-rollout 4 cannot be used together"),
        (("--start-rollout-id", "5"), "--start-rollout-id must be at most --num-rollout 4, got 5"),
        (
            ("--debug-rollout-only", "--load-debug-rollout-data", "x"),
            "--debug-rollout-only and --load-debug-rollout",
        ),
        (("--debug-train-only",), "requires --load-debug-rollout-data PATH"),
        (("--load-debug-rollout-data-subsample", "0.5"), "0.5 requires --load-debug-rollout-data PATH"),
        (("--load-debug-rollout-data-subsample", "1.5", "--load-debug-rollout-data", "x"), "at most 1"),
        (("--load-debug-rollout-data", "{step}"), "rollout_id"),
        (("--load-debug-rollout-data", "x", "--save-debug-rollout-data", "{rollout_id}"), "nothing is generated"),
        (
            ("--save-debug-train-data", "x", "--actor-num-gpus-per-node", "2"),
            "--save-debug-train-data must be a path with {rank} in it, got 'x': there are 2 ranks",
        ),
        (("--debug-rollout-only", "--save-interval", "1"), "there is no trainer"),
        (("--update-weights-interval", "2", "--colocate"), "give their memory back"),
        (("--update-weights-interval", "0"), "at least 1"),
        (("--async-buffer-size", "0"), "at least 1"),
    ],
)
def test_what_does_not_fit_together_is_said(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message) as raised:
        parse(*more)
    assert raised.value.field.startswith("--")


@pytest.mark.parametrize(
    "more, message",
    [
        ((), "--num-rollout is required"),
        (("--num-epoch", "1", "--disable-rollout-global-dataset"), "prompts that clients add cannot be counted"),
        (("--num-rollout", "0", *HELD, "--skip-eval-before-train"), "nothing to do"),
        (("--num-rollout", "0", "--load-debug-rollout-data", "x", *HELD), "nothing is evaluated"),
    ],
)
def test_how_long_a_run_is_must_be_said_and_mean_something(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(*more, count=False)


@pytest.mark.parametrize(
    "more, message",
    [
        (("--colocate",), "--colocate and slime train-async cannot be used together"),
        (("--offload-rollout",), "--offload-rollout and slime train-async cannot be used together"),
        (("--true-on-policy-mode",), "of older weights"),
        (("--deterministic", "--async-buffer-size", "2"), "timing decides"),
    ],
)
def test_what_needs_turns_is_refused_where_there_are_none(more: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        check_asynchronous(parse(*more).flat)


def test_what_only_one_loop_has_is_refused_by_the_other() -> None:
    with pytest.raises(InvalidSetting, match="--async-buffer-size 1 requires slime train-async"):
        check_synchronous(parse("--async-buffer-size", "1").flat)
    check_asynchronous(parse("--async-buffer-size", "2", "--update-weights-interval", "3").flat)
    check_synchronous(parse("--update-weights-interval", "3").flat)


def test_loaded_data_means_only_training_and_no_evaluation() -> None:
    config = parse("--load-debug-rollout-data", "d/{rollout_id}", *HELD)
    assert config.launcher.debug_train_only and not config.evaluates


def test_details_are_dumped_of_what_there_is() -> None:
    both = parse("--dump-details", "d")
    assert both.rollout.save_debug_rollout_data == "d/rollout_data/{rollout_id}.rollout"
    assert both.trainer.save_debug_train_data == "d/train_data/{rollout_id}_{rank}.safetensors"
    generating = parse("--dump-details", "d", "--debug-rollout-only")
    assert generating.rollout.save_debug_rollout_data and not generating.trainer.save_debug_train_data
    training = parse("--dump-details", "d", "--load-debug-rollout-data", "x")
    assert training.trainer.save_debug_train_data and not training.rollout.save_debug_rollout_data
    own = parse("--dump-details", "d", "--save-debug-rollout-data", "e/{rollout_id}")
    assert own.rollout.save_debug_rollout_data == "e/{rollout_id}"


def test_a_path_without_the_iteration_is_announced_in_one_sentence() -> None:
    def said(*flags: str) -> list[str]:
        return [text for text in advice(parse(*flags, "--eval-prompt-data", "n", "f")) if "{rollout_id}" in text]

    assert said("--save-debug-rollout-data", "d/data.pt") == [
        "--save-debug-rollout-data d/data.pt has no {rollout_id}: each iteration replaces the file of the one before, "
        "and each evaluation d/eval_data.pt"
    ]
    assert said("--save-debug-train-data", "d/data") == [
        "--save-debug-train-data d/data has no {rollout_id}: each iteration replaces the file of the one before"
    ]
    assert said("--load-debug-rollout-data", "d/data") == [
        "--load-debug-rollout-data d/data has no {rollout_id}: every iteration trains on the samples of this file"
    ]
    assert not said("--save-debug-rollout-data", "d/data.pt", "--num-rollout", "1")
    assert not said("--save-debug-rollout-data", "d/{rollout_id:03}", "--save-debug-train-data", "{rollout_id}")


def test_the_first_recorded_rollout_is_looked_for_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    line = ["train", "--hf-checkpoint", str(tmp_path), "--num-rollout", "3", "--output-dir", str(tmp_path / "out"),
            "--n-samples-per-prompt", "2"]  # fmt: skip
    assert main([*line, "--load-debug-rollout-data", str(tmp_path / "{rollout_id}.pt")]) == 2
    assert f"no such file {tmp_path}/0.pt" in capsys.readouterr().err
    assert main([*line, "--load-debug-rollout-data", str(tmp_path / "config.json")]) == 2
    assert f"-data {tmp_path}/config.json must be a recorded rollout, got" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_due_is_due_at_the_end_of_an_epoch_too() -> None:
    config = parse("--num-epoch", "2", "--save-interval", "4", "--update-weights-interval", "4", count=False)
    # As the run sets it, once it knows the prompts.
    config.launcher.num_rollout = 6
    assert [step for step in range(6) if config.saves_after(step)] == [2, 3, 5]
    assert [step for step in range(6) if config.updates_after(step)] == [3, 5]


def test_a_half_of_the_system_needs_the_gpus_of_that_half() -> None:
    def gpus(*more: str) -> tuple[int, int]:
        config = parse(*more, "--actor-num-gpus-per-node", "4", "--rollout-engine", "sglang")
        placement = plan_placement(config.launcher, config.rollout, 4)
        return placement.trainer_ranks, placement.rollout.get("num_gpus", 0)

    assert gpus("--debug-rollout-only", "--rollout-num-gpus", "3") == (0, 3)
    assert gpus("--debug-rollout-only", "--colocate") == (0, 4)
    assert gpus("--load-debug-rollout-data", "x", "--rollout-num-gpus", "3") == (4, 0)
