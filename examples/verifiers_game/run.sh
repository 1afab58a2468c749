#!/usr/bin/env bash
# run.sh [OUTPUT_DIR] [flags of `slime train`]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-runs/verifiers_game}"

python "$here/make_inputs.py" "$out/inputs"
slime train \
  --hf-checkpoint "$out/inputs/model" --prompt-data "$out/inputs/prompts.jsonl" \
  --custom-agent-path "$here/environment.py:agent" \
  --num-rollout 40 --rollout-batch-size 10 --n-samples-per-prompt 16 --rollout-max-response-len 1 \
  --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 3e-3 --entropy-coef 0.01 --output-dir "$out" "${@:2}"
