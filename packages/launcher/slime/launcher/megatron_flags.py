"""Names of Megatron's own flags, known so that giving one says what it is."""

from __future__ import annotations

PREFIXES = (
    "tensor-model-parallel", "pipeline-model-parallel", "virtual-pipeline", "context-parallel", "hierarchical-context",
    "expert-model-parallel", "expert-tensor-parallel", "num-layers-per-", "num-virtual-stages", "decoder-",
    "encoder-", "moe-", "mtp-", "mamba-", "hybrid-", "linear-attention-", "linear-num-", "linear-conv-",
    "qk-head-dim", "qk-pos-emb", "v-head-dim", "q-lora-", "kv-lora-", "rotary-", "rope-", "yarn-", "mscale",
    "recompute-", "distribute-saved", "ckpt-", "dist-ckpt-", "non-persistent-", "fp8-", "fp4-", "te-", "cuda-graph-",
    "overlap-", "cp-comm-", "tp-comm-", "gradient-", "accumulate-", "optimizer-", "adam-", "sgd-", "muon-",
    "ddp-", "data-parallel-sharding", "exit-", "straggler-", "nccl-", "inference-", "retro-", "vision-", "dsa-",
    "heterogeneous-", "rampup-", "wgrad-", "log-throughput", "log-progress", "log-memory", "log-num-zeros",
)  # fmt: skip

NAMES = frozenset(
    """
    num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups group-query-attention kv-channels
    seq-length max-position-embeddings position-embedding-type use-rotary-position-embeddings no-rope-freq
    make-vocab-size-divisible-by vocab-size normalization norm-epsilon apply-layernorm-1p
    apply-residual-connection-post-layernorm swiglu squared-relu quick-geglu onnx-safe
    untie-embeddings-and-output-weights
    multi-latent-attention qk-layernorm qk-l2-norm softmax-type window-size attention-output-gate
    disable-bias-linear add-qkv-bias add-bias-linear attention-dropout hidden-dropout weight-decay
    start-weight-decay end-weight-decay weight-decay-incr-style init-method-std init-method-xavier-uniform
    optimizer optimizer-cpu-offload use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype
    exp-avg-sq-dtype use-distributed-optimizer lr-decay-style lr-decay-iters lr-decay-samples lr-warmup-iters
    lr-warmup-fraction lr-warmup-samples lr-warmup-init lr-wsd-decay-style lr-wsd-decay-iters min-lr
    override-opt-param-scheduler use-checkpoint-opt-param-scheduler decoupled-lr train-iters train-samples
    sequence-parallel expert-parallel use-mcore-models use-legacy-models transformer-impl spec
    attention-backend attention-softmax-in-fp32 use-flash-attn attention-mask-in-dataloader
    apply-query-key-layer-scaling
    no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion
    no-persist-layer-norm no-gradient-accumulation-fusion cross-entropy-loss-fusion cross-entropy-fusion-impl
    fp16 bf16 fp32-residual-connection loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
    calculate-per-token-loss check-for-nan-in-loss-and-grad no-check-for-nan-in-loss-and-grad
    use-cpu-initialization empty-unused-memory-level delay-wgrad-compute use-torch-fsdp2 use-megatron-fsdp
    load save save-interval no-load-optim no-load-rng no-save-optim no-save-rng finetune no-initialization
    use-dist-ckpt async-save use-persistent-ckpt-worker auto-detect-ckpt-format ckpt-step exit-interval
    tokenizer-type tokenizer-model tokenizer-hf-include-special-tokens tokenizer-kwargs vocab-file merge-file data-path
    split mock-data reset-position-ids reset-attention-mask eod-mask-loss num-workers dataloader-type
    no-create-attention-mask-in-dataloader eval-iters log-interval log-params-norm log-timers-to-tensorboard
    timing-log-level tensorboard-dir tensorboard-log-interval manual-gc manual-gc-interval manual-gc-eval
    profile profile-ranks profile-step-start profile-step-end use-pytorch-profiler
    enable-cuda-graph external-cuda-graph deterministic-mode enable-experimental rank world-size local-rank
    account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split use-tp-pp-dp-mapping
    use-tokenizer-model-from-checkpoint-args microbatch-group-size-per-virtual-pipeline-stage config-logger-dir yaml-cfg
    """.split()
)


def is_megatron_flag(name: str) -> bool:
    """Whether `name`, without dashes in front, is one of Megatron's flags."""
    return name in NAMES or name.startswith(PREFIXES)
