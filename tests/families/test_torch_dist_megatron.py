"""Checkpoints between slime-convert and megatron-core's own dist_checkpointing, of every family, at several layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from family_ranks import LAYOUTS, applies
from slime.converters.convert import torch_dist_to_hf
from slime.converters.convert.hf_to_torch_dist import convert
from slime.converters.families import find_family, read_config
from slime.converters.inspection.verify import compare
from slow_cases import slow
from tiny_families import NAMES, write_tiny

SECONDS = 120.0
# For several ranks, one family of every kind of layer: megatron-core takes seconds to save even the smallest model.
ONE_OF_A_KIND = ("glm4", "glm4_moe_mtp", "deepseek_v3", "qwen3_moe_dense_first", "mimo", "minimax_m2")


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("one", torch.float32),
        ("vpp", torch.bfloat16),
        pytest.param("tp", torch.bfloat16, marks=slow),
        pytest.param("sp_ep", torch.bfloat16, marks=slow),
    ],
)
def test_what_either_writes_the_other_reads_bit_for_bit(layout: str, dtype: torch.dtype, tmp_path: Path) -> None:
    families = {}
    for name in NAMES if layout == "one" else ONE_OF_A_KIND:
        source = write_tiny(name, tmp_path / "hf" / name, dtype=dtype, layers=4 if layout == "vpp" else None)
        config = read_config(source)
        if applies(layout, find_family(config).arguments(config) | LAYOUTS[layout]):
            families[name] = source
            convert(source, tmp_path / "families" / name / "torch_dist")
    run(tmp_path / "families", layout, 1 if layout == "one" else 2)
    for name, source in families.items():
        saved = tmp_path / "families" / name / layout
        back = torch_dist_to_hf.convert(saved, tmp_path / "back" / name, origin_hf_dir=source)
        # Bit for bit, but for dtypes: a router's bias is in float32 in Megatron, whatever it was.
        assert [str(difference) for difference in compare(source, back, atol=1e-45)] == [], name


def run(directory: Path, layout: str, world_size: int) -> None:
    script = Path(__file__).with_name("torch_dist_ranks.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    ranks = []
    for rank in range(world_size):
        command = [sys.executable, str(script), str(rank), str(world_size), str(directory), layout]
        log = (directory / f"{layout}-{rank}.log").open("w+")
        ranks.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
    try:
        for process, log in ranks:
            code = process.wait(SECONDS)
            log.seek(0)
            assert code == 0, log.read()[-4000:]
    finally:
        for process, log in ranks:
            process.kill()
            process.wait()
            log.close()
