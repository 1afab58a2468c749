#!/usr/bin/env bash
# run.sh [OUTPUT_DIR] [flags of `slime train`]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-runs/dpo}"

python "$here/make_inputs.py" "$out/inputs"
slime train \
  --hf-checkpoint "$out/inputs/model" --prompt-data "$out/inputs/pairs.jsonl" --input-key prompt \
  --custom-generate-function-path "$here/dpo.py:pair" \
  --loss-type custom_loss --custom-loss-function-path "$here/dpo.py:dpo_loss" --use-kl-loss \
  --num-rollout 30 --rollout-batch-size 32 --n-samples-per-prompt 2 --micro-batch-size 16 \
  --lr 1e-3 --output-dir "$out" "${@:2}"
