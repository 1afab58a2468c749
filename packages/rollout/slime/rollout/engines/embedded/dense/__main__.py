"""Compiles the loops for models with heads of a size, and keeps them for engines that start later on such a processor.

python -m slime.rollout.engines.embedded.dense SIZE GROUP
"""

from __future__ import annotations

import argparse

import torch

from slime.rollout.engines.embedded.dense.loop_ops import LoopOps
from slime.rollout.engines.embedded.dense.loops import has_threads
from slime.rollout.engines.embedded.dense.model import compute_dtype
from slime.rollout.engines.embedded.dense.ops import Heads


def main() -> None:
    name = "python -m slime.rollout.engines.embedded.dense"
    parser = argparse.ArgumentParser(prog=name, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", type=int, metavar="SIZE", help="Value of head_dim in the model's config.json")
    parser.add_argument("group", type=int, metavar="GROUP", help="Value of num_attention_heads / num_key_value_heads")
    options = parser.parse_args()
    if min(options.size, options.group) < 1:
        parser.error(f"expected positive numbers, not {options.size} and {options.group}")
    if not has_threads():
        parser.exit(message="torch's threads cannot run compiled loops on this system: there is nothing to compile\n")
    for dtype in {torch.float32, compute_dtype(torch.bfloat16)}:
        LoopOps(Heads(options.group, 1, options.size, 1.0), 0.0, dtype)


if __name__ == "__main__":
    main()
