"""`--rollout-data-transport`: the way that samples take changes nothing of what is trained."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from tiny_runs import command, finish, metrics, timeless, write_inputs

# Samples of the tiny model are small: with this every tensor of theirs goes through the store.
EVERYTHING = """
import sys
from slime.launcher import cli
from slime.launcher.services import start
from slime.launcher.blob_stores.nixl import NixlWriter
from slime.launcher.blob_stores.object_store import ObjectStoreWriter
start.ObjectStoreWriter = lambda: ObjectStoreWriter(inline_bytes=1)
start.NixlWriter = lambda alone: NixlWriter(alone=alone, inline_bytes=1)
sys.exit(cli.main())
"""
TOLD = re.compile(r"step (\d+): (\d+) bytes of (\d+) samples went as blobs")


STORES = ["object-store"] + ["nixl"] * (importlib.util.find_spec("nixl") is not None)


def test_a_deterministic_run_has_the_same_metrics_over_grpc_and_through_a_store(tmp_path: Path) -> None:
    inputs = write_inputs(tmp_path / "inputs")
    flags = ("--deterministic", "--num-rollout", "2", "--actor-num-gpus-per-node", "2", "--use-rollout-logprobs")
    told = {}
    for transport in ("grpc", *STORES):
        output_dir = tmp_path / transport
        process = command(
            "train", inputs, output_dir, *flags, "--rollout-data-transport", transport, program=("-c", EVERYTHING)
        )
        output = finish(process)
        assert process.returncode == 0, output
        told[transport] = TOLD.findall((output_dir / "logs" / "buffer.log").read_text())
    assert told["grpc"] == []
    rows = timeless(metrics(tmp_path / "grpc"))
    assert len(rows) == 2 and all("train/grad_norm" in row for row in rows)
    for store in STORES:
        # Tokens, masks and log-probs of every sample that was read, of both ranks.
        assert [step for step, _, _ in told[store]] == ["0", "1"]
        assert all(int(size) > 20 * int(count) > 0 for _, size, count in told[store])
        assert rows == timeless(metrics(tmp_path / store))
