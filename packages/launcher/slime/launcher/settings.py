"""What only the launcher uses: how long to train, where it runs, what it writes.

A field that another package declares under the same name is one flag, and both get its value; a test holds their
types and bounds equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime.types.settings import json_object, setting


@dataclass(kw_only=True)
class LauncherSettings:
    """Launcher: the training loop, placement, output."""

    num_rollout: int = setting(
        None, "rollouts to run, each followed by training on it (required); 0 only evaluates", minimum=0
    )
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
        None, "also export Hugging Face weights at each checkpoint; {rollout_id} in the path is replaced", metavar="DIR"
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

    train_backend: str = setting("fsdp", "trainer implementation", choices=("fsdp", "megatron"))
    actor_num_nodes: int = setting(1, "nodes that the trainer runs on; 1 for now", minimum=1)
    actor_num_gpus_per_node: int = setting(
        None,
        "trainer ranks on a node: one GPU each, or one CPU process each where there is no GPU (default: as many as "
        "Megatron's parallel sizes need, else 1)",
        minimum=1,
    )
    rollout_num_gpus: int | None = setting(
        None, "GPUs for generation (default: one; with --colocate the trainer's)", minimum=1
    )
    colocate: bool = setting(False, "trainer and engines share GPUs; changes nothing where there is no GPU")
    offload: bool = setting(False, "the same as --offload-rollout")
    ray_address: str | None = setting(
        None, "Ray cluster to join, `auto` for the one on this machine (default: RAY_ADDRESS, else one for this run)"
    )
    ray_num_cpus: int | None = setting(None, "CPUs of the Ray that this run starts (default: all)", minimum=1)
    train_env_vars: dict[str, Any] = setting(
        dict, "environment variables of the trainer's processes, a JSON object", parse=json_object, metavar="JSON"
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
    run_name: str | None = setting(None, "name of the run (default: that of --output-dir, else the time of its start)")
    use_tensorboard: bool | None = setting(None, "write TensorBoard events (default: on)")
    tb_project_name: str | None = setting(
        None, "TensorBoard events go to tensorboard/PROJECT/EXPERIMENT below --output-dir", metavar="PROJECT"
    )
    tb_experiment_name: str | None = setting(None, "see --tb-project-name", metavar="EXPERIMENT")

    seed: int = setting(1234, "seed of the trainer")
    deterministic: bool = setting(
        False, "requests in index order and in fixed batches: two runs on one machine give the same metrics"
    )
    custom_config_path: str | None = setting(
        None,
        "flat YAML file that wins over every flag; keys that are no setting become attributes of the plug-ins' `args`",
        metavar="FILE.yaml",
    )
