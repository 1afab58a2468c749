"""Megatron's arguments become a configuration, a layout of ranks, attention, names and weights of a model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import MLATransformerConfig
from safetensors.torch import load_file, save_file
from trainer_tiny import write_model

from slime.converters.convert import hf_to_torch_dist
from slime.converters.families import find_family, read_config
from slime.trainer.backends.megatron.model import build
from slime.trainer.backends.megatron.model import config as megatron_config
from slime.trainer.backends.megatron.model.attention import CoreAttention, runs_of
from slime.trainer.backends.megatron.model.config import transformer_config
from slime.trainer.backends.megatron.model.names import parameter_names
from slime.trainer.backends.megatron.weights import hf, initial, sharded_state
from slime.types.errors import InvalidField, InvalidFile, InvalidSetting

MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
}
ALONE = SimpleNamespace(cp=SimpleNamespace(size=lambda: 1, rank=lambda: 0))


def config_of(**changes: Any) -> Any:
    return transformer_config(MODEL | changes, params_dtype=torch.float32)


def test_arguments_become_fields():
    config = config_of(
        group_query_attention=True, num_query_groups=2, norm_epsilon=1e-6, num_experts=4, moe_aux_loss_coeff=[0.1]
    )
    assert (config.num_query_groups, config.layernorm_epsilon, config.num_moe_experts) == (2, 1e-6, 4)
    assert config.moe_aux_loss_coeff == 0.1
    assert config.gated_linear_unit and config.activation_func is F.silu
    # Packed rows differ in length, which this dispatcher takes and Megatron's default one does not.
    assert config.variable_seq_lengths and config.moe_token_dispatcher_type == "alltoall"
    assert config.hidden_dropout == config.attention_dropout == 0.0


def test_absent_arguments_have_the_defaults_of_the_command_line():
    config = config_of(num_query_groups=2, mtp_num_layers=0, hidden_dropout=0.1)
    assert config.hidden_dropout == 0.0
    assert config.num_query_groups == 4
    assert config.mtp_num_layers is None
    latent = config_of(multi_latent_attention=True, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8)
    assert isinstance(latent, MLATransformerConfig)
    assert (latent.q_lora_rank, latent.kv_lora_rank, latent.rotary_scaling_factor) == (None, 32, 1.0)


def test_bfloat16_weights_travel_between_stages_in_bfloat16():
    config = transformer_config(MODEL, params_dtype=torch.bfloat16)
    assert config.bf16 and config.params_dtype == config.pipeline_dtype == torch.bfloat16


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_kernels_that_are_not_there_are_not_used():
    asked = ("moe_grouped_gemm", "moe_permute_fusion", "apply_rope_fusion", "gradient_accumulation_fusion")
    config = config_of(num_experts=4, **dict.fromkeys(asked, True))
    off = (*asked, "bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "persist_layer_norm")
    assert not any(getattr(config, name) for name in off)
    assert config.use_cpu_initialization


@pytest.mark.parametrize(("given", "told"), [({}, 1), ({"transformer_impl": "transformer_engine"}, 0)])
def test_layers_that_would_be_faster_without_transformer_engine_are_told(
    given: dict[str, str], told: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    config = config_of()
    monkeypatch.setattr(megatron_config, "have_transformer_engine", lambda: True)
    with caplog.at_level("INFO"):
        assert build.compile_layers([], MODEL | given, config, 1.0) is not None
    assert sum("--transformer-impl local" in message for message in caplog.messages) == told


def test_transformer_engine_is_asked_for_what_its_kernels_can_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(megatron_config, "have_transformer_engine", lambda: True)
    fusions = megatron_config._fusions
    asked = {"moe_grouped_gemm": True, "moe_permute_fusion": True}
    assert fusions(asked)["apply_rope_fusion"] and fusions(asked)["moe_grouped_gemm"]
    for other in ("rotary_interleaved", "multi_latent_attention"):
        assert not fusions(asked | {other: True})["apply_rope_fusion"]
    assert not any(fusions(asked | {"transformer_impl": "local", "apply_rope_fusion": True}).values())
    # Megatron's output layer needs a kernel of Apex for this.
    assert not fusions({"gradient_accumulation_fusion": True})["gradient_accumulation_fusion"]


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"hiden_size": 32}, "hiden_size", "unknown argument of Megatron .* did you mean hidden_size"),
        ({"hidden_dropout": 0.2}, "hidden_dropout", "log-probs"),
        ({"kv_lora_rank": 16}, "kv_lora_rank", "multi_latent_attention"),
        (
            {"num_experts": 4, "tensor_model_parallel_size": 2},
            "tensor_model_parallel_size",
            "requires sequence_par",
        ),
        (
            {"num_layers_per_virtual_pipeline_stage": 1},
            "--num-layers-per-virtual-pipeline-stage",
            "requires --pipeline",
        ),
        (
            {"attention_output_gate": True, "num_query_groups": 1, "tensor_model_parallel_size": 2},
            "tensor_model_parallel_size",
            "2 and num_query_groups 1 cannot be used together: with attention_output_gate",
        ),
        ({"recompute_granularity": "full"}, "args", "megatron-core refuses"),
        ({"num_attention_heads": 3, "tensor_model_parallel_size": 2}, "args", "num_attention_heads"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], field: str, words: str):
    with pytest.raises(InvalidSetting, match=words) as raised:
        config_of(**changes)
    assert raised.value.field == field


def core_attention(scale: float | None = None) -> CoreAttention:
    return CoreAttention(config_of(), 1, None, "self", softmax_scale=scale, pg_collection=ALONE)


def expected_attention(query: Any, key: Any, value: Any, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    logits = torch.einsum("qhd,khd->hqk", query, key) * scale
    logits = logits.masked_fill(torch.ones(len(query), len(key)).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khv->qhv", logits.softmax(-1), value).flatten(1)


def test_attention_keeps_packed_sequences_apart():
    generator = torch.Generator().manual_seed(0)
    # Values narrower than keys, as in latent attention, and two queries to a key.
    query, key, value = (torch.randn(9, h, d, generator=generator) for h, d in ((4, 8), (2, 8), (2, 6)))
    limits = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=limits, cu_seqlens_kv=limits)
    output = core_attention(0.3)(query, key, value, None, packed_seq_params=packing)
    for part in (slice(0, 5), slice(5, 9)):
        torch.testing.assert_close(output[part], expected_attention(query[part], key[part], value[part], 0.3))
    batch = [tensor[:5, None].expand(-1, 2, -1, -1) for tensor in (query, key, value)]
    torch.testing.assert_close(core_attention(0.3)(*batch, None), output[:5, None].expand(-1, 2, -1))


def test_attention_takes_no_mask_of_its_own():
    query = torch.zeros(2, 1, 4, 8)
    with pytest.raises(InvalidField, match="attention_mask"):
        core_attention()(query, query, query, torch.zeros(1, 1, 2, 2, dtype=torch.bool))


def test_each_chunk_sees_the_tokens_before_it_and_its_own():
    # Rank r of 2 holds chunks r and 3 - r of each sequence; gathered, rank 0's tokens come first.
    positions = torch.tensor([0, 1, 6, 7, 0, 3, 2, 3, 4, 5, 1, 2])
    for rank, runs in ((0, [2, 8, 1, 4]), (1, [4, 6, 2, 3])):
        plan = runs_of([0, 8, 12], rank, 2, torch.device("cpu"))
        assert plan.k_lengths == runs and plan.q_lengths == [2, 2, 1, 1]
        for keys, length in zip(positions[plan.keys].split(plan.k_lengths), runs, strict=True):
            assert keys.tolist() == list(range(length))
        assert plan.q_limits.tolist() == [0, 2, 4, 5, 6]
    with pytest.raises(InvalidField, match="multiple of 4"):
        runs_of([0, 6], 0, 2, torch.device("cpu"))


class Part(torch.nn.Module):
    """A module with parameters of the given names, one element each."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            owner = self
            *path, last = name.split(".")
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, torch.nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(last, torch.nn.Parameter(torch.zeros(1)))


def a_stage(*layers: torch.nn.Module, ahead: tuple[torch.nn.Module, ...] = (), tied: bool = False) -> torch.nn.Module:
    """Layers 6 and on of a model, the second of two ranks that share 8 experts."""
    stage = Part("output_layer.weight")
    for part, modules in (("decoder", layers), ("mtp", ahead)):
        stage.add_module(part, torch.nn.Module())
        getattr(stage, part).layers = torch.nn.ModuleList(modules)
        for number, module in enumerate(modules):
            module.layer_number = number + (7 if part == "decoder" else 1)
    stage.share_embeddings_and_output_weights = tied
    stage.config = SimpleNamespace(num_moe_experts=8)
    return stage


def test_names_have_global_numbers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda: 1)
    router = Part("mlp.router.weight", "mlp.experts.local_experts.3.linear_fc1.weight")
    router.mlp.router.register_buffer("expert_bias", torch.zeros(8))
    wrapped = Part()
    wrapped.add_module(
        "module", a_stage(Part("input_layernorm.weight"), router, ahead=(Part("enorm.weight"),), tied=True)
    )
    assert [name for name, _ in parameter_names([wrapped])] == [
        "embedding.word_embeddings.weight",
        "decoder.layers.6.input_layernorm.weight",
        "decoder.layers.7.mlp.router.weight",
        "decoder.layers.7.mlp.experts.local_experts.7.linear_fc1.weight",
        "mtp.layers.0.enorm.weight",
        "decoder.layers.7.mlp.router.expert_bias",
    ]


def test_names_of_transformer_engine_are_those_of_local_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_world_size", lambda: 2)
    monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda: 1)
    layer = Part(
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_q_up_proj.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.experts.linear_fc2.weight2",
    )
    ahead = Part("transformer_layer.mlp.linear_fc1.layer_norm_weight")
    names = [name for name, _ in parameter_names([a_stage(layer, ahead=(ahead,))])]
    assert names == [
        "output_layer.weight",
        "decoder.layers.6.input_layernorm.weight",
        "decoder.layers.6.self_attention.q_layernorm.weight",
        "decoder.layers.6.pre_mlp_layernorm.weight",
        "decoder.layers.6.mlp.experts.local_experts.6.linear_fc2.weight",
        "mtp.layers.0.transformer_layer.pre_mlp_layernorm.weight",
    ]


@pytest.mark.parametrize(
    ("wanted", "saved"),
    [
        ("decoder.layers.pre_mlp_layernorm.weight", "decoder.layers.mlp.linear_fc1.layer_norm_weight"),
        ("decoder.layers.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.input_layernorm.weight"),
        (
            "optimizer.state.exp_avg.decoder.layers.self_attention.linear_q_up_proj.layer_norm_weight",
            "optimizer.state.exp_avg.decoder.layers.self_attention.q_layernorm.weight",
        ),
        ("decoder.layers.0.self_attention.k_layernorm.weight", "decoder.layers.0.self_attention.k_norm.weight"),
        (
            "optimizer.state.fp32_param.decoder.layers.pre_mlp_layernorm.weight",
            "optimizer.state.param.decoder.layers.mlp.linear_fc1.layer_norm_weight",
        ),
    ],
)
def test_norms_are_found_under_the_names_that_other_layers_give_them(wanted: str, saved: str):
    asked: list[str] = []
    stored = SimpleNamespace(
        directory="saved", tensors={saved: torch.zeros(2, 4)}, read=lambda name, index, out: asked.append(name)
    )
    initial.reading(stored, "--load")(wanted, (slice(0, 1), slice(0, 4)), torch.zeros(1, 4))
    assert asked == [saved]


def test_a_part_of_a_larger_model_is_no_model(tmp_path: Path):
    directory = write_model(tmp_path / "model")
    hf_to_torch_dist.convert(directory, tmp_path / "saved")
    config = read_config(directory)
    for changes in ({"hidden_size": config["hidden_size"] // 2}, {"num_hidden_layers": 1}, {"intermediate_size": 8}):
        smaller = config | {"head_dim": 8} | changes
        args = find_family(smaller).arguments(smaller)
        with pytest.raises(InvalidFile, match=r"^--ref-load: .* has shape .*, expected") as caught:
            initial.load([], args, smaller, str(tmp_path / "saved"), flag="--ref-load")
        assert caught.value.field == "--ref-load"


def test_a_fused_optimizer_goes_on_counting_the_steps_of_its_groups(monkeypatch: pytest.MonkeyPatch):
    class Fused(torch.optim.Optimizer):
        """An optimizer with the name of those of Transformer Engine and Apex."""

    weight = torch.nn.Parameter(torch.zeros(2))

    def make_room(optimizer: torch.optim.Optimizer, config: Any) -> None:
        optimizer.state[weight]["exp_avg"] = torch.zeros(2)

    fused = Fused([weight], {"lr": 0.1})
    part = SimpleNamespace(optimizer=fused, init_state_fn=make_room, config=None, load_state_dict=lambda state: None)
    wrapped = SimpleNamespace(chained_optimizers=[part], sharded_state_dict=lambda *args, **kwargs: {})
    monkeypatch.setattr(sharded_state, "model_state", lambda chunks: {})
    monkeypatch.setattr(parallel_state, "get_data_parallel_group", lambda **kwargs: None)
    sharded_state.load_optimizer(wrapped, [], lambda key, index, out: None, 3)
    assert fused.param_groups[0]["step"] == 3 and list(fused.state[weight]) == ["exp_avg"]


def test_a_model_provider_takes_the_place_of_the_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(parallel_state, "is_pipeline_first_stage", lambda ignore_virtual, vp_stage: vp_stage == 0)
    monkeypatch.setattr(parallel_state, "is_pipeline_last_stage", lambda ignore_virtual, vp_stage: vp_stage == 1)
    calls: list[Any] = []

    def with_stage(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> torch.nn.Module:
        calls.append((pre_process, post_process, vp_stage))
        return torch.nn.Linear(1, 1)

    def without(pre_process: bool, post_process: bool) -> torch.nn.Module:
        return with_stage(pre_process, post_process, -1)

    config = config_of(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2)
    chunks = build.build_model(MODEL, config, provider=with_stage)
    assert len(chunks) == 2 and calls == [(True, False, 0), (False, True, 1)]
    assert chunks[0].weight.tensor_model_parallel is False
    calls.clear()
    build.build_model(MODEL, config_of(), provider=without)
    assert calls == [(True, False, -1)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_model(tmp_path / "hf")
    return tmp_path / "hf"


def load(checkpoint: Path, rows: int = 128) -> torch.nn.Module:
    """The embedding alone, as one rank of one has it."""
    config = read_config(checkpoint)
    chunk = Part("embedding.word_embeddings.weight")
    chunk.embedding.word_embeddings.weight = torch.nn.Parameter(torch.ones(rows, config["hidden_size"]))
    args = find_family(config).arguments(config) | {"padded_vocab_size": 128}
    hf.load_hf([chunk], args, config, checkpoint)
    return chunk


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_world_size", lambda: 1)


def test_rows_of_padding_are_zeros(one_rank: None, checkpoint: Path):
    loaded = load(checkpoint).embedding.word_embeddings.weight
    wanted = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(loaded[: len(wanted)], wanted.float())
    assert len(wanted) < 128 and not loaded[len(wanted) :].any()


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape"])
def test_a_checkpoint_of_another_model_is_refused_by_tensor(one_rank: None, checkpoint: Path, fault: str):
    tensors = load_file(checkpoint / "model.safetensors")
    name = {"missing": "model.norm.weight", "unexpected": "model.extra.weight", "shape": "model.norm.weight"}[fault]
    if fault == "missing":
        del tensors[name]
    else:
        tensors[name] = torch.zeros(3)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(InvalidFile, match=name):
        load(checkpoint)


def test_a_model_of_another_shape_is_refused(one_rank: None, checkpoint: Path):
    with pytest.raises(InvalidFile, match=r"embedding.word_embeddings.weight: the model has \[256, .* describes \[128"):
        load(checkpoint, rows=256)
