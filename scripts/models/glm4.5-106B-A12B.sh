# zai-org/GLM-4.5-Air, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 46
   --mtp-num-layers 1
   --hidden-size 4096
   --num-attention-heads 96
   --num-query-groups 8
   --ffn-hidden-size 10944
   --kv-channels 128
   --norm-epsilon 1e-05
   --disable-bias-linear
   --add-qkv-bias
   --normalization RMSNorm
   --moe-shared-expert-intermediate-size 1408
   --moe-ffn-hidden-size 1408
   --moe-router-topk 8
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --group-query-attention
   --max-position-embeddings 131072
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --rotary-percent 0.5
   --vocab-size 151552
   --untie-embeddings-and-output-weights
   --swiglu
   --num-experts 128
   --moe-layer-freq '[0]+[1]*45'
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-GLM-4.5-Air}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
