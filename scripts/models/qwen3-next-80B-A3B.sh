# Qwen/Qwen3-Next-80B-A3B-Thinking, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 2048
   --num-attention-heads 16
   --num-query-groups 2
   --ffn-hidden-size 5120
   --kv-channels 256
   --norm-epsilon 1e-06
   --apply-layernorm-1p
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --attention-output-gate
   --linear-conv-kernel-dim 4
   --linear-key-head-dim 128
   --linear-value-head-dim 128
   --linear-num-key-heads 16
   --linear-num-value-heads 32
   --moe-shared-expert-intermediate-size 512
   --moe-shared-expert-gate
   --moe-ffn-hidden-size 512
   --moe-router-topk 10
   --moe-router-dtype fp32
   --group-query-attention
   --max-position-embeddings 262144
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 10000000
   --rotary-percent 0.25
   --vocab-size 151936
   --untie-embeddings-and-output-weights
   --swiglu
   --linear-attention-freq 4
   --num-experts 512
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Qwen3-Next-80B-A3B-Thinking}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
