# zai-org/GLM-4.7, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 92
   --mtp-num-layers 1
   --hidden-size 5120
   --num-attention-heads 96
   --num-query-groups 8
   --ffn-hidden-size 12288
   --kv-channels 128
   --norm-epsilon 1e-05
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --qk-layernorm
   --moe-shared-expert-intermediate-size 1536
   --moe-ffn-hidden-size 1536
   --moe-router-topk 8
   --moe-router-topk-scaling-factor 2.5
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --group-query-attention
   --max-position-embeddings 202752
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --rotary-percent 0.5
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --swiglu
   --num-experts 160
   --moe-layer-freq '[0]*3+[1]*89'
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-GLM-4.7}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
