"""Whole runs with the variants of rewards and loss that other runs do not use, several of them at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_runs import metrics, run_command, write_inputs

SAMPLES = 32
ICEPOP_AND_DR_GRPO = (
    "--use-tis", "--tis-mode", "token_mask", "--tis-clip-low", "0.5", "--loss-divisor", "5",
    "--disable-grpo-std-normalization", "--skip-nonfinite-updates",
)  # fmt: skip
MIS_AND_DAPO = (
    "--use-tis", "--tis-mode", "sequence_mask", "--tis-clip-low", "0.5", "--grpo-std-scope", "batch",
    "--overlong-mask", "--overlong-buffer-len", "2",
)  # fmt: skip


@pytest.mark.parametrize("flags", [ICEPOP_AND_DR_GRPO, MIS_AND_DAPO], ids=["icepop, dr. grpo", "mis, dapo"])
def test_a_run_trains_with_these_variants(flags: tuple[str, ...], tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    run_command("train", inputs, tmp_path / "run", "--num-rollout", "2", *flags)
    rows = metrics(tmp_path / "run")
    assert [row["train/step"] for row in rows] == [1, 2]
    for row in rows:
        # The engine's weights are those of the policy, so no token is corrected or left out for it.
        assert row["train/tis"] == pytest.approx(1, abs=1e-3) and row["train/tis_clipfrac"] == 0
        assert row["train/grad_norm"] > 0
        tokens = row["rollout/response_lengths"] * SAMPLES
        truncated = round(row["rollout/truncated_ratio"] * SAMPLES)
        assert truncated > 0
        masked = 5 * truncated if "--overlong-mask" in flags else 0
        assert row["rollout/trained_tokens"] == pytest.approx(tokens - masked)
    assert [row.get("train/nonfinite_updates") for row in rows] == [0 if flags is ICEPOP_AND_DR_GRPO else None] * 2
