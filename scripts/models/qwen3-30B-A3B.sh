# Qwen/Qwen3-30B-A3B, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 48
   --hidden-size 2048
   --num-attention-heads 32
   --num-query-groups 4
   --ffn-hidden-size 6144
   --kv-channels 128
   --norm-epsilon 1e-06
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --moe-ffn-hidden-size 768
   --moe-router-topk 8
   --moe-router-dtype fp32
   --group-query-attention
   --max-position-embeddings 40960
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --vocab-size 151936
   --untie-embeddings-and-output-weights
   --swiglu
   --num-experts 128
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Qwen3-30B-A3B}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
