"""One step off with old weights kept and tokens drawn from nuclei; with a profile, and dumps of training data."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

from tiny_runs import metrics, run_command, write_inputs


def test_old_log_probs_are_of_the_weights_that_generated(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    output = tmp_path / "run"
    dumps = output / "dumps"
    run_command(
        "train-async", inputs, output, "--num-rollout", "3", "--keep-old-actor", "--rollout-top-p", "0.9",
        "--get-mismatch-metrics",
        "--use-pytorch-profiler", "--profile-target", "train_actor", "--save-debug-train-data",
        str(dumps / "{rollout_id}-{rank}.safetensors"),
    )  # fmt: skip
    rows = metrics(output)
    assert [row["rollout/weight_version_min"] for row in rows] == [0, 0, 1]
    assert [row["train/old_policies_missing"] for row in rows] == [0, 0, 0]
    # The engine's log-probs of its own tokens are the trainer's, with the weights of that version.
    assert all(row["train/tis_abs"] < 1e-3 for row in rows)
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-3 for row in rows)
    assert (output / "profiles" / "train_actor-rollout-0-rank-0.json.gz").is_file()
    with safe_open(dumps / "2-0.safetensors", "pt") as file:
        assert (file.get_tensor("log_probs") - file.get_tensor("rollout_log_probs")).abs().max() < 1e-3
