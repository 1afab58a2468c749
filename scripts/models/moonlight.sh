# moonshotai/Moonlight-16B-A3B-Instruct, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 27
   --hidden-size 2048
   --num-attention-heads 16
   --ffn-hidden-size 11264
   --norm-epsilon 1e-05
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --multi-latent-attention
   --moe-shared-expert-intermediate-size 2816
   --moe-ffn-hidden-size 1408
   --moe-router-topk 6
   --moe-router-topk-scaling-factor 2.446
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --rope-type rope
   --max-position-embeddings 8192
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 50000
   --vocab-size 163840
   --untie-embeddings-and-output-weights
   --swiglu
   --num-experts 64
   --moe-layer-freq '[0]+[1]*26'
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Moonlight-16B-A3B-Instruct}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
