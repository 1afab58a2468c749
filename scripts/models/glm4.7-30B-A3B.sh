# zai-org/GLM-4.7-Flash, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 47
   --mtp-num-layers 1
   --hidden-size 2048
   --num-attention-heads 20
   --ffn-hidden-size 10240
   --norm-epsilon 1e-05
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --multi-latent-attention
   --moe-shared-expert-intermediate-size 1536
   --moe-ffn-hidden-size 1536
   --moe-router-topk 4
   --moe-router-topk-scaling-factor 1.8
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --q-lora-rank 768
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
   --num-experts 64
   --moe-layer-freq '[0]+[1]*46'
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-GLM-4.7-Flash}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
