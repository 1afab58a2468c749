"""The plan of a run: who is where, the sums of its batches, and memory; nothing of it is started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher_machines import CONFIG, GIB, write_rows, write_tokenizer

from slime.launcher import cli
from slime.launcher.plan.activations import plain
from slime.launcher.plan.trainer_memory import byte_size
from slime.launcher.platform import probes
from slime.rollout.recordings.rollouts import write_rollout


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Flags of a run with a model of which there is only the config, on a machine without GPUs."""
    monkeypatch.setattr(probes, "gpus", lambda: [])
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    write_tokenizer(model)
    return ["--hf-checkpoint", str(model), "--prompt-data", str(write_rows(tmp_path / "p.jsonl")), "--num-rollout", "5",
            "--rm-type", "math", "--label-key", "label", "--output-dir", str(tmp_path / "out"),
            "--disable-rewards-normalization", "--dry-run"]  # fmt: skip


def plan(words: list[str], *more: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> list[str]:
    capsys.readouterr()
    assert cli.main(["train", *words, *more]) == code, capsys.readouterr().err
    return capsys.readouterr().out.splitlines()


def test_settings_that_are_probably_not_meant_are_warned_about(
    words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert cli.main(["train-async", *words]) == 0
    assert "train-async trains on rollouts of older weights" in caplog.text
    caplog.clear()
    assert cli.main(["train-async", *words, "--use-tis"]) == 0
    assert not caplog.records


def test_a_response_longer_than_the_context_is_warned_about_once(
    words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    response, evaluated = "--rollout-max-response-len", "--eval-max-response-len"
    for more, message in (
        (
            [response, "65"],
            f"{response} 65 exceeds the 64 tokens that --hf-checkpoint {words[1]} allows for",
        ),
        ([response, "64"], None),
        ([evaluated, "99", "--rollout-max-context-len", "80"], f"{evaluated} 99 exceeds the 80 tokens that --rollout-"),
        ([response, "65", "--sglang-context-length", "128"], None),
    ):
        caplog.clear()
        assert cli.main(["train", *words, *more]) == 0
        messages = [record.getMessage() for record in caplog.records if record.name.startswith(cli.__name__)]
        found = [text for text in messages if "exceeds" in text]
        assert len(found) == bool(message) and all(text.startswith(str(message)) for text in found)


def test_batches_come_out_as_the_flags_say(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    batch = ["--rollout-batch-size", "8", "--n-samples-per-prompt", "4", "--global-batch-size", "16"]
    lines = plan(words, *batch, "--actor-num-gpus-per-node", "2", capsys=capsys)
    text = "\n".join(lines)
    assert "--rollout-batch-size 8 x --n-samples-per-prompt 4 = 32 samples per iteration" in text
    assert "32 / 16 samples per update = 2 optimizer updates" in text
    assert "16 / 2 data-parallel replicas = 8 samples per replica and update" in text
    assert "8 / --micro-batch-size 1 = 8 forward passes per replica and update" in text
    assert "5 iterations x 2 updates = 10 updates, 160 samples" in text
    budget = ["--use-dynamic-batch-size", "--max-tokens-per-gpu", "100", "--rollout-max-context-len", "30"]
    text = "\n".join(plan(words, *batch, *budget, capsys=capsys))
    assert "100 tokens per forward pass (--max-tokens-per-gpu 100): at most 6 passes with samples of 30" in text
    text = "\n".join(plan(words, *batch[:4], "--num-steps-per-rollout", "4", capsys=capsys))
    assert "32 / 8 samples per update = 4 optimizer updates" in text


def test_nuclei_without_a_bound_are_refused_on_a_machine_where_the_engine_does_not_tell_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    plan(words, "--rollout-top-p", "0.9", capsys=capsys)
    sglang = ["--dry-run-gpus", "2", "--rollout-top-p", "0.9"]
    assert cli.main(["train", *words, "--dry-run", *sglang]) != 0
    assert "--rollout-top-p 0.9 requires --rollout-top-k N: SGLang tells which tokens" in capsys.readouterr().err
    plan(words, *sglang, "--rollout-top-k", "1000", capsys=capsys)
    drafts = ["--rollout-top-k", "50", "--rollout-engine", "sglang", "--sglang-speculative-algorithm", "NGRAM"]
    assert cli.main(["train", *words, "--dry-run", *sglang, *drafts]) != 0
    assert "--rollout-top-p 0.9 and --sglang-speculative-algorithm cannot be used together" in capsys.readouterr().err


def test_ranks_and_engines_are_on_the_gpus_that_a_run_would_give_them(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["--train-backend", "megatron", "--tensor-model-parallel-size", "2", "--actor-num-gpus-per-node", "4"]
    engines = ["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2", "--dry-run-gpus", "8"]
    lines = plan(words, *layout, *engines, capsys=capsys)
    at = lines.index("Placement")
    assert lines[at + 1 : at + 9] == [
        "  GPU 0: trainer rank 0 (tp 0, dp 0)", "  GPU 1: trainer rank 1 (tp 1, dp 0)",
        "  GPU 2: trainer rank 2 (tp 0, dp 1)", "  GPU 3: trainer rank 3 (tp 1, dp 1)",
        "  GPU 4: sglang-0 (tp 0)", "  GPU 5: sglang-0 (tp 1)", "  GPU 6: sglang-1 (tp 0)", "  GPU 7: sglang-1 (tp 1)",
    ]  # fmt: skip
    shared = plan(words, *layout, "--colocate", "--dry-run-gpus", "4", capsys=capsys)
    assert "  GPU 3: trainer rank 3 (tp 1, dp 1), sglang-3" in shared
    assert "  colocated: the engines release their memory while the trainer works" in shared
    several = plan(
        words, "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "4", "--dry-run-gpus", "4", capsys=capsys
    )
    places = [line.split(":")[0] for line in several if line.startswith("  node ")]
    assert len(places) == len(set(places)) == 9 and sum("sglang-0" in line for line in several) == 1


def test_engines_on_several_nodes_are_numbered_through(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    trainer = ["--actor-num-nodes", "2", "--actor-num-gpus-per-node", "2"]
    colocated = plan(words, *trainer, "--colocate", "--dry-run-gpus", "2", capsys=capsys)
    at = colocated.index("Placement")
    assert colocated[at + 1 : at + 5] == [
        f"  node {rank // 2} GPU {rank % 2}: trainer rank {rank} (dp {rank}), sglang-{rank}" for rank in range(4)
    ]
    engines = ["--rollout-num-gpus", "4", "--rollout-num-gpus-per-engine", "2", "--dry-run-gpus", "2"]
    apart = plan(words, *engines, capsys=capsys)
    at = apart.index("  node 0 GPU 0: trainer rank 0")
    assert apart[at + 1 : at + 5] == [
        f"  node {1 + n // 2} GPU {n % 2}: sglang-{n // 2} (tp {n % 2})" for n in range(4)
    ]
    cpu = plan(words, *trainer, "--colocate", "--rollout-num-engines", "3", capsys=capsys)
    assert "  node 0 CPU: 2 embedded engines" in cpu and "  node 1 CPU: 1 embedded engine" in cpu


def test_engines_of_several_models_are_named_with_their_model(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = tmp_path / "judge"
    judge.mkdir()
    (judge / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    write_tokenizer(judge)
    config = tmp_path / "models.yaml"

    def planned(policy: str, of_judge: str, *more: str) -> list[str]:
        config.write_text(
            f"sglang: [{{name: policy, server_groups: [{{{policy}}}]}}, "
            f"{{name: judge, model_path: {judge}, server_groups: [{{{of_judge}}}]}}]"
        )
        return plan(words, "--sglang-config", str(config), *more, capsys=capsys)

    lines = planned("num_gpus: 4, num_gpus_per_engine: 2", "num_gpus: 1", "--dry-run-gpus", "6")
    at = lines.index("Placement")
    assert lines[at + 1 : at + 7] == [
        "  GPU 0: trainer rank 0",
        "  GPU 1: sglang-0 (tp 0), model policy", "  GPU 2: sglang-0 (tp 1), model policy",
        "  GPU 3: sglang-1 (tp 0), model policy", "  GPU 4: sglang-1 (tp 1), model policy",
        "  GPU 5: sglang-2, model judge",
    ]  # fmt: skip
    parts = ["--prefill-num-servers", "1", "--rollout-num-gpus", "3", "--dry-run-gpus", "4"]
    lines = plan(words, *parts, capsys=capsys)
    at = lines.index("  GPU 1: sglang-0, model default, prefill")
    assert lines[at + 1 : at + 3] == [f"  GPU {n}: sglang-{n - 1}, model default, decode" for n in (2, 3)]
    shared = ["--prefill-num-servers", "1", "--colocate", "--actor-num-gpus-per-node", "3"]
    lines = plan(words, *shared, "--dry-run-gpus", "3", capsys=capsys)
    at = lines.index("  GPU 0: trainer rank 0 (dp 0), sglang-0, model default, prefill")
    assert lines[at + 1 : at + 3] == [
        f"  GPU {n}: trainer rank {n} (dp {n}), sglang-{n}, model default, decode" for n in (1, 2)
    ]
    assert "  colocated: the engines release their memory while the trainer works" in lines
    assert cli.main(["train", *words, *shared, "--actor-num-nodes", "2", "--dry-run", "--dry-run-gpus", "3"]) == 2
    assert "--prefill-num-servers 1 with engines on several nodes is not supported yet" in capsys.readouterr().err
    lines = planned("num_engines: 2", "num_engines: 1")
    at = lines.index("  CPU: 2 embedded engines of model policy")
    assert lines[at + 1] == "  CPU: 1 embedded engine of model judge"
    # Each model has a memory of its own.
    weights = [lines[lines.index(f"Memory of an engine (embedded, model {name})") + 1] for name in ("policy", "judge")]
    assert weights[0] != weights[1] and all("weights" in line for line in weights)
    (judge / "config.json").unlink()
    assert cli.main(["train", *words, "--sglang-config", str(config)]) == 2
    assert f"--sglang-config {config}: model judge: {judge} has no config.json" in capsys.readouterr().err


def test_without_a_gpu_everything_is_on_the_cpu(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(words, "--actor-num-gpus-per-node", "2", "--rollout-num-engines", "3", capsys=capsys)
    assert "  CPU: trainer rank 1 (dp 1)" in lines and "  CPU: 3 embedded engines" in lines
    assert any(line.startswith("Machine") and "--dry-run-gpus N" in line for line in lines)
    assert not any("CUDA" in line for line in lines)


def test_the_gpus_of_this_machine_are_what_counts(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probes, "gpus", lambda: [probes.Gpu(n, "H200", 141 * GIB, 141 * GIB) for n in ("2", "5")])
    lines = plan(words, "--rollout-engine", "embedded", capsys=capsys)
    assert "  GPU 2: trainer rank 0" in lines and "  GPU 5: embedded-0" in lines
    assert "Machine     2 GPUs of this machine, 141.00 GiB each" in lines


def test_memory_is_held_against_the_gpu(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--dry-run-gpus", "1", "--colocate", "--dry-run-gpu-gib"]
    fitting = plan(words, *machine, "80", "--sglang-mem-fraction-static", "0.5", capsys=capsys)
    assert any(line.startswith("generating: 41.00 GiB of 80.00 GiB: fits") for line in fitting)
    assert any("--sglang-mem-fraction-static 0.5 x 80.00 GiB = 40.00 GiB" in line for line in fitting)
    large = plan(words, *machine, "1", "--rollout-max-context-len", "60", capsys=capsys, code=3)
    assert sum("DOES NOT FIT" in line for line in large) == 2


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "symmetric": True, "group_size": 32}
INT4 = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"0": {"weights": WEIGHTS}}}


@pytest.mark.parametrize(("quantization", "width", "name"), [(FP8, "1", "fp8"), (INT4, "0.5625", "int4")])
def test_engines_hold_a_quantized_checkpoint_if_they_can(
    words: list[str], capsys: pytest.CaptureFixture[str], quantization: dict[str, Any], width: str, name: str
) -> None:
    Path(words[1], "config.json").write_text(json.dumps(CONFIG | {"quantization_config": quantization}))
    lines = plan(words, "--dry-run-gpus", "2", capsys=capsys)
    assert any(f" = {width} x " in line and line.endswith(f"({name})") for line in lines)
    # Without a GPU, the embedded engine would be chosen.
    assert cli.main(["train", *words]) == 2
    assert "--rollout-engine embedded cannot be used together: its weights are quantized" in capsys.readouterr().err


def test_memory_is_held_against_that_of_the_machine(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for size, code, verdict in ((8, 0, "fits"), (3, 3, "DOES NOT FIT")):
        monkeypatch.setattr(probes, "memory_size", lambda size=size: size * GIB)
        (line,) = (line for line in plan(words, capsys=capsys, code=code) if line.startswith("Host memory"))
        assert f" of {size}.00 GiB: {verdict}, with 1 GiB per process" in line
    # Other machines have other memory.
    (line,) = (
        x for x in plan(words, "--dry-run-gpus", "1", "--colocate", capsys=capsys) if x.startswith("Host memory")
    )
    assert "fit" not in line.lower()


def test_an_engine_on_the_cpu_holds_packed_weights_too(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    lines = plan(words, capsys=capsys)
    at = next(i for i, line in enumerate(lines) if line.startswith("Memory of an engine"))
    assert lines[at + 2].startswith("  packed for the CPU besides: ")


@pytest.mark.parametrize(
    "more, message",
    [
        (["--dry-run-gpus", "4", "--actor-num-gpus-per-node", "4"], "= 5 GPUs, but the node has 4; --colocate"),
        (
            ["--rollout-num-gpus", "1"],
            "--rollout-num-gpus 1 requires a machine with GPUs: no GPU is visible here; --dry-run --dry-run-gpus",
        ),
        (["--rollout-engine", "sglang"], "--rollout-engine sglang requires a GPU"),
        (
            ["--tensor-model-parallel-size", "4", "--train-backend", "megatron"],
            "a divisor of the model's 2 attention heads, got 4",
        ),
        (["--custom-rm-path", "nowhere.at_all"], "no module named 'nowhere'"),
        (["--global-batch-size", "7"], "--global-batch-size must be a divisor of"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    more: list[str], message: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words, *more]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("slime: error: ") and captured.out == ""


def test_a_config_that_describes_no_model_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(words[1]) / "config.json"
    for changes, message in (
        ({"hidden_size": "wide"}, "hidden_size must be a whole number"),
        ({"hidden_size": None}, "no hidden_size"),
    ):
        config.write_text(json.dumps(CONFIG | changes))
        assert cli.main(["train", *words]) == 2
        assert message in capsys.readouterr().err


def test_flags_of_a_plan_need_the_plan(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", *words[:-1], "--dry-run-gpus", "4"]) == 2
    assert "--dry-run-gpus 4 requires --dry-run" in capsys.readouterr().err


def test_asynchronous_training_says_how_far_samples_are_behind(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.main(["train-async", *words, "--update-weights-interval", "2"]) == 0
    text = capsys.readouterr().out
    assert "asynchronous, up to 1 rollout ahead: engines get new weights after every 2 rollouts" in text
    assert "up to 2 rollouts old" in text


def test_halves_of_a_run_are_planned_alone(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = ["--dry-run-gpus", "4", "--dry-run-gpu-gib", "80", "--actor-num-gpus-per-node", "2"]
    lines = plan(words, *machine, "--debug-rollout-only", "--rollout-num-gpus", "3", capsys=capsys)
    assert "  --debug-rollout-only: no trainer" in lines and "  GPU 2: sglang-2" in lines
    assert not any(line.startswith("  GPU") and "trainer" in line for line in lines)
    write_rollout(tmp_path / "recorded", 0, [])
    lines = plan(words, *machine, "--load-debug-rollout-data", str(tmp_path / "recorded"), capsys=capsys)
    assert "  GPU 1: trainer rank 1 (dp 1)" in lines and "  --debug-train-only: no engine" in lines


def test_epochs_and_engines_elsewhere(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    at = words.index("--num-rollout")
    lines = plan([*words[:at], *words[at + 2 :]], "--num-epoch", "3", capsys=capsys)
    assert any("--num-epoch 3" in line for line in lines)
    lines = plan(words, "--rollout-external-engine-addrs", "there:1", capsys=capsys)
    assert "  there:1: engine that is already running" in lines and not any("of an engine" in line for line in lines)
    lines = plan(
        words, "--rollout-engine", "embedded", "--rollout-num-engines", "3", "--dry-run-gpus", "3", capsys=capsys
    )
    assert "  GPU 1: embedded-0, embedded-1, embedded-2" in lines


def test_nothing_is_started_loaded_or_written(words: list[str], tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    script = (
        "import sys; from slime.launcher import cli; code = cli.main(sys.argv[1:]);"
        "print(code, sorted({'ray', 'torch', 'transformers', 'megatron'} & set(sys.modules)), file=sys.stderr)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", script, "train", *words], capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.stderr.splitlines()[-1] == "0 []", done.stderr
    assert "Placement" in done.stdout and sorted(tmp_path.rglob("*")) == before


def test_numbers_of_the_report_read_as_numbers() -> None:
    assert [byte_size(size) for size in (GIB * 12.345, GIB * 0.303289, 4096)] == ["12.35 GiB", "310.6 MiB", "4.0 KiB"]
    assert [plain(number) for number in (5 / 3, 2.0)] == ["1.7", "2"]


def test_passes_that_virtual_stages_round_up_say_so(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    stages = ["--train-backend", "megatron", "--pipeline-model-parallel-size", "2", "--actor-num-gpus-per-node", "2",
              "--num-layers-per-virtual-pipeline-stage", "1"]  # fmt: skip
    batch = ["--rollout-batch-size", "1", "--n-samples-per-prompt", "1"]
    config = Path(words[1]) / "config.json"
    config.write_text(json.dumps(CONFIG | {"num_hidden_layers": 4}))
    text = "\n".join(plan(words, *batch, *stages, capsys=capsys))
    assert "1 / --micro-batch-size 1, rounded up to a multiple of the 2 pipeline stages, = 2 forward passes" in text


def test_products_in_fp8_are_planned_for_gpus_only(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train-backend", "megatron", "--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"]
    assert cli.main(["train", *words, *flags]) == 2
    assert "--fp8-format e4m3 requires a GPU: Transformer Engine has no kernels for a CPU" in capsys.readouterr().err
    text = plan(words, *flags, "--dry-run-gpus", "2", capsys=capsys)
    assert any("products in FP8 (e4m3, blockwise)" in line for line in text)


def test_the_plan_tells_what_trains_with_lora(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--lora-rank", "4", "--lora-alpha", "6", "--lora-target-modules", "q_proj", "down_proj"]
    # Two layers of [16, 16] and [16, 24].
    adapters = 2 * 4 * (16 + 16 + 16 + 24)
    expected = f"LoRA        rank 4, alpha 6, q_proj down_proj: {adapters} parameters train, "
    (line,) = (line for line in plan(words, *flags, capsys=capsys) if line.startswith("LoRA "))
    assert line.startswith(expected) and re.fullmatch(r"[0-9.]+% of the model's", line.removeprefix(expected))
    assert not [line for line in plan(words, capsys=capsys) if line.startswith("LoRA ")]
    experts = {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG | experts))
    (line,) = (line for line in plan(words, "--lora-rank", "4", capsys=capsys) if line.startswith("LoRA "))
    assert line.startswith("LoRA        rank 4, alpha 32, all-linear: ") and line.endswith("; experts get no adapters")
