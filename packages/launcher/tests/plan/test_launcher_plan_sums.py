"""The sums of a plan: parameters, memory of ranks, caches and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from launcher_machines import CONFIG, GIB

from slime.converters.megatron.model_scripts import model_config
from slime.converters.megatron.rank_layout import Sizes, layers_of_stages, sizes_of
from slime.launcher.plan.activations import Shape
from slime.launcher.plan.parameter_counts import Held, of_stages, whole_model
from slime.launcher.plan.trainer_memory import checkpoint_bytes, kv_bytes, trainer_memory
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting

PUBLISHED = {
    "qwen2.5-7B": 7_615_616_512,
    "qwen3-4B": 4_022_468_096,
    "qwen3-30B-A3B": 30_532_122_624,
    "llama3-8B": 8_030_261_248,
    # Less the biases of its routers, 58 layers of 256.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


@pytest.mark.parametrize("name, parameters", PUBLISHED.items())
def test_known_models_have_as_many_parameters_as_published(name: str, parameters: int) -> None:
    assert whole_model(model_config(name)) == parameters


def test_the_sums_of_an_fsdp_rank() -> None:
    settings = TrainerSettings(hf_checkpoint="m", use_kl_loss=True)
    shape, million = Shape.of(CONFIG), Held(1_000_000, 0)
    items = {i.name: i.num_bytes for i in trainer_memory(settings, shape, million, Sizes(data=4), 10).items}
    assert items["weights"] == items["gradients"] == items["reference model"] == 1_000_000
    assert items["optimizer"] == 2_000_000
    alone = trainer_memory(settings, shape, million, Sizes(), 10, on_gpu=False)
    assert alone.lasting == 20_000_000
    layer = 10 * (24 * 16 + 16 * 16 + 16 * 8 + 16 * 24)
    assert alone.training == 20_000_000 + 2 * layer + 12 * 10 * 32


def test_the_sums_of_an_fsdp_rank_with_whole_weights_count_the_other_models_whole() -> None:
    million = Held(1_000_000, 0)

    def items(gpu_bytes: float | None, **values: object) -> dict[str, float]:
        settings = TrainerSettings(
            hf_checkpoint="m", bf16=True, use_kl_loss=True, use_opd=True, opd_type="trainer", opd_teacher_load="t",
            **values,
        )  # fmt: skip
        memory = trainer_memory(settings, Shape.of(CONFIG), million, Sizes(data=4), 10, gpu_bytes=gpu_bytes)
        return {item.name: item.num_bytes for item in memory.items}

    # 2 + 4 + 12 / 4 of the policy, 2 each of the reference and the teacher.
    whole, sharded = items(2 * 13e6), items(2 * 13e6 - 1)
    assert (whole["weights"], whole["gradients"], whole["optimizer"]) == (2e6, 4e6, 3e6)
    assert whole["reference model"] == whole["teacher"] == 2e6 and "gathered weights" not in whole
    assert sharded["weights"] == sharded["reference model"] == sharded["teacher"] == 1e6
    assert items(None)["teacher"] == 1e6
    assert items(None, fsdp_sharding="optimizer")["teacher"] == 2e6


@pytest.mark.parametrize("bf16", [False, True])
def test_activations_are_about_what_autograd_keeps(bf16: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if bf16 else torch.float32)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = 256
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    measured = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in weights)
    settings = TrainerSettings(hf_checkpoint="m", bf16=bf16, compile=False)
    memory = trainer_memory(settings, Shape.of(config.to_dict()), Held(0, 0), Sizes(data=2), tokens)
    (estimate,) = (item.num_bytes for item in memory.items if item.name == "activations")
    assert 0.85 < estimate / measured < 1.15


SMOLLM2 = {
    "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536,
    "num_hidden_layers": 30, "vocab_size": 49152,
}  # fmt: skip


@pytest.mark.parametrize(
    "config, parameters, backend, peak",
    [
        (SMOLLM2, 134_515_008, "fsdp", 7.7),
        (SMOLLM2, 134_515_008, "megatron", 10.0),
        (model_config("qwen3-0.6B"), 596_049_920, "fsdp", 23.4),
        (model_config("qwen3-0.6B"), 596_049_920, "megatron", 31.0),
    ],
)
def test_a_step_takes_about_what_it_took_on_a_gpu(
    config: dict[str, Any], parameters: int, backend: str, peak: float
) -> None:
    """peak: GiB that benchmarks/gpu/train_step.py read; docs/benchmarks has them."""
    settings = TrainerSettings(hf_checkpoint="m", bf16=True, train_backend=backend, log_probs_chunk_size=2048)
    args: dict[str, Any] | None = {} if backend == "megatron" else None
    memory = trainer_memory(settings, Shape.of(config), Held(parameters, 0), Sizes(), 8192, args=args, on_gpu=False)
    assert 0.8 < memory.training / GIB / peak < 1.2


def test_the_sums_of_a_megatron_rank() -> None:
    settings = TrainerSettings(hf_checkpoint="m", train_backend="megatron", bf16=True, use_kl_loss=True)
    sizes = Sizes(tensor=2, data=4, expert=2, expert_tensor=1, expert_data=4)
    held, shape = Held(1000, 4000), Shape.of(CONFIG)

    def items(**args: object) -> dict[tuple[str, bool], float]:
        memory = trainer_memory(settings, shape, held, sizes, 10, args=args)
        return {(item.name, item.host): item.num_bytes for item in memory.items}

    plain = items()
    assert plain["weights", False] == 2 * 5000 and plain["gradients", False] == 4 * 5000
    assert plain["optimizer", False] == 12 * 5000 and plain["reference model", True] == 2 * 2 * 5000
    assert items(use_distributed_optimizer=True)["optimizer", False] == 12 * (1000 / 4 + 4000 / 4)
    half = items(optimizer_cpu_offload=True, optimizer_offload_fraction=0.5)
    assert half["optimizer", False] == half["optimizer", True] == 6 * 5000
    small = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp8", "use_precision_aware_optimizer": True}
    assert items(**small)["optimizer", False] == (4 + 2 + 1) * 5000
    assert items(grad_reduce_in_bf16=True)["gradients", False] == 2 * 5000
    quantized = items(fp8="e4m3")
    assert quantized["FP8 weights", False] == 2 * 5000 and quantized.keys() - plain.keys() == {("FP8 weights", False)}
    kept, whole = items(recompute_granularity="full", fp8="e4m3"), plain
    assert kept["FP8 weights", False] == 2 * 5000 / shape.layers
    assert kept["activations", False] < whole["activations", False]


def test_a_critic_on_megatron_takes_what_the_policy_takes() -> None:
    sizes, held, shape = Sizes(data=4), Held(1000, 0), Shape.of(CONFIG)

    def lasting(estimator: str, **args: object) -> float:
        settings = TrainerSettings(
            hf_checkpoint="m", train_backend="megatron", bf16=True, advantage_estimator=estimator, kl_coef=0.1
        )
        memory = trainer_memory(settings, shape, held, sizes, 10, args=args, on_gpu=False)
        assert {item.name for item in memory.items if item.host} <= {"reference model"}
        return memory.lasting

    assert lasting("ppo") == 2 * 18 * 1000
    assert lasting("ppo", use_distributed_optimizer=True) == 2 * (6 + 12 / 4) * 1000


def test_layers_are_spread_over_stages_in_order() -> None:
    args = {"num_layers": 8, "pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 2}
    assert layers_of_stages(args, sizes_of(args, 2)) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    args = {"num_layers": 7, "pipeline_model_parallel_size": 3, "decoder_last_pipeline_num_layers": 1}
    assert layers_of_stages(args, sizes_of(args, 3)) == [[[0, 1, 2]], [[3, 4, 5]], [[6]]]
    with pytest.raises(InvalidSetting, match="must be a multiple of --tensor-model-parallel-size 2, got 3"):
        sizes_of({"num_layers": 8, "tensor_model_parallel_size": 2}, 3)


def test_stages_and_experts_of_a_real_model_add_up() -> None:
    from slime.converters.families import find_family

    config = model_config("qwen3-30B-A3B")
    args = find_family(config).arguments(config) | {
        "pipeline_model_parallel_size": 4, "tensor_model_parallel_size": 1, "expert_model_parallel_size": 8,
        "padded_vocab_size": config["vocab_size"],
    }  # fmt: skip
    held = of_stages(config, args, sizes_of(args, 32))
    assert sum(stage.dense + 8 * stage.experts for stage in held) == whole_model(config)
    assert len({stage.experts for stage in held}) == 1


def test_the_sums_of_an_fsdp_rank_with_lora() -> None:
    shape, million = Shape.of(CONFIG), Held(1_000_000, 0)

    def items(sizes: Sizes, gpu_bytes: float | None = None, **values: object) -> dict[str, float]:
        settings = TrainerSettings(hf_checkpoint="m", lora_rank=8, use_kl_loss=True, **values)
        memory = trainer_memory(settings, shape, million, sizes, 10, gpu_bytes=gpu_bytes, adapters=1000)
        return {item.name: item.num_bytes for item in memory.items}

    found = items(Sizes(data=4), 1e8, bf16=True)
    # The reference is the policy without its adapters.
    assert "gradients" not in found and "reference model" not in found
    assert (found["weights"], found["adapters"], found["optimizer"]) == (2e6, 6000, 3000)
    assert items(Sizes(data=4), 1e8, bf16=True, ref_load="other")["reference model"] == 2e6
    found = items(Sizes(data=4))
    assert (found["weights"], found["adapters"], found["optimizer"]) == (1e6, 2000, 2000)
    settings = TrainerSettings(hf_checkpoint="m", lora_rank=8)
    assert checkpoint_bytes(settings, 1_000_000, 1000)[0] == 12_000


def test_a_critic_beside_adapters_is_sharded_by_its_own_size() -> None:
    shape, million = Shape.of(CONFIG), Held(1_000_000, 0)
    settings = TrainerSettings(hf_checkpoint="m", lora_rank=8, advantage_estimator="ppo", bf16=True)

    def items(gpu_bytes: float, **values: object) -> dict[str, float]:
        given = replace(settings, **values)
        memory = trainer_memory(given, shape, million, Sizes(data=2), 10, gpu_bytes=gpu_bytes, adapters=1000)
        return {item.name: item.num_bytes for item in memory.items}

    # A quarter of the GPU has room for 2 bytes a frozen parameter, and for 6 + 12 / 2 of a critic.
    large = items(1e8)
    assert (large["weights"], large["critic"]) == (2e6, 12e6) and "gathered weights" not in large
    # For the policy alone, whose weights stay whole.
    small = items(2e7)
    assert (small["weights"], small["critic"]) == (2e6, 9e6) and small["gathered weights"] > 0
    # Layers of a sharded policy have no gradients beside those of its adapters.
    width, outer = 2, 2 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    layer = (1_000_000 - outer) / 2
    assert small["gathered weights"] == width * (outer + 2 * layer) + (width + 4) * layer
    assert items(1e6, advantage_estimator="grpo")["gathered weights"] == width * (outer + 2 * layer)


def test_activations_of_experts_are_those_that_a_token_chooses() -> None:
    for name, inner, chosen in (("minimax-m2", 1536, 8), ("qwen3-30B-A3B", 768, 8), ("deepseek-v3", 2048, 8)):
        config = model_config(name)
        shape = Shape.of(config)
        shared = config.get("n_shared_experts", 0)
        assert (shape.inner, shape.experts_per_token) == (inner * (chosen + shared), chosen)
    assert Shape.of(model_config("qwen3-4B")).inner == 9728


def test_the_cache_and_the_checkpoint() -> None:
    config = model_config("qwen3-4B")
    assert kv_bytes(config) == 2 * 36 * 8 * 128 * 2 and kv_bytes(config, 4) == kv_bytes(config) / 4
    latent = model_config("deepseek-v3")
    assert kv_bytes(latent, 8) == 61 * (512 + 64) * 2
    # A key of the indexer is 128 numbers in FP8 and their factor.
    assert kv_bytes(model_config("glm5-744B-A40B"), 8) == 78 * ((512 + 64) * 2 + 128 + 4)
    # Every fourth layer has attention.
    assert kv_bytes(model_config("qwen3.5-9B")["text_config"]) == 2 * 8 * 4 * 256 * 2
    for settings, each in (
        (TrainerSettings(hf_checkpoint="m"), 12),
        (TrainerSettings(hf_checkpoint="m", no_save_optim=True), 4),
        (TrainerSettings(hf_checkpoint="m", train_backend="megatron", bf16=True), 14),
    ):
        assert checkpoint_bytes(settings, 1000)[0] == each * 1000
