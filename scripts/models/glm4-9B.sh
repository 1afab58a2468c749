# zai-org/GLM-Z1-9B-0414, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 40
   --hidden-size 4096
   --num-attention-heads 32
   --num-query-groups 2
   --ffn-hidden-size 13696
   --kv-channels 128
   --norm-epsilon 1e-05
   --disable-bias-linear
   --add-qkv-bias
   --rotary-interleaved
   --normalization RMSNorm
   --group-query-attention
   --max-position-embeddings 32768
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 10000
   --rotary-percent 0.5
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --swiglu
   --post-self-attn-layernorm
   --post-mlp-layernorm
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-GLM-Z1-9B-0414}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
