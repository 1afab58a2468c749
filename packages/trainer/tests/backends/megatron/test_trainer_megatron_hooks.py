"""Functions of the user's that join the Megatron backend, and recomputation, on one rank."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tiny import Runner, alone, make_samples, make_settings, write_ahead_model, write_biased_model

from slime.trainer.backends.base import NonFiniteGradient
from slime.trainer.backends.build import build_backend
from slime.trainer.trainer import pick_device
from slime.types.errors import InvalidSetting, NotAvailable, PluginError

HOOKS = """
calls = []


def init(args):
    from megatron.core import parallel_state

    calls.append(("init", args.hf_checkpoint, args.num_layers, parallel_state.model_parallel_is_initialized()))


def before_log_prob(args, model, store_prefix):
    calls.append(("log_prob", type(args).__name__, [type(chunk).__name__ for chunk in model], store_prefix))


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    calls.append(("train_step", rollout_id, step_id, len(model), len(optimizer.param_groups) > 0, opt_param_scheduler))


def without_stage(pre_process, post_process):
    calls.append(("provider", pre_process, post_process))
    return MODEL.pop()


def with_stage(pre_process, post_process, vp_stage=None):
    calls.append(("provider", pre_process, post_process, vp_stage))
    return MODEL.pop()


def wrong(args):
    pass


MODEL = []
"""


@pytest.fixture
def hooks(tmp_path: Path) -> Path:
    path = tmp_path / "hooks.py"
    path.write_text(HOOKS)
    return path


def calls_of(hooks: Path) -> list[Any]:
    from slime.types.plugins import find_function

    return find_function(f"{hooks}:init").__globals__["calls"]


def megatron(model: str, **values: Any) -> Any:
    return make_settings(model, train_backend="megatron", **values)


def test_hooks_are_called_with_what_they_are_for(model: str, hooks: Path):
    settings = megatron(
        model, use_kl_loss=True, num_steps_per_rollout=2,
        custom_megatron_init_path=f"{hooks}:init",
        custom_megatron_before_log_prob_hook_path=f"{hooks}:before_log_prob",
        custom_megatron_before_train_step_hook_path=f"{hooks}:before_train_step",
    )  # fmt: skip
    runner = Runner(settings)
    calls = calls_of(hooks)
    assert calls == [("init", model, 2, True)]
    calls.clear()
    runner.run(3)
    log_probs = [call for call in calls if call[0] == "log_prob"]
    # Two updates, each with a pass of the policy and one of the reference, all before the first update.
    assert calls[:4] == log_probs
    assert [call[3] for call in log_probs] == ["", "ref_"] * 2
    assert {(call[1], *call[2]) for call in log_probs} == {("Namespace", "DistributedDataParallel")}
    assert calls[4:] == [("train_step", 3, 0, 1, True, None), ("train_step", 3, 1, 1, True, None)]


@pytest.mark.parametrize("name", ["with_stage", "without_stage"])
def test_a_model_provider_makes_the_model_that_is_trained(model: str, hooks: Path, name: str):
    from slime.types.plugins import find_function

    expected = Runner(megatron(model)).run(0)
    plain = build_backend(megatron(model), alone(), pick_device(0))
    provider = find_function(f"{hooks}:{name}")
    provider.__globals__["MODEL"].append(plain.models[0])
    runner = Runner(megatron(model, custom_model_provider_path=f"{hooks}:{name}"))
    assert calls_of(hooks) == [("provider", True, True, None) if name == "with_stage" else ("provider", True, True)]
    assert runner.backend.models[0] is plain.models[0]
    assert runner.run(0)["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    "field",
    [
        "custom_megatron_before_log_prob_hook_path",
        "custom_megatron_before_train_step_hook_path",
        "custom_model_provider_path",
    ],
)
def test_a_function_of_another_signature_is_refused(model: str, hooks: Path, field: str):
    with pytest.raises(PluginError, match="--" + field.replace("_", "-")):
        Runner(megatron(model, **{field: f"{hooks}:wrong"}))


@pytest.mark.parametrize("kind", ["GPTModel", "a class of the user's"])
def test_a_model_of_megatron_core_gets_the_head_that_training_needs(model: str, hooks: Path, kind: str):
    from megatron.core.models.gpt.gpt_model import GPTModel

    from slime.types.plugins import find_function

    class Own(GPTModel):
        pass

    plain = build_backend(megatron(model), alone(), pick_device(0)).models[0]
    plain.__class__ = GPTModel if kind == "GPTModel" else Own
    find_function(f"{hooks}:without_stage").__globals__["MODEL"].append(plain)
    runner = Runner(megatron(model, custom_model_provider_path=f"{hooks}:without_stage"))
    assert runner.backend.models[0] is plain and isinstance(plain, GPTModel if kind == "GPTModel" else Own)
    expected = Runner(megatron(model)).run(0)["train/grad_norm"]
    assert runner.run(0)["train/grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_a_model_of_another_kind_is_refused(model: str, hooks: Path):
    from slime.types.plugins import find_function

    find_function(f"{hooks}:without_stage").__globals__["MODEL"].append(torch.nn.Linear(1, 1))
    with pytest.raises(PluginError, match="it made a Linear"):
        Runner(megatron(model, custom_model_provider_path=f"{hooks}:without_stage"))


def test_an_init_hook_that_takes_nothing_is_refused(model: str, tmp_path: Path):
    (tmp_path / "nothing.py").write_text("def nothing():\n    pass\n")
    with pytest.raises(PluginError, match="--custom-megatron-init-path"):
        Runner(megatron(model, custom_megatron_init_path=str(tmp_path / "nothing.py")))


def test_gradient_checkpointing_recomputes_every_layer_and_changes_no_number(model: str):
    runners = [Runner(megatron(model, gradient_checkpointing=on)) for on in (False, True)]
    config = runners[1].backend.transformer
    assert (config.recompute_granularity, config.recompute_method) == ("full", "uniform")
    assert config.recompute_num_layers == 1
    assert runners[0].backend.transformer.recompute_granularity is None
    forwards = []
    layer = runners[1].backend.models[0].decoder.layers[0]
    layer.register_forward_hook(lambda *_: forwards.append(torch.is_grad_enabled()))
    samples = make_samples(groups=4, size=4)
    plain, recomputed = (runner.run(0, samples) for runner in runners)
    # Once without the graph and once more for it, of each row.
    assert forwards.count(False) == forwards.count(True) > 0
    assert recomputed["train/grad_norm"] == plain["train/grad_norm"]
    for name, weight in runners[0].weights().items():
        assert torch.equal(weight, runners[1].weights()[name]), name


def test_gradient_checkpointing_leaves_the_rest_to_flags_of_megatron(model: str):
    settings = megatron(model, gradient_checkpointing=True)
    backend = build_backend(
        settings, alone(), pick_device(0), megatron={"recompute_method": "block", "recompute_num_layers": 2}
    )
    assert (backend.transformer.recompute_method, backend.transformer.recompute_num_layers) == ("block", 2)
    with pytest.raises(InvalidSetting, match="--recompute-granularity selective") as raised:
        build_backend(settings, alone(), pick_device(0), megatron={"recompute_granularity": "selective"})
    assert raised.value.field == "--recompute-granularity"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hidden_size": 48}, ["--hidden-size 48", "32"]),
        ({"num_layers": 3, "vocab_size": 31}, ["--num-layers 3", "says 2", "--vocab-size 31", "says 32"]),
        ({"qk_layernorm": False}, ["qk-layernorm", "config.json says"]),
        ({"tensor_model_parallel_size": 2}, ["--tensor-model-parallel-size 2", "got 1"]),
        (
            {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
            ["x --context-parallel-size 2 = 4", "got 1"],
        ),
        ({"expert_model_parallel_size": 2}, ["--expert-model-parallel-size 2", "got 1"]),
        (
            {"num_layers_per_virtual_pipeline_stage": 1},
            ["stage 1 requires --pipeline-model-parallel-size 2"],
        ),
        ({"padded_vocab_size": 16}, ["padded-vocab-size 16", "32"]),
    ],
)
def test_flags_that_do_not_fit_show_both_values(model: str, given: dict[str, Any], words: list[str]):
    with pytest.raises(InvalidSetting) as raised:
        build_backend(megatron(model), alone(), pick_device(0), megatron=given)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"moe_token_dispatcher_type": "allgather"},
            "--moe-token-dispatcher-type must be alltoall.*'allgather'",
        ),
        ({"mtp_loss_scaling_factor": 0.3}, "--mtp-loss-scaling-factor 0.3 requires --enable-mtp-training"),
    ],
)
def test_arguments_that_would_be_dropped_are_refused(model: str, given: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        build_backend(megatron(model), alone(), pick_device(0), megatron=given)


def test_layers_that_predict_ahead_and_do_not_train_are_spoken_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write_ahead_model(tmp_path / "ahead")
    backend = build_backend(megatron(path), alone(), pick_device(0), megatron={"mtp_num_layers": 1})
    assert "--mtp-num-layers 1 without --enable-mtp-training" in caplog.text
    assert backend.untrained_weights()


def test_groups_of_experts_are_chosen_as_the_model_was_made_or_not_at_all():
    from slime.trainer.backends.build import _check_groups

    chosen = {"moe_router_topk": 8, "moe_router_num_groups": 8, "moe_router_group_topk": 4}
    _check_groups(chosen)
    _check_groups(chosen | {"moe_router_group_topk": 8})
    _check_groups({"moe_router_topk": 8})
    with pytest.raises(InvalidSetting, match="--moe-router-group-topk 2 and --moe-router-topk 8") as raised:
        _check_groups(chosen | {"moe_router_group_topk": 2})
    assert raised.value.field == "--moe-router-group-topk"


def test_there_must_be_layers_that_predict_ahead_to_train_them(model: str):
    with pytest.raises(InvalidSetting, match="--enable-mtp-training") as raised:
        Runner(megatron(model, enable_mtp_training=True))
    assert raised.value.field == "--enable-mtp-training"


def test_a_gradient_that_is_not_finite_leaves_the_biases_of_routers_too(tmp_path: Path):
    runner = Runner(megatron(write_biased_model(tmp_path / "biased")), megatron={"moe_router_bias_update_rate": 0.1})
    names = [name for name in runner.backend.weight_sizes() if name.endswith("e_score_correction_bias")]
    before = runner.weights()
    parameter = runner.backend.models[0].decoder.final_layernorm.weight
    kept = parameter.detach().clone()
    with torch.no_grad():
        parameter.fill_(float("nan"))
    with pytest.raises(NonFiniteGradient):
        runner.run(0)
    with torch.no_grad():
        parameter.copy_(kept)
    assert names and all(torch.equal(before[name], weight) for name, weight in runner.weights().items())
    runner.run(0)
    assert all(not torch.equal(before[name], runner.weights()[name]) for name in names)


def test_experts_cut_over_ranks_need_sequence_parallelism(tmp_path: Path):
    from trainer_tiny import write_model

    from slime.converters.megatron.args import model_args, read_model_config
    from slime.trainer.backends.megatron.model.config import transformer_config

    config = read_model_config(write_model(tmp_path / "experts", experts=4))
    args = model_args(config, {"tensor_model_parallel_size": 2})
    with pytest.raises(InvalidSetting, match="tensor_model_parallel_size 2 .* requires sequence_parallel"):
        transformer_config(args, params_dtype=torch.float32)
    assert transformer_config(args | {"sequence_parallel": True}, params_dtype=torch.float32).sequence_parallel


def test_an_optimizer_that_is_on_the_cpu_already_is_not_moved_there(model: str):
    with pytest.raises(InvalidSetting, match="on the CPU already") as raised:
        build_backend(megatron(model), alone(), torch.device("cpu"), megatron={"optimizer_cpu_offload": True})
    assert raised.value.field == "--optimizer-cpu-offload"


def test_the_backend_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "megatron" else find(name, *more)
    )
    with pytest.raises(
        NotAvailable, match=r'requires the package megatron-core: pip install "slime-trainer\[megatron\]"'
    ):
        build_backend(make_settings("MODEL_DIR", train_backend="megatron"), alone(), pick_device(0))
