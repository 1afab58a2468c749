# zai-org/GLM-5, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 78
   --mtp-num-layers 1
   --hidden-size 6144
   --num-attention-heads 64
   --ffn-hidden-size 12288
   --norm-epsilon 1e-05
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --multi-latent-attention
   --dsa-indexer-n-heads 32
   --dsa-indexer-head-dim 128
   --dsa-indexer-topk 2048
   --moe-shared-expert-intermediate-size 2048
   --moe-ffn-hidden-size 2048
   --moe-router-topk 8
   --moe-router-topk-scaling-factor 2.5
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --q-lora-rank 2048
   --kv-lora-rank 512
   --qk-head-dim 192
   --qk-pos-emb-head-dim 64
   --v-head-dim 256
   --rope-type rope
   --max-position-embeddings 202752
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 1000000
   --vocab-size 154880
   --untie-embeddings-and-output-weights
   --swiglu
   --num-experts 256
   --moe-layer-freq '[0]*3+[1]*75'
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-GLM-5}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
