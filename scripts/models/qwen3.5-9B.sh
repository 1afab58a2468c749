# Qwen/Qwen3.5-9B, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 32
   --hidden-size 4096
   --num-attention-heads 16
   --num-query-groups 4
   --ffn-hidden-size 12288
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
   --group-query-attention
   --max-position-embeddings 262144
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 10000000
   --rotary-percent 0.25
   --vocab-size 248320
   --untie-embeddings-and-output-weights
   --swiglu
   --linear-attention-freq 4
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Qwen3.5-9B}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
