#!/usr/bin/env bash
# run.sh [OUTPUT_DIR] [flags of `slime train`]: a Ray cluster of two nodes, 127.0.0.1 and 127.0.0.2, and a run on it.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
out="$(mkdir -p "${1:-runs/two_nodes}" && cd "${1:-runs/two_nodes}" && pwd)"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
free_port() { python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
port="$(free_port)" dashboard="$(free_port)" temporary="$(mktemp -d)"

start_node() { # ADDRESS [flags of `ray start`]
  : > "$out/ray-$1.log"
  ray start --block --node-ip-address "$1" --num-cpus 2 --object-store-memory 100000000 --disable-usage-stats \
    --dashboard-agent-listen-port "$(free_port)" "${@:2}" >> "$out/ray-$1.log" 2>&1 &
  started+=($!)
  until grep -q "Ray runtime started" "$out/ray-$1.log"; do
    kill -0 $! 2>/dev/null || { echo "two_nodes: the node $1 did not start:" >&2; cat "$out/ray-$1.log" >&2; exit 1; }
    sleep 0.2
  done
}
started=()
trap 'kill "${started[@]}" 2>/dev/null; wait; rm -rf "$temporary"' EXIT
start_node 127.0.0.1 --head --port "$port" --dashboard-port "$dashboard" --temp-dir "$temporary" \
  --ray-client-server-port "$(free_port)"
start_node 127.0.0.2 --address "$(sed -n "s/.*--address='\([^']*\)'.*/\1/p" "$out/ray-127.0.0.1.log" | head -n 1)"

python "$here/../own_reward/make_inputs.py" "$out/inputs"
python "$here/look.py" "$out/run/access" &
look=$!
started+=($look)
ray job submit --address "http://127.0.0.1:$dashboard" -- \
  slime train --actor-num-nodes 2 \
  --hf-checkpoint "$out/inputs/model" --prompt-data "$out/inputs/prompts.jsonl" --input-key prompt \
  --custom-rm-path "$here/../own_reward/reward.py:score" \
  --num-rollout 40 --rollout-batch-size 8 --n-samples-per-prompt 32 --rollout-max-response-len 3 \
  --use-dynamic-batch-size --max-tokens-per-gpu 4096 --lr 2e-3 --output-dir "$out/run" "${@:2}"
wait $look
