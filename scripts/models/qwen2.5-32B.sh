# Qwen/Qwen2.5-32B-Instruct, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 64
   --hidden-size 5120
   --num-attention-heads 40
   --num-query-groups 8
   --ffn-hidden-size 27648
   --kv-channels 128
   --norm-epsilon 1e-06
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --group-query-attention
   --max-position-embeddings 32768
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --vocab-size 152064
   --untie-embeddings-and-output-weights
   --swiglu
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Qwen2.5-32B-Instruct}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
