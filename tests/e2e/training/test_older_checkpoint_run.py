"""A run that goes back to an older checkpoint with the buffer that has deleted the samples of its later steps."""

from __future__ import annotations

from pathlib import Path

from tiny_runs import metrics, run_command, timeless, write_inputs


def test_a_run_goes_back_and_generates_the_same_again(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    output_dir, buffer_dir = tmp_path / "run", tmp_path / "buffer"
    keep = ("--buffer-dir", str(buffer_dir), "--run-name", "r", "--num-rollout", "4", "--deterministic")
    run_command("train", inputs, output_dir, *keep, "--save-interval", "2")
    first = timeless(metrics(output_dir))
    assert [row["step"] for row in first] == [0, 1, 2, 3]
    assert not list(buffer_dir.glob("payloads/*/*"))

    back = ("--load", str(output_dir / "checkpoints"), "--ckpt-step", "1", "--save-interval", "2")
    output = run_command("train", inputs, output_dir, *keep, *back)
    assert timeless(metrics(output_dir)) == first, output
    assert "step 2 and what follows is generated again" in (output_dir / "logs" / "buffer.log").read_text()
