# Qwen/Qwen3-8B, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 4096
   --num-attention-heads 32
   --num-query-groups 8
   --ffn-hidden-size 12288
   --kv-channels 128
   --norm-epsilon 1e-06
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --group-query-attention
   --max-position-embeddings 40960
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --vocab-size 151936
   --untie-embeddings-and-output-weights
   --swiglu
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Qwen3-8B}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
