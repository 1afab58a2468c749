"""Megatron's flags: the table, what it takes and refuses, and the configs that it fills."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.converters.megatron.flags import (
    MegatronSettings,
    by_dest,
    check_backend,
    check_given,
    committed,
    config_fields,
    given,
    pattern,
    pattern_text,
    why_refused,
)
from slime.converters.megatron.flags.rows import CONFIGS, dump, load
from slime.types.errors import InvalidFile, InvalidSetting, NotAvailable
from slime.types.settings import Parser, add_flags, build

OFFLOADED = dict.fromkeys(("use_distributed_optimizer", "use_precision_aware_optimizer", "optimizer_cpu_offload"), True)
TABLE = Path(sys.modules["slime.converters.megatron.flags"].__file__ or "").parent / "flags.tsv"


def parse(*argv: str) -> dict[str, Any]:
    parser = Parser()
    add_flags(parser, MegatronSettings)
    return given(build(MegatronSettings, vars(parser.parse_strict(argv))))


def test_the_committed_table_is_the_generated_one() -> None:
    from slime.converters.megatron.flags.generate import rows

    assert TABLE.read_text() == dump(rows()), f"run: python -m slime.converters.megatron.flags.generate > {TABLE.name}"


def test_every_target_is_a_field_of_megatron_core() -> None:
    import inspect

    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    classes = (TransformerConfig, MLATransformerConfig, OptimizerConfig, DistributedDataParallelConfig)
    fields = {f"{cls.__name__}.{field.name}" for cls in classes for field in dataclasses.fields(cls)}
    fields |= {f"GPTModel.{name}" for name in inspect.signature(GPTModel).parameters}
    targets = {target.lstrip("!") for row in committed() for target in row.sets}
    assert targets <= fields
    assert {target.split(".")[0] for target in targets} == set(CONFIGS)


def test_every_field_of_megatron_cores_configs_is_accounted_for() -> None:
    """A field of a later megatron-core must be given a flag, or named among those that have none."""
    from megatron.core.transformer import MLATransformerConfig

    from slime.converters.megatron.flags.megatron_lm import NOT_FLAGS

    named = {target.lstrip("!").split(".")[1] for row in committed() for target in row.sets} | NOT_FLAGS
    assert not {field.name for field in dataclasses.fields(MLATransformerConfig)} - named


def test_a_flag_has_one_row_and_a_refused_one_a_reason() -> None:
    flags = [flag for row in committed() for flag in row.flags]
    assert len(flags) == len(set(flags)) and len(flags) > 500
    dests = [row.dest for row in committed() if row.status != "refused"]
    assert len(dests) == len(set(dests))
    for row in committed():
        assert row.status in ("used", "hint", "same", "elsewhere", "refused"), row
        assert row.note or row.status in ("used", "elsewhere"), row
        assert not row.taken or re.fullmatch("[A-Z].*[^.]", row.help), row
        assert bool(row.accepts) == (row.status == "same"), row


def test_reading_the_flags_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, json\nfrom slime.converters.megatron.flags import MegatronSettings\n"
        "from slime.converters.megatron.model_scripts import model_flags, model_config\n"
        "model_flags(model_config('qwen3-4B'))\n"
        "print(json.dumps([m for m in ('torch', 'megatron.core', 'transformers') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == []


def test_the_names_of_megatron_lm_set_the_fields_of_megatron_core() -> None:
    values = parse(
        *"--num-layers 2 --swiglu --disable-bias-linear --norm-epsilon 1e-6 --num-experts 8 --no-rope-fusion".split(),
        *"--no-persist-layer-norm --rotary-base 1e6 --untie-embeddings-and-output-weights".split(),
        *"--moe-layer-freq [0]+[1]*1 --moe-aux-loss-coeff 0.01 --attention-backend flash".split(),
        *"--decoder-last-pipeline-num-layers 3 --use-precision-aware-optimizer --exp-avg-dtype bf16".split(),
        *"--accumulate-allreduce-grads-in-fp32 --max-position-embeddings 99 --no-overlap-p2p-communication".split(),
    )
    assert values["add_bias_linear"] is False and values["swiglu"] is True and values["rotary_base"] == 1_000_000
    transformer = config_fields(values, "TransformerConfig")
    assert transformer.pop("attention_backend").name == "flash"
    assert transformer == {
        "num_layers": 2,
        "add_bias_linear": False,
        "layernorm_epsilon": 1e-6,
        "num_moe_experts": 8,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "moe_layer_freq": [0, 1],
        "moe_aux_loss_coeff": 0.01,
        "num_layers_in_last_pipeline_stage": 3,
        "overlap_p2p_comm": False,
        "batch_p2p_comm": True,
    }
    assert config_fields(values, "GPTModel") == {
        "rotary_base": 1_000_000,
        "max_sequence_length": 99,
        "share_embeddings_and_output_weights": False,
    }
    import torch

    assert config_fields(values, "OptimizerConfig") == {
        "use_distributed_optimizer": True,
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.bfloat16,
    }
    assert config_fields(values, "DistributedDataParallelConfig") == {
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": True,
    }


def test_one_of_several_values_is_that_value_and_more_are_a_list() -> None:
    assert parse("--moe-router-load-balancing-type", "none") == {"moe_router_load_balancing_type": "none"}
    values = parse(*"--moe-router-load-balancing-type aux_loss seq_aux_loss --recompute-modules mlp".split())
    assert values["moe_router_load_balancing_type"] == ["aux_loss", "seq_aux_loss"]
    assert values["recompute_modules"] == ["mlp"]


@pytest.mark.parametrize(
    "argv, error, words",
    [
        ("--hidden-dropout 0.1", NotAvailable, ["--hidden-dropout 0.1", "0.0"]),
        ("--position-embedding-type none", NotAvailable, ["--position-embedding-type none", "rope"]),
        ("--tokenizer-type NullTokenizer", NotAvailable, ["--tokenizer-type", "HuggingFaceTokenizer"]),
        ("--ckpt-format zarr", NotAvailable, ["--ckpt-format zarr", "torch_dist"]),
        ("--spec other.module layers", NotAvailable, ["--spec other.module", "--custom-model-provider-path"]),
        ("--num-layers 0", InvalidSetting, ["--num-layers", "0", "at least 1"]),
        ("--optimizer muon", InvalidSetting, ["--optimizer", "muon", "adam, sgd"]),
        ("--moe-layer-freq [0]*3+x", InvalidSetting, ["--moe-layer-freq", "[0]*3+x"]),
        ("--rotary-base wide", InvalidSetting, ["--rotary-base", "wide"]),
        ("--recompute-granularity full", InvalidSetting, ["--recompute-granularity full", "--recompute-method"]),
        ("--recompute-method block", InvalidSetting, ["--recompute-method block", "--recompute-granularity full"]),
        ("--fp8-format e5m2", InvalidSetting, ["--fp8-format", "e5m2", "e4m3, hybrid"]),
        (
            "--fp8-format e4m3",
            InvalidSetting,
            ["--fp8-format e4m3 requires --fp8-recipe blockwise, tensorwise or mxfp8"],
        ),
        ("--fp8-recipe blockwise", InvalidSetting, ["--fp8-recipe blockwise requires --fp8-format"]),
        (
            "--fp8-format hybrid --fp8-recipe delayed",
            NotAvailable,
            ["--fp8-recipe delayed", "the same twice", "use --fp8-recipe blockwise, tensorwise or mxfp8"],
        ),
        ("--fp8-format e4m3 --fp8-recipe custom", NotAvailable, ["--fp8-recipe custom is not supported yet"]),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --transformer-impl local",
            InvalidSetting,
            ["--fp8-format e4m3 and --transformer-impl local cannot be used together"],
        ),
        ("--first-last-layers-bf16", InvalidSetting, ["--first-last-layers-bf16 requires --fp8-format"]),
        (
            "--fp8-format e4m3 --fp8-recipe tensorwise --num-layers-at-end-in-bf16 2",
            InvalidSetting,
            ["--num-layers-at-end-in-bf16 2 requires --first-last-layers-bf16"],
        ),
        ("--overlap-param-gather", InvalidSetting, ["--overlap-param-gather", "--use-distributed-optimizer"]),
        (
            "--num-layers-per-virtual-pipeline-stage 2 --num-virtual-stages-per-pipeline-rank 2",
            InvalidSetting,
            ["--num-layers-per-virtual-pipeline-stage 2", "--num-virtual-stages-per-pipeline-rank 2"],
        ),
        (
            "--seq-length 9 --max-position-embeddings 8",
            InvalidSetting,
            ["--seq-length must be at most --max-position-embeddings 8, got 9"],
        ),
    ],
)
def test_a_value_that_is_not_there_is_named(argv: str, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        parse(*argv.split())
    for word in words:
        assert word in str(caught.value)


def test_what_seeds_and_scripts_print_is_taken() -> None:
    parse(
        *"--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32".split(),
        *"--attention-softmax-in-fp32 --attention-backend flash --sequence-parallel --seq-length 4096".split(),
        *"--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --optimizer adam".split(),
        *"--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer".split(),
        *"--moe-token-dispatcher-type flex --moe-enable-deepep --moe-grouped-gemm --moe-permute-fusion".split(),
        *"--no-position-embedding --use-rotary-position-embeddings --tokenizer-type HuggingFaceTokenizer".split(),
        *"--transformer-impl transformer_engine --fp8-format e4m3 --fp8-recipe blockwise".split(),
        *"--spec slime_plugins.models.glm4 get_glm_spec --no-check-for-nan-in-loss-and-grad".split(),
    )


@pytest.mark.parametrize(
    "flag", ["--fp4-format", "--data-path", "--tokenizer-model", "--rl-prompts-per-eval", "--no-cuda-graph-x"]
)
def test_a_refused_flag_has_its_reason(flag: str) -> None:
    assert (why_refused(flag) is None) == (flag == "--no-cuda-graph-x")
    assert why_refused("--swiglu") is None and why_refused("--lr") is None


def test_another_backend_takes_no_flag_of_megatron() -> None:
    check_backend("megatron", {"tensor_model_parallel_size": 2})
    check_backend("fsdp", {})
    with pytest.raises(InvalidSetting, match="--no-rope-fusion requires --train-backend megatron"):
        check_backend("fsdp", {"apply_rope_fusion": False})


@pytest.mark.parametrize(
    "text, value",
    [("3", 3), ("[0]*3+[1]*5", [0] * 3 + [1] * 5), ("([0]+[1]*2)*2", [0, 1, 1, 0, 1, 1]), ("[0,1,0,1]", [0, 1, 0, 1])],
)
def test_patterns_of_layers(text: str, value: Any) -> None:
    assert pattern(text) == value
    assert pattern(pattern_text(value)) == value


@pytest.mark.parametrize(
    "text", ["", "a", "[0]*", "__import__('os')", "[[0]]", "[0]*99999999", "9**9", "[1.5]", "True"]
)
def test_a_pattern_is_only_integers(text: str) -> None:
    with pytest.raises(ValueError, match="expected an integer or a list of integers"):
        pattern(text)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload requires --use-precision-aware-optimizer"),
        ({"exp_avg_dtype": "bf16"}, "--exp-avg-dtype bf16 requires --use-precision-aware-optimizer"),
        (
            OFFLOADED | {"exp_avg_sq_dtype": "fp16"},
            "--exp-avg-sq-dtype fp16 and --optimizer-cpu-offload cannot be used together",
        ),
    ],
)
def test_flags_of_the_optimizer_that_would_do_nothing_are_refused(values: dict[str, Any], message: str) -> None:
    check_given(OFFLOADED | {"main_grads_dtype": "bf16"})
    with pytest.raises(InvalidSetting, match=message):
        check_given(values)


def test_a_damaged_table_names_its_line() -> None:
    lines = TABLE.read_text().splitlines()
    assert load("\n".join(lines[:3]))[1].flags
    with pytest.raises(InvalidFile, match="line 3"):
        load("\n".join([*lines[:2], "--x\tx"]))


FAKE = """
def add_megatron_arguments(parser):
    print("noise")
    group = parser.add_argument_group("a fork")
    group.add_argument("--norm-epsilon", "--eps", type=float, default=3e-5, dest="layernorm_epsilon")
    group.add_argument("--softmax-scale", type=float, default=None, help="scale of the logits, 100%% of them")
    group.add_argument("--brand-new", type=int, default=None)
    group.add_argument("--optimizer", choices=["adam", "sgd", "own"], default="own")
    return parser
"""
SHOW = """
import json
from slime.converters.megatron.flags import by_dest, committed, table, why_refused
rows = by_dest()
print(json.dumps({"epsilon": [rows["norm_epsilon"].flags, rows["norm_epsilon"].default],
    "new": rows["softmax_scale"].sets, "unused": why_refused("--brand-new"), "choices": rows["optimizer"].choices,
    "swiglu": rows["swiglu"].status, "added": len(table()) - len(committed())}))
"""


def test_a_megatron_lm_on_the_path_has_the_last_word_on_names_and_defaults(tmp_path: Path) -> None:
    training = tmp_path / "fork" / "megatron" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("")
    (training / "arguments.py").write_text(FAKE)
    path = os.pathsep.join([str(tmp_path / "fork"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def run(code: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
        )

    first = json.loads(run(SHOW).stdout)
    assert first == {
        "epsilon": [["--norm-epsilon", "--eps"], 3e-5],
        "new": ["TransformerConfig.softmax_scale"],
        "unused": "a flag of the installed Megatron-LM that nothing here uses",
        "choices": ["adam", "sgd", "own"],
        "swiglu": "used",
        "added": 2,
    }
    assert len(list((tmp_path / "cache" / "slime").glob("megatron-flags-*.tsv"))) == 1
    # Kept from now on: the module is not imported again, until it changes.
    (training / "__init__.py").write_text("raise ImportError('imported again')")
    assert json.loads(run(SHOW).stdout) == first
    (training / "arguments.py").write_text(FAKE + "\n")
    done = run("from slime.converters.megatron.flags import by_dest; print(by_dest()['norm_epsilon'].default)")
    assert done.stdout.strip() == "1e-05" and "imported again" in done.stderr


def test_attributes_are_found_by_name() -> None:
    assert by_dest()["add_bias_linear"].flag == "--disable-bias-linear"
    assert by_dest()["lr"].status == "elsewhere" and "lr" not in {f.name for f in dataclasses.fields(MegatronSettings)}
