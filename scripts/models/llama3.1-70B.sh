# meta-llama/Llama-3.1-70B-Instruct, from its config.json by `slime-convert model-args`.
MODEL_ARGS=(
   --num-layers 80
   --hidden-size 8192
   --num-attention-heads 64
   --num-query-groups 8
   --ffn-hidden-size 28672
   --kv-channels 128
   --norm-epsilon 1e-05
   --disable-bias-linear
   --normalization RMSNorm
   --group-query-attention
   --max-position-embeddings 131072
   --position-embedding-type rope
   --no-position-embedding
   --rotary-base 500000
   --use-rope-scaling
   --rope-scaling-factor 8.0
   --vocab-size 128256
   --untie-embeddings-and-output-weights
   --swiglu
   --tokenizer-type HuggingFaceTokenizer
   --bf16
)
# MEGATRON_CHECKPOINT: a torch_dist directory to take the weights from instead.
CKPT_ARGS=(
   --hf-checkpoint "${HF_CHECKPOINT:-Llama-3.1-70B-Instruct}"
   ${MEGATRON_CHECKPOINT:+--initial-megatron-checkpoint "$MEGATRON_CHECKPOINT"}
)
