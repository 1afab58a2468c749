"""Flags of SGLang's server that this package sets itself, each with the flag to use instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.types.errors import InvalidSetting

OWN_NODES = "give --rollout-num-gpus-per-engine; an engine with more GPUs than a node has spans several nodes"
OWN_PORTS = "each engine listens on a free port that the system chooses"
OWN_KEY = "a run generates the key of its engines; give --rollout-engine-api-key-file for engines that run already"
PLAIN_HTTP = "engines are called by plain HTTP"
OTHER_SERVER = "engines must serve SGLang's HTTP protocol"

# The flag to use instead of each of SGLang's flags (not its aliases), or the reason why there is none.
RESERVED: dict[str, str] = {
    "model-path": "give --hf-checkpoint",
    "config": "give the flags one by one, or as sglang_NAME in the file of --config",
    "trust-remote-code": "code that comes with a checkpoint is not run",
    "random-seed": "give --rollout-seed",
    "enable-memory-saver": "give --offload-rollout, or --colocate, which turns it on",
    "weight-version": "it counts the updates of the policy, from 0",
    "tp-size": "give --rollout-num-gpus-per-engine",
    "port": OWN_PORTS,
    "nccl-port": OWN_PORTS,
    "grpc-port": OWN_PORTS,
    "nnodes": OWN_NODES,
    "node-rank": OWN_NODES,
    "dist-init-addr": OWN_NODES,
    "base-gpu-id": "give CUDA_VISIBLE_DEVICES; engines take its devices in order",
    "gpu-id-step": "give CUDA_VISIBLE_DEVICES; engines take its devices in order",
    "disaggregation-mode": "give worker_type in the file of --sglang-config, or --prefill-num-servers",
    "disaggregation-bootstrap-port": OWN_PORTS,
    "skip-server-warmup": "an engine counts as started when it has generated a token",
    "enable-return-routed-experts": "give --use-rollout-routing-replay",
    "api-key": OWN_KEY,
    "admin-api-key": OWN_KEY,
    "ssl-keyfile": PLAIN_HTTP,
    "ssl-certfile": PLAIN_HTTP,
    "ssl-ca-certs": PLAIN_HTTP,
    "ssl-keyfile-password": PLAIN_HTTP,
    "enable-ssl-refresh": PLAIN_HTTP,
    "grpc-mode": OTHER_SERVER,
    "smg-grpc-mode": OTHER_SERVER,
    "encoder-only": OTHER_SERVER,
    "is-embedding": OTHER_SERVER,
    "use-ray": OTHER_SERVER,
}

GROUPS_GPUS = "give num_gpus_per_engine of the group"
GPUS_IN_TURN = "groups get the GPUs in the order in which the file has them"
# The file of --sglang-config has keys of its own for some of these.
RESERVED_IN_FILE: dict[str, str] = RESERVED | {
    "model-path": "give model_path of the model",
    "config": "give its flags as overrides",
    "tp-size": GROUPS_GPUS,
    "nnodes": GROUPS_GPUS,
    "node-rank": GROUPS_GPUS,
    "dist-init-addr": GROUPS_GPUS,
    "base-gpu-id": GPUS_IN_TURN,
    "gpu-id-step": GPUS_IN_TURN,
    "disaggregation-mode": "give worker_type of the group",
}


def refuse_reserved(name: str, flag: str, value: Any, reserved: Mapping[str, str] = RESERVED) -> None:
    """Raises InvalidSetting if the run itself sets the flag `name` (no alias). flag: as the user typed it."""
    instead = reserved.get(name)
    if instead is not None:
        message = f"{flag} cannot be set, because the run sets it: {instead}"
        raise InvalidSetting(message, field=flag, value=value, expected=instead)


def tensor_parallel_size(gpus_per_engine: int, args: Mapping[str, Any]) -> int:
    """Returns the tensor-parallel size of an engine: its GPUs divided by pipeline stages and data-parallel replicas.

    Replicas of attention alone (--sglang-enable-dp-attention) share the tensor-parallel GPUs. Raises InvalidSetting if
    the division leaves a remainder.
    """
    stages = int(args.get("pp_size", 1))
    replicas = 1 if args.get("enable_dp_attention") else int(args.get("dp_size", 1))
    if gpus_per_engine % (stages * replicas):
        raise InvalidSetting.must_be(
            "--rollout-num-gpus-per-engine",
            f"a multiple of --sglang-pp-size {stages} x --sglang-dp-size {replicas}",
            got=gpus_per_engine,
        )
    return gpus_per_engine // (stages * replicas)
