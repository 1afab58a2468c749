"""Settings of the launcher: length of training, placement, output.

A setting that other packages have, too, is one flag whose value they all get; slime.types.shared_settings declares it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.launcher.config.presets import PRESETS
from slime.launcher.metrics.sinks.registry import TrackerSettings
from slime.types.pace import POLICIES
from slime.types.settings import json_object, setting
from slime.types.shared_settings import EngineSettings, ModeSettings, TrainingSettings


@dataclass(kw_only=True)
class LoopSettings:
    """Settings of the training loop."""

    preset: str | None = setting(
        None,
        "Recipe that sets the defaults of an algorithm; flags, files and SLIME_* variables take precedence",
        choices=tuple(PRESETS),
    )
    num_rollout: int | None = setting(
        None,
        "Iterations to run: one rollout and the training on it each; 0 only evaluates (required without --num-epoch)",
        minimum=0,
    )
    num_epoch: int | None = setting(
        None,
        "Passes over --prompt-data to run, in place of --num-rollout; a pass has as many iterations as its prompts "
        "fill. --save-interval and --eval-interval also take effect at the end of each pass",
        minimum=1,
    )
    update_weights_interval: int = setting(
        1, "Push the weights to the engines after every N iterations, and before each evaluation", minimum=1
    )
    async_buffer_size: int | None = setting(
        None,
        "Maximum number of rollouts that `slime train-async` generates ahead of the trainer, with the one in progress "
        "(default: 1)",
        minimum=1,
    )
    fully_async: bool = setting(
        False,
        "Generate without pause while the trainer trains; running requests continue with new weights (for `slime "
        "train-async`)",
    )
    max_staleness: int | None = setting(
        None,
        "Maximum number of weight updates between a sample's oldest token and the training on it, with "
        "--fully-async; 0 trains like `slime train` (default: 2)",
        minimum=0,
    )
    staleness_policy: str | None = setting(
        None,
        "Treatment of a group that exceeds --max-staleness: wait (the trainer waits for it), drop (it is rejected and "
        "counted) or keep (it is trained on) (default: wait)",
        choices=POLICIES,
    )

    debug_rollout_only: bool = setting(False, "Only generate and evaluate; start no trainer")
    debug_train_only: bool = setting(
        False,
        "Only train, on the rollouts of --load-debug-rollout-data or of a --rollout-function-path that needs no "
        "engine; start no engine and evaluate nothing",
    )
    load_debug_rollout_data: str | None = setting(
        None,
        "Recorded rollouts to train on; {rollout_id} in the path stands for the iteration, and without it every "
        "iteration trains on the same file. Implies --debug-train-only",
        metavar="PATH",
    )
    load_debug_rollout_data_subsample: float | None = setting(
        None,
        "Share of the groups of each recorded rollout to train on, taken from its beginning and its end (default: all)",
        above=0,
        maximum=1,
    )
    dump_details: str | None = setting(
        None,
        "Directory for everything that each rollout generates (rollout_data/) and trains on (train_data/): "
        "sets --save-debug-rollout-data and --save-debug-train-data",
        metavar="DIR",
    )


@dataclass(kw_only=True)
class LauncherSettings(TrackerSettings, LoopSettings, TrainingSettings, EngineSettings, ModeSettings):
    """Launcher: the training loop, placement, output."""

    eval_interval: int | None = setting(
        None,
        "Evaluate every N iterations, and before the first and after the last one (default: only these two)",
        minimum=1,
    )
    eval_config: str | None = setting(
        None,
        "YAML file of evaluation sets in place of --eval-prompt-data, each with its own settings: eval: "
        "{defaults: {...}, datasets: [{name, path, temperature, ...}]}",
        metavar="FILE.yaml",
    )
    skip_eval_before_train: bool = setting(False, "Leave out the evaluation before the first rollout")
    save_interval: int | None = setting(
        None, "Write a checkpoint every N iterations and after the last one (default: no checkpoints)", minimum=1
    )
    save_keep: int | None = setting(
        None, "Keep the last N checkpoints and delete older ones (default: keep all)", minimum=1
    )
    save_retain_interval: int | None = setting(
        None,
        "Keep every N-th iteration's checkpoint among the older ones, and delete the others (default: keep all)",
        minimum=1,
    )
    save_hf: str | None = setting(
        None,
        "Directory of Hugging Face exports, one per checkpoint: {rollout_id} in the path is replaced; without "
        "it each export replaces the one before (default: no exports)",
        metavar="DIR",
    )

    ckpt_step: int | None = setting(
        None, "Iteration whose checkpoint --load takes (default: the newest in the directory)", minimum=0
    )
    ref_ckpt_step: int | None = setting(
        None, "Iteration whose checkpoint --ref-load takes (default: the newest in the directory)", minimum=0
    )
    opd_teacher_ckpt_step: int | None = setting(
        None, "Iteration whose checkpoint --opd-teacher-load takes (default: the newest in the directory)", minimum=0
    )
    initial_megatron_checkpoint: str | None = setting(
        None,
        "Directory of the first weights in torch_dist format, used while --load has no checkpoint yet",
        metavar="DIR",
    )
    model_type: str | None = setting(
        None, "Name of a known model (qwen3-4B, ...; see scripts/models): --hf-checkpoint must match it"
    )

    actor_num_nodes: int = setting(1, "Number of nodes of the Ray cluster that the trainer runs on", minimum=1)
    actor_num_gpus_per_node: int = setting(
        None,
        "Trainer ranks per node, one per GPU; without GPUs, CPU processes (default: as many as Megatron's parallel "
        "sizes need, else 1)",
        minimum=1,
    )
    num_gpus_per_node: int | None = setting(
        None, "GPUs per node that the run may use (default: all that Ray reports)", minimum=1
    )
    offload: bool = setting(False, "Same as --offload-rollout --offload-train")
    ray_address: str | None = setting(
        None,
        "Address of the Ray cluster to join, `auto` for the one of this user on this machine (default: RAY_ADDRESS, "
        "else a Ray of the run's own)",
    )
    ray_num_cpus: int | None = setting(None, "CPUs of the Ray that this run starts (default: all)", minimum=1)
    train_env_vars: dict[str, Any] = setting(
        dict,
        "Environment variables for the trainer's processes, a JSON object; not for secrets",
        parse=json_object,
        metavar="JSON",
    )

    use_slime_router: bool = setting(
        False,
        "Send requests through the rollout service's own router, as every run does: only plug-ins that read "
        "`args.use_slime_router` notice the flag",
    )
    megatron_to_hf_mode: str | None = setting(
        None,
        "Converter that gives weights their Hugging Face names, with --train-backend megatron: bridge and raw "
        "both select this project's own",
        choices=("bridge", "raw"),
    )
    rollout_data_transport: str = setting(
        "grpc",
        "Transport of samples' large tensors (routed experts, multimodal inputs) to the trainer: inside the "
        "buffer's gRPC messages, through Ray's object store, or by NIXL (RDMA, TCP) from the buffer's memory",
        choices=("grpc", "object-store", "nixl"),
    )

    start_timeout_seconds: float = setting(600.0, "Seconds that a service may take to start", above=0)
    rollout_timeout_seconds: float = setting(3600.0, "Seconds that one rollout or evaluation may take", above=0)
    train_timeout_seconds: float = setting(3600.0, "Seconds that training on one rollout may take", above=0)
    update_timeout_seconds: float = setting(600.0, "Seconds that one weight update may take", above=0)
    save_timeout_seconds: float = setting(1800.0, "Seconds that one checkpoint or export may take", above=0)
    stop_grace_seconds: float = setting(45.0, "Seconds that a service may take to stop before it is killed", above=0)
    service_health_timeout: float = setting(
        60.0,
        "Seconds without an answer to health checks after which a service counts as hung and, with "
        "--use-fault-tolerance, is started again",
        above=0,
    )
    service_max_restarts: int = setting(
        5, "Maximum number of restarts of one service within --service-restart-window; one more ends the run", minimum=1
    )
    service_restart_window: float = setting(600.0, "Seconds over which the restarts of a service are counted", above=0)
    restart_point_interval: float = setting(
        30.0,
        "Minimum seconds between two writes of the trainer's state to recovery/ in --output-dir, from which lost ranks "
        "are started again; they take 5 % of the run's time at most",
        minimum=0,
    )

    output_dir: str | None = setting(
        None,
        "Directory of metrics, samples, settings, logs, checkpoints and the trained model (default: runs/RUN_NAME)",
        metavar="DIR",
    )
    log_samples: int = setting(
        2,
        "Groups per iteration of which up to 4 samples each are written to samples/ in --output-dir, for `slime show`; "
        "0 writes none, also of evaluations",
        minimum=0,
    )
    watch: bool = setting(
        False, "Serve the page of `slime show` about this run on the loopback while it goes on, and print its address"
    )
    metrics_port: int | None = setting(
        None,
        "Port on which the launcher serves Prometheus metrics (/metrics) and the health of all services (/health); 0 "
        "lets the system pick one, and without the flag none is open",
        minimum=0,
        maximum=65535,
    )
    metrics_host: str = setting(
        "127.0.0.1",
        "Address that --metrics-port listens on; metrics and token travel as plain HTTP, also beyond the loopback",
    )
    overwrite: bool = setting(
        False,
        "Replace the metrics, plots, events, checkpoints and the model that an earlier run left in "
        "--output-dir and --save; without it, a directory with such results is refused unless --load resumes "
        "that run",
    )
    run_name: str | None = setting(
        None, "Name of the run (default: the last part of --output-dir, else the time of its start)"
    )
    use_tensorboard: bool | None = setting(None, "Write TensorBoard events (default: on)")
    tb_project_name: str | None = setting(
        None,
        "Project of TensorBoard events, which go to tensorboard/PROJECT/EXPERIMENT below --output-dir",
        metavar="PROJECT",
    )
    tb_experiment_name: str | None = setting(
        None, "Experiment of TensorBoard events; see --tb-project-name", metavar="EXPERIMENT"
    )

    dry_run: bool = setting(
        False, "Print placement, batches and an estimate of the memory, then exit; nothing is started or loaded"
    )
    dry_run_gpus: int | None = setting(
        None, "Plan for nodes with N GPUs each, whatever this machine has (requires --dry-run)", minimum=0
    )
    dry_run_gpu_gib: float | None = setting(
        None, "Plan for GPUs with this much memory, in GiB (requires --dry-run; default: this machine's)", above=0
    )
    custom_config_path: str | None = setting(
        None,
        "Flat YAML file that overrides every flag; keys that are not settings become attributes of the "
        "plug-ins' `args`",
        metavar="FILE.yaml",
    )
