"""Launch scripts of the original: `slime train --dry-run` with their flags plans the run, or refuses one flag by name.

original_scripts.tsv has a line a script: name, loop, flags. The directories that they name hold configs of the models,
two rows of data and no weights; plug-ins that the scripts bring along are functions without content.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from tokenizers import Tokenizer, models

from slime.converters.megatron.model_scripts import model_config
from slime.launcher import cli
from slime.launcher.cli.train import DOES_NOT_FIT

NUM_GPUS = 0

SCRIPTS = {
    name: (loop, shlex.split(flags))
    for name, loop, flags in (
        line.split("\t")
        for line in Path(__file__).with_name("original_scripts.tsv").read_text(encoding="utf-8").splitlines()
        if not line.startswith("#")
    )
}
# Beginning of a directory's name -> model, and what its config.json has otherwise.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B": ("qwen3-30B-A3B", {}),
    "Qwen3-235B": ("qwen3-235B-A22B", {}),
    "Qwen3-32B": ("qwen3-32B", {}),
    "Qwen3-4B-Instruct-2507": ("qwen3-4B", {"rope_theta": 5000000}),
    "qwen3-4b": ("qwen3-4B", {"rope_theta": 5000000}),
    "Qwen3-4B": ("qwen3-4B", {}),
    "Qwen3-8B": ("qwen3-8B", {}),
    "Qwen3-VL-8B": ("qwen3-8B", {"rope_theta": 5000000}),
    "Qwen3-Next": ("qwen3-next-80B-A3B", {}),
    "Qwen3.5-9B": ("qwen3.5-9B", {}),
    "Qwen3.5-27B": ("qwen3.5-27B", {}),
    "Qwen3.5-35B": ("qwen3.5-35B-A3B", {}),
    "Qwen3.6-35B": ("qwen3.5-35B-A3B", {}),
    "Qwen2.5-0.5B": ("qwen2.5-0.5B", {}),
    "Qwen2.5-3B": ("qwen2.5-3B", {}),
    "MiMo-7B": ("mimo-7B-rl", {}),
    "MiniMax-M2.5": ("minimax-m2", {}),
    "Moonlight": ("moonlight", {}),
    "Kimi-K2-Thinking": ("kimi-k2", {"rope_scaling.factor": 64.0, "rms_norm_eps": 1e-5}),
    "Kimi-K2": ("kimi-k2", {}),
    "GLM-4.5-355B": ("glm4.5-355B-A32B", {}),
    "GLM-4.7-355B": ("glm4.7-355B-A32B", {}),
    "GLM-4.7-Flash": ("glm4.7-30B-A3B", {}),
    "GLM-5": ("glm5-744B-A40B", {}),
    "GLM-Z1": ("glm4-9B", {}),
    "DeepSeek-R1": ("deepseek-v3", {}),
}
# The vision_config of Qwen3-VL-8B.
VISION = {
    "model_type": "qwen3_vl", "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16,
    "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 4096,
    "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24], "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
# The vision_config of a published Qwen3.5, but for the width of its output.
OF_GATED = VISION | {"model_type": "qwen3_5", "deepstack_visual_indexes": []}
# End or name of a directory -> quantization_config of the published model.
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "config_groups": {"group_0": {"input_activations": None, "targets": ["Linear"], "weights": WEIGHTS}},
}  # fmt: skip
QUANTIZED = {
    "-FP8": FP8,
    "-fp8": FP8,
    "DeepSeek-R1": FP8,
    "MiniMax-M2.5": FP8 | {"fmt": "float8_e4m3fn"},
    "Kimi-K2-Instruct": FP8,
    "Kimi-K2-Thinking": INT4,
    "-INT4": INT4,
}
GENERATE = "async def generate(args, sample, sampling_params):\n    return sample\n"
REWARD = "async def reward_func(args, sample, **kwargs):\n    return 0.0\n"
CORRECTION = "def compute_mis_weights_with_cp(args, *, pg_loss, **kwargs):\n    return pg_loss, [], {}\n"
FULLY_ASYNC = "def generate_rollout_fully_async(args, rollout_id, data_buffer, evaluation=False):\n    return []\n"
PLUGINS = {
    "examples/multi_agent/rollout_with_multi_agents.py": GENERATE.replace("generate(", "generate_with_multi_agents("),
    "examples/coding_agent_rl/generate.py": GENERATE,
    "examples/strands_sglang/generate_with_strands.py": GENERATE + REWARD,
    "examples/train_infer_mismatch_helper/mis.py": CORRECTION,
    "evaluation_lib.py": "",  # of IFBench
    "fully_async_rollout.py": FULLY_ASYNC,
    "generate_with_retool.py": GENERATE + REWARD,
    "generate_with_search.py": GENERATE + REWARD,
    "generate_with_tau.py": GENERATE,
    "wandb.py": "",
}
# Files that the scripts bring along: evaluation sets with a grader of their own, settings of a plug-in.
YAML = {
    "multi_task.yaml": {
        "eval": {
            "defaults": {"n_samples_per_eval_prompt": 16, "max_response_len": 16384, "top_p": 0.7},
            "datasets": [
                {"name": "aime", "path": "DIR/aime-2024.jsonl", "rm_type": "deepscaler"},
                {"name": "gpqa", "path": "DIR/gpqa_eval.jsonl", "rm_type": "gpqa"},
                {"name": "ifbench", "path": "DIR/IFBench_eval.jsonl", "rm_type": "ifbench"},
            ],
        }
    },
    "mis.yaml": {
        "use_tis": True, "use_rs": True, "tis_level": "token", "rs_level": "token", "tis_mode": "truncate",
        "tis_lower_bound": 0.5, "tis_upper_bound": 2.0, "rs_lower_bound": None, "rs_upper_bound": None,
        "rs_trust_region": None, "rs_tr_threshold": 0.5, "tis_batch_normalize": True,
    },
}  # fmt: skip
# The reason why a script cannot run here. A script that comes to pass leaves this table and never returns.
REFUSED = {
    "scripts_run-glm5-744B-A40B": "--prefill-num-servers 1 with engines on several nodes is not supported yet",
    "examples_delta_weight_sync_run-glm4.7-30B-A3B-delta": "--pipeline-model-parallel-size must be a divisor",
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in PLUGINS.items():
        file = tmp_path / "plugins" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "plugins"))
    brought = {Path(file).parts[0].removesuffix(".py") for file in PLUGINS}
    for module in [name for name in sys.modules if name.split(".")[0] in brought]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_API_KEY", "")
    return tmp_path


def furnish(directory: Path, flags: list[str]) -> list[str]:
    """Makes the files and directories that the flags name; returns the flags with their paths in `directory`."""
    words = [word.replace("https:DIR/", "https://").replace("DIR/", f"{directory}/") for word in flags]
    messages = [{"role": "user", "content": "1 + 1?"}]
    row = {"prompt": "1 + 1?", "messages": messages, "label": "2", "index": "1", "metadata": {"source": "a"}}
    row |= {"problem": "1 + 1?", "answer": "2", "reward_model": {"ground_truth": "2"}, "images": []}
    files = [word for word in words if word.endswith((".jsonl", ".parquet"))]
    for path in (Path(word) for word in words if word.endswith(".yaml")):
        path.write_text(yaml.safe_dump(YAML[path.name]).replace("DIR/", f"{directory}/"))
        files += [word for word in path.read_text().split() if word.endswith(".jsonl")]
    for path in map(Path, files):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".jsonl":
            path.write_text(f"{json.dumps(row)}\n" * 2)
        else:
            pq.write_table(pa.Table.from_pylist([row] * 2), path)
    model = Path(value_of(words, "--hf-checkpoint"))
    found = next((MODELS[name] for name in MODELS if model.name.startswith(name)), None)
    if found is not None:
        config = model_config(found[0])
        for key, value in found[1].items():
            *outer, last = key.split(".")
            (config[outer[0]] if outer else config)[last] = value
        for end in filter(model.name.endswith, QUANTIZED):
            config["quantization_config"] = QUANTIZED[end]
        model.mkdir()
        if "-VL-" in model.name:
            text = config | {"model_type": "qwen3_vl_text"}
            config = {"model_type": "qwen3_vl", "text_config": text, "vision_config": VISION}
        if config["model_type"] == "qwen3_5":
            config["vision_config"] = OF_GATED | {"out_hidden_size": config["text_config"]["hidden_size"]}
        if "vision_config" in config:
            (model / "preprocessor_config.json").write_text("{}")
        (model / "config.json").write_text(json.dumps(config))
        (model / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str())
        template = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "a", "chat_template": "{{ messages }}"}
        (model / "tokenizer_config.json").write_text(json.dumps(template))
    for reference in {Path(value_of(words, flag, "unnamed")) for flag in ("--ref-load", "--opd-teacher-load")}:
        if reference.exists():
            continue
        (reference / "release").mkdir(parents=True)
        (reference / "latest_checkpointed_iteration.txt").write_text("release")
        for name in ("metadata.json", ".metadata", "common.pt"):
            (reference / "release" / name).touch()
    return words


def value_of(words: list[str], flag: str, default: str = "") -> str:
    return words[words.index(flag) + 1] if flag in words else default


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_planned_or_refused_in_one_sentence(
    script: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loop, flags = SCRIPTS[script]
    command = "train-async" if loop == "train_async.py" else "train"
    words = [*furnish(directory, flags), "--train-backend", "megatron", "--output-dir", str(directory / "run")]
    code = cli.main([command, *words, "--dry-run", "--dry-run-gpus", "8"])
    output = capsys.readouterr()
    if script in REFUSED:
        assert code == 2 and f"error: {REFUSED[script]}" in output.err.replace(str(directory), "DIR"), output.err
    else:
        assert code in (0, DOES_NOT_FIT), output.err
    assert not (directory / "run").exists()


def test_the_flags_of_delta_updates_are_planned_with_layers_that_its_stages_divide(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = SCRIPTS["examples_delta_weight_sync_run-glm4.7-30B-A3B-delta"][1]
    first, last = flags.index("--update-weight-mode"), flags.index("--update-weight-delta-checksum") + 2
    words = furnish(directory, [*SCRIPTS["scripts_run-qwen3-4B"][1], *flags[first:last]])
    words = ["train", *words, "--train-backend", "megatron", "--output-dir", str(directory / "run")]
    code = cli.main([*words, "--rollout-engine", "sglang", "--dry-run", "--dry-run-gpus", "8"])
    assert code in (0, DOES_NOT_FIT), capsys.readouterr().err


def test_the_script_of_delta_updates_is_planned_with_the_flag_that_its_refusal_names(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = furnish(directory, SCRIPTS["examples_delta_weight_sync_run-glm4.7-30B-A3B-delta"][1])
    words = ["train", *words, "--train-backend", "megatron", "--output-dir", str(directory / "run")]
    words += ["--dry-run", "--dry-run-gpus", "8"]
    assert cli.main(words) == 2
    named = capsys.readouterr().err.split("got 2: ")[1].split(" leaves ")[0]
    assert named == "--decoder-last-pipeline-num-layers 23"
    assert cli.main([*words, *named.split()]) in (0, DOES_NOT_FIT), capsys.readouterr().err


def test_the_script_of_glm5_is_planned_with_engines_that_do_prefill_and_decode(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = SCRIPTS["scripts_run-glm5-744B-A40B"][1]
    first = flags.index("--prefill-num-servers")
    words = furnish(directory, flags[:first] + flags[first + 2 :])
    words = ["train", *words, "--train-backend", "megatron", "--output-dir", str(directory / "run")]
    code = cli.main([*words, "--dry-run", "--dry-run-gpus", "8"])
    output = capsys.readouterr()
    assert code in (0, DOES_NOT_FIT), output.err


def test_the_number_of_scripts_that_pass_does_not_fall() -> None:
    assert REFUSED.keys() <= SCRIPTS.keys()
    assert len(SCRIPTS) - len(REFUSED) >= 46
