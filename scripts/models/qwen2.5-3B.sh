# Qwen/Qwen2.5-3B-Instruct, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 36
   --hidden-size 2048
   --num-attention-heads 16
   --num-query-groups 2
   --ffn-hidden-size 11008
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
   --vocab-size 151936
   --swiglu
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Qwen2.5-3B-Instruct}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
