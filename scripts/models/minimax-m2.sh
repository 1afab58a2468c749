# MiniMaxAI/MiniMax-M2.5, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 62
   --hidden-size 3072
   --num-attention-heads 48
   --num-query-groups 8
   --ffn-hidden-size 1536
   --kv-channels 128
   --norm-epsilon 1e-06
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --moe-ffn-hidden-size 1536
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --group-query-attention
   --max-position-embeddings 196608
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 5000000
   --rotary-percent 0.5
   --vocab-size 200064
   --untie-embeddings-and-output-weights
   --swiglu
   --qk-layernorm-across-heads
   --num-experts 256
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-MiniMax-M2.5}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
