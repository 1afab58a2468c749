"""The fields of `SlimeRunner`: names, defaults, ranges and help."""

from __future__ import annotations

from dataclasses import dataclass

from slime.buffer.settings import BufferSettings
from slime.launcher.metrics.sinks.wandb import WandbSettings
from slime.rollout.agents.settings import LOG_LEVELS, RENDERERS, STRATEGIES
from slime.rollout.settings.rollout import RolloutSettings
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.settings import like, setting
from slime.types.shared_settings import BatchSettings, GroupSettings, PolicySettings

DEFAULT_GPUS = 8


@dataclass
class RunnerFields:
    """The fields that `SlimeRunner` checks. Lengths are in tokens, times in seconds."""

    exp_id: str | None = setting(None, "Name of the run; its files go to runs/NAME")
    agent_runtime_arn: str | None = setting(None, "Agent to train: an AgentCore ARN, or a URL")
    s3_bucket: str | None = setting(None, "S3 bucket in which the agent leaves its results")
    model_dir: str | None = like(PolicySettings, "hf_checkpoint", default=None)
    data_path: str | None = like(BufferSettings, "prompt_data")
    model_type: str | None = setting(None, "Model script or known model with the MODEL_ARGS; not needed on the CPU")

    num_gpus: int = setting(DEFAULT_GPUS, "GPUs of this machine to use; 0 for the CPU", minimum=0)
    tp_size: int = setting(2, "Tensor-parallel size of the trainer: GPUs that share each layer", minimum=1)
    rollout_gpus_per_engine: int = like(RolloutSettings, "rollout_num_gpus_per_engine", default=2)
    slime_dir: str = setting("/root/slime", "Checkout with train.py and scripts/models; may be absent")
    megatron_dir: str = setting("/root/Megatron-LM", "Checkout put on the job's PYTHONPATH; may be absent")
    cuda_home: str | None = setting(
        None, "Directory of the only CUDA toolkit that the run uses (default: the environment's)"
    )

    model_id: str = setting("default", "Name of the model in the agents' requests")
    acr_timeout: int = setting(900, "Seconds that an episode may take", minimum=1)
    acr_tps_limit: int = setting(25, "Maximum number of agent invocations per second", minimum=1)
    max_concurrent: int = setting(100, "Maximum number of episodes in flight", minimum=1)
    max_pool_connections: int = setting(100, "Maximum number of connections to AWS", minimum=1)
    gateway_port: int = setting(9090, "Port of the endpoint that agents talk to", minimum=0, maximum=65535)
    reward_postprocessing: str = setting("grpo", "Normalization of episodes' rewards", choices=STRATEGIES)
    sglang_tool_call_parser: str = setting("qwen", "Tool-call syntax of the model")
    sglang_reasoning_parser: str | None = setting(None, "Reasoning syntax of the model (default: none)")
    sglang_data_parallel_size: int = setting(1, "Data-parallel size of an engine", minimum=1)
    cumulative_token_mode: bool = setting(False, "Continue a conversation from its tokens, not from its text")
    renderer_family: str = setting("auto", "Renderer of messages with cumulative_token_mode", choices=RENDERERS)
    gateway_log_level: str = setting("warning", "Log level of the agents' endpoint", choices=LOG_LEVELS)

    rollout_batch_size: int = like(BatchSettings, "rollout_batch_size")
    n_samples_per_prompt: int = like(GroupSettings, "n_samples_per_prompt", default=8)
    rollout_max_response_len: int = like(RolloutSettings, "rollout_max_response_len")
    rollout_temperature: float = like(PolicySettings, "rollout_temperature")
    lr: float = like(TrainerSettings, "lr")
    eps_clip: float = like(TrainerSettings, "eps_clip")
    eps_clip_high: float = like(TrainerSettings, "eps_clip_high", default=0.28)
    weight_decay: float = like(TrainerSettings, "weight_decay", default=0.1)
    adam_beta2: float = like(TrainerSettings, "adam_beta2", default=0.98)
    sglang_mem_fraction_static: float = setting(
        0.7, "Share of GPU memory for an engine's weights and KV cache", above=0, maximum=1
    )
    sglang_context_length: int | None = setting(None, "Context length of an engine (default: the model's)", minimum=1)
    max_tokens_per_gpu: int = like(TrainerSettings, "max_tokens_per_gpu", default=9216)

    wandb_project: str | None = like(WandbSettings, "wandb_project")
    wandb_group: str | None = like(WandbSettings, "wandb_group")

    extra_flags: list[str] = setting(list, "More flags of `slime train`; they win over the fields")
