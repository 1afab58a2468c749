"""Whole runs with `--update-weight-mode delta` have the metrics and the weights of a run with full updates."""

from __future__ import annotations

from pathlib import Path

from slow_cases import slow
from tiny_runs import metrics, run, timeless

pytestmark = slow


def test_runs_with_deltas_are_the_run_with_all_weights(tmp_path: Path) -> None:
    disk = ("--update-weight-transport", "disk", "--update-weight-disk-dir", str(tmp_path / "shared"))
    for name, flags in (("full", ()), ("tensor", ()), ("disk", disk)):
        mode = "full" if name == "full" else "delta"
        run(tmp_path / name, "--num-rollout", "4", "--update-weight-mode", mode, *flags)
    wanted = tmp_path / "full"
    for name in ("tensor", "disk"):
        rows = metrics(tmp_path / name)
        assert timeless(rows) == timeless(metrics(wanted))
        assert [row["perf/update_weights_whole_engines"] for row in rows] == [1, 0, 0, 0]
        file = "model/model.safetensors"
        assert (tmp_path / name / file).read_bytes() == (wanted / file).read_bytes()
    assert list((tmp_path / "shared").iterdir()) == []
