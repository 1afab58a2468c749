"""Starts SGLang engines, each one `sglang.launch_server` with its own GPUs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.doors import check_exposure
from slime.rollout.engines.gpus import VISIBLE
from slime.rollout.engines.kind import PREFILL, EngineNode
from slime.rollout.engines.process import EngineProcess
from slime.rollout.engines.sglang import plugin
from slime.rollout.engines.sglang.flags import check, command_line
from slime.rollout.engines.sglang.reserved import tensor_parallel_size
from slime.types.errors import InvalidSetting
from slime.types.weight_deltas import PULL

# SGLang looks for SIGTERM every 5 s, then gives its schedulers 15 s.
GRACE_SECONDS = 30.0
SERVER = (sys.executable, "-m", "sglang.launch_server")


@dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """Options of one engine.

    gpus: entries of CUDA_VISIBLE_DEVICES. memory_saver: its GPU memory can be released and resumed. routed_experts: it
    can return the experts of each token. deltas: it takes deltas of weights, by NCCL or into a checkpoint on its host.
    increments: its streams hold each token only once. stage: prefill or decode, for an engine of a pair. node: the part
    of an engine that spans nodes, with equally many GPUs on each. args: flags of SGLang's server by name, as returned
    by `flags.check`. server: the command of the server.
    """

    model_path: str
    gpus: Sequence[str]
    memory_saver: bool = False
    deterministic: bool = False
    random_seed: int | None = None
    routed_experts: bool = False
    deltas: bool = False
    increments: bool = False
    stage: str = ""
    node: EngineNode | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    server: Sequence[str] = SERVER

    @property
    def host(self) -> str:
        return str(self.args.get("host") or "127.0.0.1")


def start_sglang(
    options: SGLangOptions,
    *,
    name: str = "sglang-0",
    env: Mapping[str, str] | None = None,
    api_key: str | None = None,
) -> EngineProcess:
    """Starts the process without waiting until it serves (`wait_ready(timeout)` does), so that several load at once.

    api_key: the key that calls must carry; it does not appear in the argument list. Raises InvalidSetting if others
    could reach the server without one.
    """
    check_exposure(options.host, api_key, "--rollout-engine-host", "an API key")
    server = server_command(options)
    return EngineProcess(
        name,
        "sglang",
        lambda announce, parent: [
            *(sys.executable, "-m", "slime.rollout.engines.sglang"),
            *("--announce-fd", str(announce), "--parent-fd", str(parent), "--host", options.host),
            *(("--bootstrap",) if options.stage == PREFILL else ()),
            *("--", *server),
        ],
        host=options.host,
        env={VISIBLE: ",".join(options.gpus)}
        | plugin.environment(options.args, deterministic=options.deterministic)
        | plugin.environment_of_model(options.model_path, options.args)
        | (plugin.environment_of_deltas() if options.deltas else {})
        | dict(env or {}),
        grace_seconds=GRACE_SECONDS,
        api_key=api_key,
    )


def server_command(options: SGLangOptions) -> list[str]:
    """Returns the argument vector of the server, without host and port. Raises ConfigError for invalid args."""
    node = options.node
    nodes = 1 if node is None else node.count
    flags = [
        f"--model-path={options.model_path}",
        f"--tp-size={tensor_parallel_size(len(options.gpus) * nodes, options.args)}",
        "--weight-version=0",
    ]
    if node is not None:
        flags += [f"--nnodes={nodes}", f"--node-rank={node.rank}", f"--dist-init-addr={node.address}"]
    if options.stage:
        flags.append(f"--disaggregation-mode={options.stage}")
    if options.memory_saver:
        flags.append("--enable-memory-saver")
    if options.routed_experts:
        flags.append("--enable-return-routed-experts")
    if options.random_seed is not None:
        flags.append(f"--random-seed={options.random_seed}")
    args = {name: value for name, value in check(options.args).items() if name != "host"}
    if options.deterministic:
        args["enable-deterministic-inference"] = True
    if options.increments:
        args["incremental-streaming-output"] = True
    if options.deltas:
        args["custom_weight_loader"] = [*(args.get("custom_weight_loader") or ()), PULL]
    return [*options.server, *flags, *command_line(args)]


def all_gpus(visible: Sequence[str], per_engine: int, node: EngineNode) -> list[str]:
    """Returns this node's GPUs for an engine that spans nodes. Raises InvalidSetting if their number is wrong."""
    if len(visible) * node.count != per_engine:
        raise InvalidSetting.must_be(
            "--rollout-num-gpus-per-engine", f"{len(visible) * node.count}", got=per_engine,
            reason=f"each of its {node.count} nodes has {len(visible)} GPUs for it: {VISIBLE}={','.join(visible)}",
        )  # fmt: skip
    return list(visible)


def divide_gpus(visible: Sequence[str], wanted: int | None, per_engine: int) -> list[list[str]]:
    """Returns the GPUs of each engine, in order. wanted: number of GPUs; None: as many visible ones as fill engines.

    Raises InvalidSetting if there are too few.
    """
    total = len(visible) // per_engine * per_engine if wanted is None else wanted
    if total > len(visible) or total < per_engine:
        flag = "--rollout-num-gpus-per-engine" if wanted is None else "--rollout-num-gpus"
        value = per_engine if wanted is None else wanted
        raise InvalidSetting.must_be(
            flag, f"at most {len(visible)}", got=value, reason=f"the visible GPUs are {VISIBLE}={','.join(visible)}"
        )
    return [list(visible[i : i + per_engine]) for i in range(0, total, per_engine)]
