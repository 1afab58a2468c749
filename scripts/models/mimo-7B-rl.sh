# XiaomiMiMo/MiMo-7B-RL, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 36
   --mtp-num-layers 1
   --hidden-size 4096
   --num-attention-heads 32
   --num-query-groups 8
   --ffn-hidden-size 11008
   --kv-channels 128
   --norm-epsilon 1e-05
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --group-query-attention
   --max-position-embeddings 32768
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 640000
   --vocab-size 151680
   --untie-embeddings-and-output-weights
   --swiglu
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-MiMo-7B-RL}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
