"""Run by test_trainer_megatron_gated: `trainer_gated_ranks.py RANK WORLD_SIZE DIR MODELS`, as trainer_megatron_ranks.

MODELS: directory with the models `dense` (Qwen3.5) and `experts` (Qwen3-Next).
"""

from trainer_megatron_ranks import CP, EP, PP, SP, TP, Cases, main

CASES: Cases = {
    1: {"alone": ("dense", {}, {}), "alone-experts": ("experts", {}, {})},
    2: {
        "tensor": ("dense", {TP: 2}, {}),
        "tensor-sequence": ("experts", {TP: 2, SP: True}, {}),
        "context": ("dense", {CP: 2}, {}),
        "pipeline": ("dense", {PP: 2}, {}),
        "experts-recompute": (
            "experts", {EP: 2, "recompute_granularity": "full", "recompute_method": "uniform",
                        "recompute_num_layers": 1}, {},
        ),
    },
    4: {
        "tensor-context": ("experts", {TP: 2, CP: 2, SP: True}, {"data_pad_size_multiplier": 4}),
        "pipeline-context": ("dense", {PP: 2, CP: 2}, {}),
    },
}  # fmt: skip

if __name__ == "__main__":
    main(CASES)
