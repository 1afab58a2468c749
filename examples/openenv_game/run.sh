#!/usr/bin/env bash
# run.sh [OUTPUT_DIR] [flags of `slime train`]
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="${1:-runs/openenv_game}"

mkdir -p "$out"
rm -f "$out/server.port"
python "$here/server.py" "$out/server.port" &
trap "kill $!" EXIT
until [ -s "$out/server.port" ]; do kill -0 $!; sleep 0.1; done
export GAME_URL="http://127.0.0.1:$(cat "$out/server.port")"
python "$here/make_inputs.py" "$out/inputs"
slime train \
  --hf-checkpoint "$out/inputs/model" --prompt-data "$out/inputs/prompts.jsonl" \
  --custom-generate-function-path "$here/game.py:generate" \
  --rollout-stop 0 1 2 3 4 5 6 7 8 9 --rollout-max-response-len 12 --rollout-shuffle \
  --num-rollout 80 --rollout-batch-size 16 --n-samples-per-prompt 16 \
  --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 2e-3 --entropy-coef 0.01 --output-dir "$out" "${@:2}"
