"""The plug-in of SGLang: when an engine is asked to use it, for which batches it samples, and what it hooks."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from slime.rollout.engines.sglang import installed, plugin

NUM_GPUS = 0
PLAIN = {
    "is_all_greedy": False, "need_top_p_sampling": False, "need_top_k_sampling": False, "need_min_p_sampling": False,
    "sampling_seed": None, "return_sampling_masks": None, "temperatures": None,
}  # fmt: skip
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
VARIABLES = (plugin.VARIABLE, plugin.INT4_VARIABLE, plugin.DELTA_VARIABLE, plugin.IMAGE_VARIABLE)
SAMPLER = {"enable_deterministic": False, "use_ascend_backend": False, "rl_on_policy_target": None}


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = tmp_path / "some_rollout-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: some-rollout\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{plugin.GROUP}]\n{plugin.NAME} = {plugin.__name__}:register\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("distribution")
@pytest.mark.parametrize(
    "args, deterministic, asked",
    [
        ({}, False, True),
        ({"attention_backend": "flashinfer"}, False, True),
        ({"sampling_backend": "pytorch"}, False, False),
        ({"enable_deterministic_inference": True}, False, False),
        ({}, True, False),
    ],
)
def test_an_engine_samples_in_one_pass_unless_it_is_to_sample_otherwise(
    args: dict[str, Any], deterministic: bool, asked: bool
) -> None:
    assert plugin.environment(args, deterministic=deterministic) == ({plugin.VARIABLE: "1"} if asked else {})


def test_sglang_samples_by_itself_where_it_cannot_find_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "NAME", "of-nobody")
    assert plugin.environment({}, deterministic=False) == {}


@pytest.mark.usefixtures("distribution")
@pytest.mark.parametrize(
    "config, overrides, asked",
    [
        ({}, None, False),
        ({"quantization_config": {"quant_method": "fp8"}}, None, False),
        ({"quantization_config": PACKED}, None, True),
        ({"text_config": {"quantization_config": PACKED}}, '{"rope_theta": 1}', True),
        ({"quantization_config": PACKED}, '{"quantization_config": null}', False),
    ],
)
def test_an_engine_of_a_model_in_int4_is_prepared_for_weight_updates(
    tmp_path: Path, config: dict[str, Any], overrides: str | None, asked: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plugin.environment_of_model(str(tmp_path), {"json_model_override_args": overrides})
    assert found == ({plugin.INT4_VARIABLE: "1"} if asked else {})


def test_a_model_in_int4_without_the_plug_in_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "NAME", "of-nobody")
    assert plugin.environment_of_model(str(tmp_path / "elsewhere"), {}) == {}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": PACKED}))
    assert plugin.environment_of_model(str(tmp_path), {}) == {}
    assert "SGLang will refuse weight updates in INT4" in caplog.text


def test_images_without_the_plug_in_are_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "NAME", "of-nobody")
    monkeypatch.setattr(plugin, "drops_image_positions", lambda: True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5"}))
    assert plugin.environment_of_model(str(tmp_path), {}) == {}
    assert "SGLang will compute wrong log-probs for prompts with images" in caplog.text


@pytest.mark.usefixtures("distribution")
@pytest.mark.parametrize(
    "family, drops, asked", [("qwen3_5", True, True), ("qwen3_5", False, False), ("qwen3_vl", True, False)]
)
def test_an_engine_that_would_misplace_images_is_told_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, drops: bool, asked: bool
) -> None:
    monkeypatch.setattr(plugin, "drops_image_positions", lambda: drops)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    assert plugin.environment_of_model(str(tmp_path), {}) == ({plugin.IMAGE_VARIABLE: "1"} if asked else {})


@pytest.mark.parametrize("changed", [False, True])
def test_attention_of_a_known_sglang_is_hooked_for_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changed: bool
) -> None:
    names = [f"{plugin._ATTENTION}.{name}" for name in (installed.ONE_POSITION, installed.THREE_POSITIONS)]
    methods = dict.fromkeys(names, "self, positions, hidden_states")
    if changed:
        methods[names[1]] = "self, positions"
    hooks = hooks_of(monkeypatch, tmp_path, methods, plugin.IMAGE_VARIABLE)
    if changed:
        assert not hooks and f"does not know SGLang's {names[1]}" in caplog.text
    else:
        assert hooks == [(names[0], plugin.prepare, "around")]


def test_tokens_with_three_positions_take_the_way_that_reads_them() -> None:
    class Layer:
        def forward_prepare_fused_gate(self, positions: Any, hidden_states: Any) -> tuple[Any, ...]:
            return "three", positions, hidden_states

    def own(layer: Any, positions: Any, hidden_states: Any) -> tuple[Any, ...]:
        return "one", positions, hidden_states

    one, three, hidden = Namespace(ndim=1), Namespace(ndim=2), Namespace()
    assert plugin.prepare(own, Layer(), positions=one, hidden_states=hidden) == ("one", one, hidden)
    assert plugin.prepare(own, Layer(), positions=three, hidden_states=hidden) == ("three", three, hidden)


def write_sglang(directory: Path, methods: dict[str, str]) -> None:
    """Writes a package with these methods, by their parameters, and a registry that only lists hooks."""
    registry = "class HookType:\n    AROUND = 'around'\n\n\nclass HookRegistry:\n    hooks = []\n\n    @classmethod\n"
    files = {
        "sglang.srt.plugins.hook_registry": f"{registry}    def register(cls, *hook):\n        cls.hooks += [hook]\n"
    }
    for kind in dict.fromkeys(name.rpartition(".")[0] for name in methods):
        module, _, title = kind.rpartition(".")
        files[module] = files.get(module, "") + f"\n\nclass {title}:\n"
        for name, signature in methods.items():
            if name.rpartition(".")[0] == kind:
                files[module] += f"    def {name.rpartition('.')[2]}({signature}): ...\n\n"
    for module, text in files.items():
        file = directory / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def hooks_of(
    monkeypatch: pytest.MonkeyPatch, directory: Path, methods: dict[str, str], variable: str
) -> list[tuple[str, Any, str]]:
    """Returns what the plug-in hooks into an SGLang with these methods where `variable` asks for it."""
    write_sglang(directory, methods)
    monkeypatch.syspath_prepend(str(directory))
    for other in VARIABLES:
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, "1")
    with monkeypatch.context() as context:
        for module in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            context.delitem(sys.modules, module)
        plugin.register()
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.hooks
        for module in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
            del sys.modules[module]
    return list(hooks)


@pytest.mark.parametrize(
    "changed", ["", f"{plugin._EXPERTS}.create_weights", f"{plugin._MANAGER}.update_weights_from_tensor"]
)
def test_methods_of_a_known_sglang_are_hooked_for_weight_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changed: str
) -> None:
    methods = {
        **{f"{name}.create_weights": "self, layer, *sizes, **more" for name in (plugin._DENSE, plugin._EXPERTS)},
        **{
            f"{name}.process_weights_after_loading": "self, layer"
            for name in (plugin._DENSE, plugin._EXPERTS, plugin._TRITON)
        },
        **{f"{plugin._MANAGER}.update_weights_from_{name}": "self, recv_req" for name in ("tensor", "distributed")},
    }
    expected = set(methods)
    if changed:
        methods[changed] = "self, *, other"
    hooks = hooks_of(monkeypatch, tmp_path, methods, plugin.INT4_VARIABLE)
    if changed:
        assert not hooks and f"slime-rollout does not know its {changed}" in caplog.text
    else:
        assert {name for name, _, _ in hooks} == expected and {kind for _, _, kind in hooks} == {"around"}


@pytest.mark.parametrize("parameters", ["self, names, dtypes, shapes, group_name, load_format=None", "self, request"])
def test_the_update_by_nccl_of_a_known_sglang_is_hooked_for_deltas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, parameters: str
) -> None:
    method = f"{plugin._UPDATER}.update_weights_from_distributed"
    hooks = hooks_of(monkeypatch, tmp_path, {method: parameters}, plugin.DELTA_VARIABLE)
    if "request" in parameters:
        assert not hooks and f"SGLang will refuse weight deltas by NCCL: slime-rollout does not know its {method}" in (
            caplog.text
        )
    else:
        assert [(name, hook.__name__, kind) for name, hook, kind in hooks] == [(method, "update_weights", "around")]


@pytest.mark.usefixtures("distribution")
def test_an_engine_that_gets_deltas_is_told_so() -> None:
    assert plugin.environment_of_deltas() == {plugin.DELTA_VARIABLE: "1"}


def test_an_engine_without_the_plug_in_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "NAME", "of-nobody")
    assert plugin.environment_of_deltas() == {}
    assert "SGLang will refuse weight deltas by NCCL: slime-rollout is not installed" in caplog.text


def test_an_sglang_that_no_run_started_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setitem(sys.modules, "sglang", None)
    plugin.register()


def test_the_plug_in_is_loaded_without_torch() -> None:
    code = "import sys, slime.rollout.engines.sglang.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize(
    "info, sampler, log_probs_of",
    [
        ({"is_all_greedy": True}, {}, (None, None)),
        ({"need_top_p_sampling": True}, {}, (None, None)),
        ({"need_top_k_sampling": True}, {}, (None, None)),
        ({"need_min_p_sampling": True}, {}, (None, None)),
        ({"sampling_seed": [1]}, {}, (None, None)),
        ({"return_sampling_masks": [False, True]}, {}, (None, None)),
        ({}, {"enable_deterministic": True}, (None, None)),
        ({}, {"rl_on_policy_target": "fsdp"}, (None, None)),
        ({}, {}, ([0, 2], None)),
        ({}, {}, (None, [None, [5]])),
    ],
)
def test_what_is_not_plain_sampling_stays_that_of_sglang(
    info: dict[str, Any], sampler: dict[str, Any], log_probs_of: tuple[Any, Any]
) -> None:
    arguments = (Namespace(**SAMPLER | sampler), "logits", Namespace(**PLAIN | info), True, *log_probs_of, "positions")
    assert plugin.forward(lambda *given: given, *arguments) == arguments


def test_batches_without_any_of_it_are_plain() -> None:
    assert plugin.is_plain(Namespace(**PLAIN))
    assert plugin.is_plain(Namespace(**PLAIN | {"return_sampling_masks": [False, False]}))
