"""Decisions about Megatron-LM's flags: those made of megatron-core's dataclasses, and those that are refused.

`generate` joins this with the fields of the dataclasses and with `by_hand.tsv`, the flags that Megatron-LM adds to
them, into `flags.tsv`. The names are those of Megatron-LM core_v0.16.
"""

from __future__ import annotations

# Fields of TransformerConfig and MLATransformerConfig that no flag sets under their own name: callables, what Megatron
# derives, and what has a row in by_hand.tsv.
NOT_FLAGS = frozenset(
    """
    timers finalize_model_grads_func grad_scale_func no_sync_func grad_sync_func param_sync_func
    _cpu_offloading_context init_method output_layer_init_method embedding_init_method activation_func
    virtual_pipeline_model_parallel_size params_dtype enable_autocast autocast_dtype
    num_microbatches_with_partial_activation_checkpoints tp_comm_overlap_disable_qkv tp_comm_overlap_disable_fc1
    pipeline_dtype variable_seq_lengths batch_p2p_comm batch_p2p_sync deallocate_pipeline_outputs cpu_offloading
    cpu_offloading_activations cpu_offloading_weights cpu_offloading_double_buffering softmax_scale gated_linear_unit
    bias_activation_fusion activation_func_fp8_input_store test_mode memory_efficient_layer_norm fused_single_qkv_rope
    fp8_dot_product_attention fp8_multi_head_attention tp_only_amax_red use_kitchen moe_token_dropping
    cuda_graph_use_single_mempool cuda_graph_retain_backward_graph disable_parameter_transpose_cache
    inference_sampling_seed use_inference_optimized_layers heterogeneous_block_specs hetereogenous_dist_checkpoint
    quant_recipe tp_comm_atomic_ag tp_comm_atomic_rs moe_router_topk_limited_devices
    async_tensor_model_parallel_allreduce
    pipeline_model_parallel_layout window_size window_attn_skip_freq no_rope_freq moe_layer_freq linear_attention_freq
    moe_router_load_balancing_type moe_aux_loss_coeff cp_comm_type cuda_graph_scope num_layers_in_first_pipeline_stage
    num_layers_in_last_pipeline_stage num_moe_experts fp8_param gradient_accumulation_fusion overlap_p2p_comm
    attention_softmax_in_fp32 masked_softmax_fusion persist_layer_norm bias_dropout_fusion apply_rope_fusion rotary_base
    rotary_percent use_te_rng_tracker bf16 calculate_per_token_loss fp16 offload_modules
    tp_comm_split_ag tp_comm_split_rs
    """.split()
)

# Attribute names of Megatron-LM's `args` that differ from the field that the flag sets.
DEST = {
    "layernorm_epsilon": "norm_epsilon",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "microbatch_group_size_per_vp_stage": "microbatch_group_size_per_virtual_pipeline_stage",
}

# Defaults of Megatron-LM's command line that differ from those of the dataclasses.
# The default of mtp_loss_scaling_factor is slime's, which the trainer sets (slime.trainer.backends.build).
DEFAULTS = {
    "q_lora_rank": None, "kv_lora_rank": 32, "rotary_scaling_factor": 1.0, "rope_type": None,
    "mtp_loss_scaling_factor": 0.2,
}  # fmt: skip

# Fields whose flag has fewer or more choices than the type says.
CHOICES = {
    "transformer_impl": ("local", "transformer_engine"),
    "rope_type": ("rope", "yarn"),
    "recompute_modules": ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
}

NO_FAMILY = "no family of models here has it"
OWN_LOSS = "log-probs and entropies come from the algorithms that every backend shares"
GRAPHS = "CUDA graphs in training"
LOW = "training in 4 bits, or with recipes of one's own"
DELAYED = "only --fp8-recipe delayed reads it, and that is not available"
DATA = "prompts come from --prompt-data"
TOKENIZER = "the tokenizer is that of --hf-checkpoint"
LOGGING = "metrics go to --output-dir, see --use-tensorboard"
INFERENCE = "engines generate, not Megatron"
LOOP = "--num-rollout and the batch sizes say how long a run is"
SCHEDULE = "see --lr, --min-lr, --lr-decay-style, --lr-decay-iters, --lr-warmup-iters, --lr-warmup-fraction"
CHECKPOINT = "checkpoints are written and read by the trainer"
FSDP = "sharded data parallelism is --train-backend fsdp"
TE = "performance only: used where Transformer Engine is installed, elsewhere the same numbers come without it"

# Fields with a flag that this version refuses, or takes for its own reasons. Field names, by reason.
REFUSED_FIELDS = {
    NO_FAMILY: """apply_residual_connection_post_layernorm activation_func_clamp_value glu_linear_offset
        qk_l2_norm qk_clip qk_clip_alpha qk_clip_threshold use_fused_weighted_squared_relu
        moe_latent_size mrope_section is_hybrid_model mamba_state_dim mamba_head_dim mamba_num_groups
        mamba_num_heads use_mamba_mem_eff_path""",
    "the family of --hf-checkpoint says which layers are gated delta nets, and which have an indexer": (
        "experimental_attention_variant"
    ),
    "the indexer of sparse attention does not train": "dsa_indexer_loss_coeff dsa_indexer_use_sparse_loss",
    OWN_LOSS: "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    GRAPHS: "enable_cuda_graph external_cuda_graph cuda_graph_impl cuda_graph_warmup_steps",
    LOW: """fp8_quantizer_factory fp4 fp4_recipe fp4_param fp4_quantizer_factory use_kitchen_attention
        kitchen_attention_backend""",
    DELAYED: "fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad",
    "with --fp8-format the tokens of each expert are padded without it, and routing stays as it is": """
        moe_router_padding_for_quantization moe_router_padding_for_fp8""",
    INFERENCE: """flash_decode cache_mla_latents inference_rng_tracker symmetric_ar_type inference_fuse_tp_communication
        mlp_chunks_for_prefill batch_invariant_mode""",
    "replaying the routing of a mixture of experts": "moe_enable_routing_replay",
    "moving activations to the CPU": "cpu_offloading_num_layers fine_grained_activation_offloading "
    "min_offloaded_tensor_size",
    "overlapping tensor-parallel communication needs Transformer Engine's user buffers": """tp_comm_overlap
        tp_comm_bulk_wgrad tp_comm_bulk_dgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
        tp_comm_bootstrap_backend""",
    "an overlap that needs Transformer Engine's layers": """delay_wgrad_compute overlap_moe_expert_parallel_comm
        ep_overlap_early_attn_memory_release""",
    "process groups other than the usual ones": """pipeline_model_parallel_comm_backend
        hierarchical_context_parallel_sizes hybrid_context_parallel max_seqlen_per_dp_cp_rank use_ring_exchange_p2p
        mtp_standalone""",
    "older than --expert-tensor-parallel-size, which says the same": "moe_extended_tp",
    "grouped matrix products come from Transformer Engine": "moe_use_legacy_grouped_gemm",
    "weights come from --hf-checkpoint, --load or --ref-load": "init_model_with_meta_device",
    "the attention here scales its logits once": "apply_query_key_layer_scaling",
    LOGGING: "log_max_attention_logit barrier_with_L1_time moe_per_layer_logging config_logger_dir",
    "an activation that no family here needs": "use_te_activation_func",
}

# Fields whose flag is taken with values that change nothing: field -> these values, and why no others are taken.
SAME_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    "hidden_dropout": ((0.0,), "log-probs of one policy must come out the same twice"),
    "attention_dropout": ((0.0,), "log-probs of one policy must come out the same twice"),
    "softmax_type": (("vanilla",), NO_FAMILY),
}
HINT_FIELDS = ("attention_backend", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion")

# Other flags of Megatron-LM, by the reason why they are refused. `*` at the end: every flag that begins so.
REFUSED = {
    NO_FAMILY: """window-size window-attn-skip-freq no-rope-freq openai-gelu squared-relu
        quick-geglu relative-attention-num-buckets relative-attention-max-distance onnx-safe
        bert-no-binary-head encoder-num-layers decoder-num-layers heterogeneous-* hybrid-* moe-use-upcycling
        moe-upcycling-granularity vision-* num-classes img-h img-w num-channels patch-dim mask-type mask-factor dino-*
        swin-backbone-type iter-per-epoch head-lr-mult classes-fraction data-per-class-fraction no-data-sharding retro-*
        ict-* biencoder-* bert-load titles-data-path query-in-block-prob use-one-sent-docs evidence-data-path
        retriever-* block-data-path embedding-path indexer-*""",
    "only bf16 and float32": """fp16 loss-scale initial-loss-scale min-loss-scale loss-scale-window hysteresis
        fp16-lm-cross-entropy""",
    LOW: "te-precision-config-file kitchen-config-file kitchen-recipe-number",
    "with --fp8-format weights stay in bfloat16 between passes, and only products are computed in FP8: checkpoints, "
    "weight updates and the reference model are made of them": """fp8-param-gather
        reuse-grad-buf-for-mxfp8-param-ag keep-fp8-transpose-cache""",
    GRAPHS: "cuda-graph-scope te-rng-tracker",
    "moving activations to the CPU": "offload-modules",
    "overlapping tensor-parallel communication needs Transformer Engine's user buffers": "tp-comm-overlap-cfg "
    "disable-tp-comm-split-ag disable-tp-comm-split-rs",
    "layers are placed by --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers": (
        "pipeline-model-parallel-layout"
    ),
    "older names; see --tensor-model-parallel-size, --micro-batch-size, --lr-warmup-iters, --recompute-granularity": """
        model-parallel-size batch-size warmup checkpoint-activations""",
    "only models of megatron-core": "use-legacy-models yaml-cfg",
    "optimizers other than adam and sgd": "muon-*",
    "separate learning rates of embedding and output layer": "decoupled-lr decoupled-min-lr",
    SCHEDULE: """lr-decay-samples lr-warmup-samples lr-warmup-init lr-wsd-decay-style
        lr-wsd-decay-iters lr-wsd-decay-samples override-opt-param-scheduler override-opt_param-scheduler
        use-checkpoint-opt-param-scheduler use-checkpoint-opt_param-scheduler start-weight-decay end-weight-decay
        weight-decay-incr-style no-weight-decay-cond-type""",
    LOOP: """train-iters train-samples rampup-batch-size decrease-batch-size-if-needed exit-interval
        exit-duration-in-mins exit-signal exit-signal-handler exit-signal-handler-for-dataloader eval-iters skip-train
        test-mode full-validation multiple-validation-sets iterations-to-skip train-sync-interval manual-gc
        manual-gc-interval no-manual-gc-eval disable-manual-gc-eval empty-unused-memory-level
        check-weight-hash-across-dp-replicas-interval sft sft-tokenizer-prompt-format perform-rl-step rl-* grpo-*
        langrl-env-config refit-method dump-param-to-param-group-map result-rejected-tracker-filename
        overlap-param-gather-with-optimizer-step""",
    "weights come from --hf-checkpoint, --load or --ref-load": """init-method-xavier-uniform data-parallel-random-init
        ict-load pretrained-checkpoint""",
    FSDP: """use-megatron-fsdp use-torch-fsdp2 use-custom-fsdp torch-fsdp2-no-reshard-after-forward
        data-parallel-sharding-strategy outer-dp-sharding-strategy no-gradient-reduce-div-fusion fsdp-double-buffer
        fsdp-manual-registration suggested-communication-unit-size enable-full-sharding-in-hsdp init-model-with-meta-*
        use-nccl-ub disable-symmetric-registration create-all-gather-group""",
    "process groups other than the usual ones": """use-tp-pp-dp-mapping num-distributed-optimizer-instances
        nccl-communicator-config-path use-sharp sharp-enabled-group high-priority-stream-groups
        disable-gloo-process-groups
        distributed-timeout-seconds-after-init lazy-mpu-init local-rank rank world-size
        fake-process-group no-align-grad-reduce disable-align-grad-reduce ddp-num-buckets ddp-average-in-collective
        no-scatter-gather-tensors-in-pipeline disable-jit-fuser""",
    CHECKPOINT: """save-wgrads-interval save-dgrads-interval persistent-save-interval no-save-rng no-load-optim
        no-load-rng load-main-params-from-ckpt non-persistent-* finetune pretrained-checkpoint use-checkpoint-args
        use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args
        use-tokenizer-model-from-checkpoint-args exit-on-missing-checkpoint ckpt-convert-* dist-ckpt-* no-ckpt-fully-*
        disable-ckpt-fully-* ckpt-fully-parallel-load ckpt-assume-constant-structure load-model-opt-format
        dist-ckpt-format use-persistent-ckpt-worker replication replication-jump replication-factor
        distrib-optim-fully-reshardable-mem-efficient enable-msc disable-msc adlr-autoresume
        adlr-autoresume-interval""",
    DATA: """data-path phase-transition-iterations split train-data-path valid-data-path test-data-path data-args-path
        per-split-data-args-path per-dataset-sequences-path dataloader-type dataloader-fast-cache-load
        dataloader-defer-npy-index-mmap data-cache-path no-mmap-bin-files mock-data encoder-seq-length
        decoder-seq-length sample-rate mask-prob short-seq-prob num-workers reset-position-ids reset-attention-mask
        eod-mask-loss no-create-attention-mask-in-dataloader num-dataset-builder-threads object-storage-cache-path
        mid-level-dataset-surplus allow-ambiguous-pad-tokens fim-*""",
    TOKENIZER: """vocab-file merge-file vocab-extra-ids tokenizer-model tokenizer-metadata tokenizer-special-tokens
        tokenizer-sentencepiece-legacy tokenizer-hf-* tokenizer-kwargs tiktoken-* trust-remote-code""",
    LOGGING: """log-interval log-params-norm log-throughput log-progress timing-log-level timing-log-option
        tensorboard-* log-timers-to-tensorboard no-log-loss-scale-to-tensorboard disable-log-loss-scale-to-tensorboard
        log-validation-ppl-to-tensorboard log-memory-to-tensorboard log-memory-interval log-device-memory-used
        log-num-zeros-in-grad log-world-size-to-tensorboard wandb-exp-name wandb-save-dir wandb-entity
        logging-level log-energy no-one-logger one-logger-* app-tag-run-name app-tag-run-version""",
    "memory and time profiles": """profile-ranks pytorch-profiler-collect-*
        memory-snapshot-path""",
    "watching the trainer's ranks": """log-straggler disable-straggler-on-startup straggler-*
        run-workload-inspector-server inprocess-* enable-ft-package calc-ft-timeouts ft-num-warmup-iters
        error-injection-rate error-injection-type rerun-mode""",
    INFERENCE: """inference-* max-tokens-to-oom output-bert-embeddings bert-embedder-type use-legacy-static-engine
        decode-only-cuda-graphs enable-chunked-prefill moe-pad-experts-for-cuda-graph-inference""",
}

# Field -> the help of its flag. Megatron's own sentences describe code, some are cut short, and one belongs to another
# field.
HELP: dict[str, str] = {
    "tensor_model_parallel_size": "Ranks that share each layer (tensor parallelism)",
    "pipeline_model_parallel_size": "Pipeline stages, each with a run of the layers",
    "sequence_parallel": "Cut norms and the residual stream over the tensor-parallel ranks, along the sequence",
    "context_parallel_size": "Ranks that share each sequence (context parallelism)",
    "expert_model_parallel_size": "Ranks that share the experts of a layer",
    "expert_tensor_parallel_size": "Ranks that share each expert (default: --tensor-model-parallel-size)",
    "perform_initialization": "Leave weights as they are allocated, without an initialization",
    "use_cpu_initialization": "Initialize weights on the CPU, the same at every tensor-parallel size",
    "deterministic_mode": "Choose deterministic kernels",
    "defer_embedding_wgrad_compute": "Compute the gradient of the embedding's weights while the pipeline drains",
    "wgrad_deferral_limit": "Micro-batches for which --defer-embedding-wgrad-compute defers the gradient; 0 for all",
    "overlap_p2p_comm_warmup_flush": "Overlap communication and computation while the pipeline fills and drains",
    "microbatch_group_size_per_vp_stage": "Micro-batches in a row that a virtual stage takes at a time",
    "num_layers": "Layers of the decoder",
    "mtp_num_layers": "Layers for multi-token prediction",
    "mtp_loss_scaling_factor": "Weight of the multi-token-prediction loss",
    "account_for_embedding_in_pipeline_split": "Count the embedding as a layer when pipeline stages share layers out",
    "account_for_loss_in_pipeline_split": "Count the loss as a layer when pipeline stages share layers out",
    "hidden_size": "Hidden size of the model",
    "num_attention_heads": "Attention heads of a layer",
    "attention_backend": "Implementation of the attention",
    "softmax_type": "Softmax of the attention",
    "num_query_groups": "Groups of query heads that share a key and a value head",
    "ffn_hidden_size": "Inner size of the MLP",
    "kv_channels": "Size of an attention head (default: hidden size / heads)",
    "hidden_dropout": "Dropout rate of hidden states",
    "attention_dropout": "Dropout rate of attention probabilities",
    "fp32_residual_connection": "Keep the residual stream in float32",
    "layernorm_epsilon": "Epsilon of the norms",
    "add_bias_linear": "Leave out the biases of linear layers",
    "add_qkv_bias": "Add biases to queries, keys and values alone",
    "rotary_interleaved": "Rotate pairs of neighbouring channels, not the two halves of a head",
    "normalization": "Kind of norm",
    "qk_layernorm": "Normalize queries and keys",
    "layernorm_zero_centered_gamma": "Norms multiply by 1 + weight",
    "attention_output_gate": "Multiply the output of each attention head by a gate, which the query projection makes",
    "linear_conv_kernel_dim": "Tokens that the convolution of a gated delta net sees",
    "linear_key_head_dim": "Size of a query or key head of a gated delta net",
    "linear_value_head_dim": "Size of a value head of a gated delta net",
    "linear_num_key_heads": "Query and key heads of a gated delta net",
    "linear_num_value_heads": "Value heads of a gated delta net",
    "moe_shared_expert_gate": "Multiply the output of the shared experts by a gate",
    "multi_latent_attention": "Compress keys and values (multi-latent attention, MLA)",
    "dsa_indexer_n_heads": "Heads of the indexer, which chooses the keys that a query attends to (sparse attention)",
    "dsa_indexer_head_dim": "Size of a head of the indexer",
    "dsa_indexer_topk": "Keys that the indexer chooses for a query",
    "init_method_std": "Standard deviation of initial weights",
    "embedding_init_method_std": "Standard deviation of the initial embedding (default: --init-method-std)",
    "disable_bf16_reduced_precision_matmul": "Add up bfloat16 matrix products in full precision",
    "recompute_granularity": "Activations to recompute in the backward pass: whole layers, or --recompute-modules",
    "recompute_method": "Layers that full recomputation takes: units of equal size, or the first ones of a stage",
    "recompute_num_layers": "Layers of a unit (uniform), or layers of a stage that are recomputed (block)",
    "distribute_saved_activations": "Divide saved activations of recomputed layers over the tensor-parallel ranks",
    "recompute_modules": "Modules that selective recomputation takes",
    "moe_shared_expert_intermediate_size": "Inner size of all shared experts of a layer together",
    "moe_shared_expert_overlap": "Compute shared experts while tokens travel to the other experts",
    "moe_ffn_hidden_size": "Inner size of an expert",
    "moe_router_topk": "Experts of each token",
    "moe_router_num_groups": "Groups of experts for group-limited routing",
    "moe_router_group_topk": "Groups of experts that a token may choose from",
    "moe_router_pre_softmax": "Take the softmax before the choice of experts, not after it",
    "moe_router_topk_scaling_factor": "Factor of the chosen experts' scores, with --moe-router-pre-softmax",
    "moe_router_score_function": "Function that makes scores of the router's logits",
    "moe_router_dtype": "Data type of the routing and of the weighted sum of experts",
    "moe_router_enable_expert_bias": "Choose experts by scores with a bias that balances their load",
    "moe_router_bias_update_rate": "Change per update of the bias of --moe-router-enable-expert-bias",
    "moe_router_force_load_balancing": "Choose experts at random, for benchmarks",
    "moe_grouped_gemm": "Multiply the experts of a rank in one grouped product",
    "moe_z_loss_coeff": "Weight of the router's z-loss",
    "moe_input_jitter_eps": "Size of the noise on the router's input",
    "moe_token_dispatcher_type": "Way in which tokens travel to their experts",
    "moe_enable_deepep": "Use DeepEP in the flex dispatcher",
    "moe_flex_dispatcher_backend": "Library of the flex dispatcher",
    "moe_expert_capacity_factor": "Tokens that an expert takes, as a factor of an even share (default: no limit)",
    "moe_pad_expert_input_to_capacity": "Pad the input of each expert to --moe-expert-capacity-factor",
    "moe_token_drop_policy": "Tokens to drop above the capacity: those of the lowest scores, or the last",
    "moe_layer_recompute": "Recompute mixture-of-experts layers in the backward pass",
    "moe_permute_fusion": "Reorder tokens for their experts by one kernel",
    "moe_router_fusion": "Compute routing and balancing loss by one kernel",
    "moe_apply_probs_on_input": "Multiply an expert's input by its score, not its output",
    "moe_deepep_num_sms": "Streaming multiprocessors (SMs) of the GPU for DeepEP",
    "moe_hybridep_num_sms": "Streaming multiprocessors (SMs) of the GPU for HybridEP",
    "clone_scatter_output_in_embedding": "Keep the embedding's output a view of its input, which then stays in memory",
    "transformer_impl": "Implementation of the layers",
    "fp8": "Compute the products of the decoder's linear layers in FP8, with Transformer Engine: e4m3 everywhere, or "
    "hybrid with e5m2 for gradients; needs --fp8-recipe",
    "fp8_recipe": "Scaling of FP8: blockwise (blocks of 128 x 128 weights and of 128 activations, as in DeepSeek-V3; "
    "Hopper), tensorwise (one factor for a tensor; Hopper, Ada) or mxfp8 (blocks of 32; Blackwell)",
    "first_last_layers_bf16": "Keep the first and last layers in bfloat16 with --fp8-format",
    "num_layers_at_start_in_bf16": "Layers at the start that --first-last-layers-bf16 keeps in bfloat16",
    "num_layers_at_end_in_bf16": "Layers at the end that --first-last-layers-bf16 keeps in bfloat16",
    "q_lora_rank": "Size of the compressed queries (MLA)",
    "kv_lora_rank": "Size of the compressed keys and values (MLA)",
    "qk_head_dim": "Size of a query or key head without its rotated part (MLA)",
    "qk_pos_emb_head_dim": "Size of the rotated part of a query or key head (MLA)",
    "v_head_dim": "Size of a value head (MLA)",
    "rope_type": "Rotary embedding of MLA",
    "rotary_scaling_factor": "Factor by which YaRN lengthens the context",
    "original_max_position_embeddings": "Context length before YaRN",
    "beta_fast": "Upper bound of rotations between which YaRN interpolates",
    "beta_slow": "Lower bound of rotations between which YaRN interpolates",
    "mscale": "Factor of YaRN's attention scale",
    "mscale_all_dim": "Factor of YaRN's attention scale for the unrotated part",
}
