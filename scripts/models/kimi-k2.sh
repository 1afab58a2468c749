# moonshotai/Kimi-K2-Instruct, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 61
   --hidden-size 7168
   --num-attention-heads 64
   --ffn-hidden-size 18432
   --norm-epsilon 1e-06
   --disable-bias-linear
   --normalization RMSNorm
   --qk-layernorm
   --multi-latent-attention
   --moe-shared-expert-intermediate-size 2048
   --moe-ffn-hidden-size 2048
   --moe-router-topk 8
   --moe-router-topk-scaling-factor 2.827
   --moe-router-score-function sigmoid
   --moe-router-dtype fp32
   --moe-router-enable-expert-bias
   --moe-router-bias-update-rate 0.0
   --q-lora-rank 1536
   --kv-lora-rank 512
   --qk-head-dim 128
   --qk-pos-emb-head-dim 64
   --v-head-dim 128
   --rope-type yarn
   --rotary-scaling-factor 32.0
   --original-max-position-embeddings 4096
   --beta-fast 1.0
   --beta-slow 1.0
   --mscale 1.0
   --mscale-all-dim 1.0
   --max-position-embeddings 131072
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 50000
   --vocab-size 163840
   --untie-embeddings-and-output-weights
   --swiglu
   --num-experts 384
   --moe-layer-freq '[0]+[1]*60'
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Kimi-K2-Instruct}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
