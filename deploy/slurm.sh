#!/usr/bin/env bash
# One run of slime under Slurm: a Ray cluster over the nodes of the job, the run on it, and the cluster's end.
#   sbatch deploy/slurm.sh [flags of `slime train`, which win over those below]
# Needs slime in an environment on a file system that all nodes share, with its `bin` on the PATH of the job.
#SBATCH --job-name=slime
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --output=slime-%j.log
set -euo pipefail

shared="${SLIME_SHARED:-$PWD}"
gpus="${SLURM_GPUS_ON_NODE:-8}"
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head="$(srun --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" hostname --ip-address | awk '{print $1}')"
port=$((20000 + SLURM_JOB_ID % 20000))
# Other users of the cluster reach the port, too: Ray asks each of its peers for this token.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="$(python -c 'import secrets; print(secrets.token_hex(32))')"
export RAY_AUTH_TOKEN

started=()
trap 'kill "${started[@]}" 2>/dev/null || true; wait' EXIT
start_node() { # NODE [flags of `ray start`]
  srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" \
    ray start --block --num-gpus "$gpus" --disable-usage-stats "${@:2}" &
  started+=($!)
}
start_node "${nodes[0]}" --head --node-ip-address "$head" --port "$port"
for node in "${nodes[@]:1}"; do
  start_node "$node" --address "$head:$port"
done
# The run waits for GPUs, but not for a cluster that is not there yet.
for _ in $(seq 60); do
  ray status --address "$head:$port" > /dev/null 2>&1 && break
  sleep 2
done

srun --overlap --nodes=1 --ntasks=1 --nodelist="${nodes[0]}" slime train --ray-address "$head:$port" \
  --hf-checkpoint "$shared/models/Qwen3-4B" \
  --prompt-data "$shared/data/prompts.jsonl" --input-key prompt --label-key label --apply-chat-template \
  --rm-type math --colocate --actor-num-nodes "${#nodes[@]}" --actor-num-gpus-per-node "$gpus" \
  --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 4096 \
  --use-dynamic-batch-size --max-tokens-per-gpu 8192 --lr 1e-6 --num-rollout 200 \
  --save "$shared/runs/first/checkpoints" --load "$shared/runs/first/checkpoints" --save-interval 10 \
  --output-dir "$shared/runs/first" "$@"
