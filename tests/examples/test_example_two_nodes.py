"""A run on a Ray cluster of two nodes on one machine, as the example starts it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slow_cases import slow


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of this machine on Linux only")
@slow
def test_a_rank_on_each_of_two_nodes_trains_and_speaks_tls_alone(
    run_example: Callable[..., str], steps_of: Callable[[Path], list[dict[str, Any]]], tmp_path: Path
) -> None:
    output = run_example("two_nodes", "out", "--num-rollout", "3")
    assert "rank 1, through TLS" in output and "127.0.0.2" in output
    assert output.count("UNAVAILABLE without TLS") == 4, output
    assert len(steps_of(tmp_path / "out" / "run")) == 3
