"""What only the launcher uses: how long to train, where it runs, what it writes.

A field that another package declares under the same name is one flag, and both get its value; a test holds their
types and bounds equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.launcher.loop_settings import LoopSettings
from slime.launcher.metrics.wandb import WandbSettings
from slime.types.settings import json_object, setting


@dataclass(kw_only=True)
class LauncherSettings(LoopSettings, WandbSettings):
    """Launcher: the training loop, placement, output."""

    eval_interval: int | None = setting(
        None, "evaluate every N rollouts; with evaluation sets, before the first and after the last too", minimum=1
    )
    eval_config: str | None = setting(
        None,
        "evaluation sets in place of --eval-prompt-data, each with settings of its own: eval: {defaults: {...}, "
        "datasets: [{name, path, temperature, ...}]}",
        metavar="FILE.yaml",
    )
    skip_eval_before_train: bool = setting(False, "leave out the evaluation before the first rollout")
    save_interval: int | None = setting(None, "write a checkpoint every N rollouts and after the last", minimum=1)
    save: str | None = setting(
        None, "directory for checkpoints (default: checkpoints below --output-dir)", metavar="DIR"
    )
    save_keep: int | None = setting(None, "keep the last N checkpoints and delete older ones (default: all)", minimum=1)
    save_retain_interval: int | None = setting(
        None, "of older checkpoints keep every N-th rollout's, and delete the others (default: all)", minimum=1
    )
    save_hf: str | None = setting(
        None,
        "also export Hugging Face weights at each checkpoint; {rollout_id} in the path is replaced, without it each "
        "export takes the place of the one before",
        metavar="DIR",
    )

    ckpt_step: int | None = setting(
        None, "rollout whose checkpoint --load takes (default: the newest in the directory)", minimum=0
    )
    ref_ckpt_step: int | None = setting(None, "the same of --ref-load", minimum=0)
    initial_megatron_checkpoint: str | None = setting(
        None, "torch_dist directory of the weights to begin with, where --load has no checkpoint yet", metavar="DIR"
    )
    model_type: str | None = setting(
        None, "known model (qwen3-4B, ...) that --hf-checkpoint is held against, as scripts/models/NAME.sh has it"
    )

    train_backend: str = setting(
        "fsdp",
        "trainer implementation; with a flag of Megatron's and none named, it is megatron",
        choices=("fsdp", "megatron"),
    )
    actor_num_nodes: int = setting(1, "nodes that the trainer runs on, of the Ray cluster", minimum=1)
    actor_num_gpus_per_node: int = setting(
        None,
        "trainer ranks on a node: one GPU each, or one CPU process each where there is no GPU (default: as many as "
        "Megatron's parallel sizes need, else 1)",
        minimum=1,
    )
    num_gpus_per_node: int | None = setting(
        None, "GPUs of a node that the run may use (default: all that Ray counts there)", minimum=1
    )
    rollout_num_gpus: int | None = setting(
        None,
        "GPUs for generation (default: one; with --colocate the trainer's); 0: the engines are somewhere else, see "
        "--rollout-external-engine-addrs",
        minimum=0,
    )
    colocate: bool = setting(False, "trainer and engines share GPUs; changes nothing where there is no GPU")
    offload: bool = setting(False, "the same as --offload-rollout --offload-train")
    ray_address: str | None = setting(
        None, "Ray cluster to join, `auto` for the one on this machine (default: RAY_ADDRESS, else one for this run)"
    )
    ray_num_cpus: int | None = setting(None, "CPUs of the Ray that this run starts (default: all)", minimum=1)
    train_env_vars: dict[str, Any] = setting(
        dict, "environment variables of the trainer's processes, a JSON object", parse=json_object, metavar="JSON"
    )

    megatron_to_hf_mode: str | None = setting(
        None,
        "what gives weights their Hugging Face names, with --train-backend megatron: bridge and raw are names for the "
        "same thing here, this project's own converters",
        choices=("bridge", "raw"),
    )
    true_on_policy_mode: bool = setting(
        False,
        "train on nothing but samples of the very weights that are updated: one optimizer update on each rollout, and "
        "weights to the engines after each; what contradicts that is an error",
    )
    rollout_data_transport: str = setting(
        "grpc",
        "how large tensors of samples (routed experts, multimodal inputs) reach the trainer: inside the buffer's gRPC "
        "messages, or beside them through Ray's object store, or by NIXL out of the buffer's memory (RDMA, TCP)",
        choices=("grpc", "object-store", "nixl"),
    )

    start_timeout_seconds: float = setting(600.0, "how long a service may take to start", above=0)
    rollout_timeout_seconds: float = setting(3600.0, "how long one rollout or evaluation may take", above=0)
    train_timeout_seconds: float = setting(3600.0, "how long training on one rollout may take", above=0)
    update_timeout_seconds: float = setting(600.0, "how long one weight update may take", above=0)
    save_timeout_seconds: float = setting(1800.0, "how long one checkpoint or export may take", above=0)
    stop_grace_seconds: float = setting(45.0, "how long a service may take to stop before it is killed", above=0)

    output_dir: str | None = setting(
        None, "where metrics, logs and the model go (default: runs/RUN_NAME)", metavar="DIR"
    )
    log_samples: int = setting(
        2,
        "Groups of each step of which up to 4 samples are written to samples.jsonl below --output-dir; 0 for none",
        minimum=0,
    )
    overwrite: bool = setting(
        False,
        "Replace the metrics, plots, events, checkpoints and the model that an earlier run left in --output-dir and "
        "--save. Without it a directory that holds any is refused, unless --load resumes it.",
    )
    run_name: str | None = setting(None, "name of the run (default: that of --output-dir, else the time of its start)")
    use_tensorboard: bool | None = setting(None, "write TensorBoard events (default: on)")
    tb_project_name: str | None = setting(
        None, "TensorBoard events go to tensorboard/PROJECT/EXPERIMENT below --output-dir", metavar="PROJECT"
    )
    tb_experiment_name: str | None = setting(None, "see --tb-project-name", metavar="EXPERIMENT")

    seed: int = setting(1234, "seed of the trainer", minimum=0, maximum=2**32 - 1)
    deterministic: bool = setting(
        False, "requests in index order and in fixed batches: two runs on one machine give the same metrics"
    )
    dry_run: bool = setting(
        False, "print placement, batches and an estimate of the memory, and exit: nothing is started or loaded"
    )
    dry_run_gpus: int | None = setting(
        None, "plan for nodes with N GPUs each, whatever this machine has (with --dry-run)", minimum=0
    )
    dry_run_gpu_gib: float | None = setting(
        None, "plan for GPUs of this much memory (with --dry-run; default: that of this machine's)", above=0
    )
    custom_config_path: str | None = setting(
        None,
        "flat YAML file that wins over every flag; keys that are no setting become attributes of the plug-ins' `args`",
        metavar="FILE.yaml",
    )
