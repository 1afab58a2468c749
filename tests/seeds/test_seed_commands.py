"""Commands and snippets that the seed documents print, run with installed wheels on a tiny model.

Substituted: the model and the data (tiny, made here), two iterations, one process where a document has eight GPUs.
README.md beside this file lists what differs on purpose.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clean_environment import ROOT, CleanEnvironment, clean_environment, run

PLUGINS = Path(__file__).parent / "plugins"
# Token id in the tiny tokenizer.
EOS = 1


def rewards(run_directory: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    return [row["rollout/raw_reward"] for row in rows if "rollout/raw_reward" in row]


# The API reference


def test_the_custom_generate_function_as_printed_trains_on_what_it_wrote(train: Callable, tmp_path: Path) -> None:
    train("--custom-generate-function-path", PLUGINS / "custom_generate.py", "--max-turns", "5")
    assert rewards(tmp_path / "run") == [1.0, 1.0]


@pytest.mark.parametrize(
    ("flags", "source"),
    [([], "data_source.py:Prompts"), (["--group-rm"], "data_source.py:BestFirst")],
    ids=["alone", "group"],
)
def test_the_reward_function_and_the_data_sources_as_printed(
    train: Callable, installed: CleanEnvironment, tmp_path: Path, flags: list[str], source: str
) -> None:
    flags = [*flags, "--deterministic"]
    train("--custom-rm-path", PLUGINS / "custom_rm.py", "--data-source-path", f"{PLUGINS}/{source}", *flags)
    assert len(rewards(tmp_path / "run")) == 2
    # Each label is that of its prompt, and the text that is compared with it has no stop token, which the tokens have.
    columns = ["prompt", "label", "response", "reward", "tokens"]
    code = "import json, sys; from pathlib import Path; from slime.launcher.run_directory.kept_samples import *\n"
    code += (
        f"print(json.dumps([row for file in kept_files(Path(sys.argv[1])) for row in read_rows(file.path, {columns})]))"
    )
    rows = json.loads(installed.run(code, str(tmp_path / "run")))
    assert len(rows) >= 16 and any(row["tokens"][-1] == EOS for row in rows)
    for row in rows:
        assert row["label"] == row["prompt"].rstrip(">")[::-1] and "<eos>" not in row["response"]
        assert row["reward"] == float(row["response"] == row["label"])


def test_two_evaluation_sets_given_one_by_one(train: Callable, inputs: Path, tmp_path: Path) -> None:
    train(
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward", "--eval-interval", "1",
        "--eval-prompt-data", "aime", inputs / "held_out.jsonl",
        "--eval-prompt-data", "gsm8k", inputs / "held_out.jsonl",
        "--n-samples-per-eval-prompt", "2", "--eval-temperature", "0.0",
    )  # fmt: skip
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "eval/aime" in metrics and "eval/gsm8k" in metrics


def test_asynchronous_training_with_a_buffer_of_rollouts(train: Callable, tmp_path: Path) -> None:
    train(
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward",
        "--async-buffer-size", "4", "--update-weights-interval", "2",
        program="train_async.py",
    )  # fmt: skip
    assert len(rewards(tmp_path / "run")) == 2


@pytest.mark.parametrize(
    "flags",
    [
        "--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --calculate-per-token-loss",
        "--advantage-estimator gspo",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages",
        "--use-tis --tis-threshold 0.9",
        "--global-batch-size 16 --num-steps-per-rollout 1",
    ],
)
def test_flags_of_the_reference_are_taken(
    installed: CleanEnvironment, inputs: Path, tmp_path: Path, flags: str
) -> None:
    words = [
        "train", "--dry-run", "--hf-checkpoint", inputs / "model", "--prompt-data", inputs / "train.jsonl",
        "--input-key", "prompt", "--label-key", "label", "--custom-rm-path", "slime.launcher.quickstart.reverse.reward",
        "--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "4",
        "--output-dir", tmp_path / "run",
    ]  # fmt: skip
    installed.script("slime", *map(str, words), *flags.split())


PRINTED_FLAGS = """
--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --num-layers 32 --hidden-size 4096
--num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --global-batch-size 256
--sglang-mem-fraction-static 0.8 --sglang-context-length 8192 --sglang-log-level INFO --sglang-tp-size 2
--sglang-disable-cuda-graph
--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2 --colocate
--input-key prompt --label-key label --apply-chat-template
--num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 1
--advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.001 --calculate-per-token-loss
--use-tis --tis-threshold 0.9 --true-on-policy-mode
""".split()
# A plan reads the config.json alone.
LARGE = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 4096,
    "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def planned(inputs: Path, directory: Path, config: str) -> str:
    """Makes the directory of a model without weights."""
    for file in (inputs / "model").glob("tokenizer*.json"):
        shutil.copy(file, directory)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "config.json").write_text(config)
    return str(directory)


def test_all_flags_that_the_reference_prints_are_taken_together(
    installed: CleanEnvironment, inputs: Path, tmp_path: Path
) -> None:
    plan = run(
        installed.python, ROOT / "scripts" / "train.py", "--dry-run", "--dry-run-gpus", "8",
        "--hf-checkpoint", planned(inputs, tmp_path, json.dumps(LARGE)), "--prompt-data", inputs / "train.jsonl",
        "--custom-rm-path", "slime.launcher.quickstart.reverse.reward", "--output-dir", tmp_path / "run",
        *PRINTED_FLAGS,
        cwd=tmp_path, env=clean_environment(),
    ).stdout  # fmt: skip
    assert "8 trainer ranks, 4 engines" in plan


def test_the_asynchronous_command_takes_the_script_of_a_model(
    installed: CleanEnvironment, inputs: Path, tmp_path: Path
) -> None:
    scripts = ROOT / "scripts" / "models"
    printed = "glm4-9B.sh qwen3-4B.sh qwen3-30B-A3B.sh deepseek-v3.sh llama3-8B.sh".split()
    assert {path.name for path in scripts.iterdir()} >= set(printed)
    code = "import json; from slime.converters.megatron.model_scripts import model_config\n"
    model = planned(inputs, tmp_path, installed.run(f"{code}print(json.dumps(model_config('qwen3-4B')))"))
    bash(
        f'export HF_CHECKPOINT="{model}"\nsource "{scripts}/qwen3-4B.sh"\n'
        f'"{installed.python}" "{ROOT}/scripts/train_async.py" --dry-run --dry-run-gpus 16 '
        "--actor-num-gpus-per-node 8 --rollout-num-gpus 8 --async-buffer-size 4 --update-weights-interval 2 "
        f'"${{MODEL_ARGS[@]}}" "${{CKPT_ARGS[@]}}" --prompt-data "{inputs}/train.jsonl" --input-key prompt '
        f'--rm-type math --label-key label --n-samples-per-prompt 8 --num-rollout 8 --output-dir "{tmp_path}/run"\n'
    )


def test_a_sample_has_the_fields_and_defaults_of_the_reference(installed: CleanEnvironment) -> None:
    code = """
from slime.utils.types import Sample
sample, Status = Sample(group_index=None, index=None), Sample.Status
printed = dict(
    group_index=None, index=None, prompt="", tokens=[], response="", response_length=0, label=None, reward=None,
    loss_mask=None, status=Status.PENDING, metadata={}, multimodal_inputs=None, multimodal_train_inputs=None,
    weight_versions=[], rollout_log_probs=None, rollout_routed_experts=None, remove_sample=False,
    generate_function_path=None, train_metadata=None, non_generation_time=0.0,
)
assert {name: getattr(sample, name) for name in printed} == printed
assert type(sample.tokens) is list, type(sample.tokens)
assert [s.value for s in Status] == "pending completed truncated aborted failed".split()
assert all(s.name == s.value.upper() for s in Status)
info = "spec_accept_token_num spec_draft_token_num spec_verify_ct completion_token_num".split()
assert [getattr(Sample.SpecInfo(), name) for name in info] == [0] * 4
"""
    installed.run(code)


# The README


def test_conversions_of_the_readme_round_trip(installed: CleanEnvironment, inputs: Path, tmp_path: Path) -> None:
    torch_dist, back = tmp_path / "model_torch_dist", tmp_path / "back"
    script = tmp_path / "tiny.sh"
    arguments = installed.script("slime-convert", "model-args", "--hf-checkpoint", str(inputs / "model"))
    script.write_text(arguments)
    tools = ROOT / "tools"
    bash(
        f'source "{script}"\n'
        f'"{installed.python}" "{tools}/convert_hf_to_torch_dist.py" "${{MODEL_ARGS[@]}}" '
        f'--hf-checkpoint "{inputs}/model" --save "{torch_dist}"\n'
        f'"{installed.python}" "{tools}/convert_torch_dist_to_hf.py" --input-dir "{torch_dist}"/*/ --vocab-size 13 '
        f'--output-dir "{back}" --origin-hf-dir "{inputs}/model"\n'
        # By several processes, and in place of train.py with its other arguments.
        f'"{installed.bin}/torchrun" --standalone --nproc-per-node 2 "{tools}/convert_hf_to_torch_dist.py" '
        f'"${{MODEL_ARGS[@]}}" --hf-checkpoint "{inputs}/model" --save "{tmp_path}/by_two"\n'
        f'"{installed.bin}/torchrun" --standalone --nproc_per_node 1 "{tools}/convert_to_hf.py" '
        f'--load "{tmp_path}/by_two" --output-dir "{tmp_path}/by_two_back" "${{MODEL_ARGS[@]}}" '
        f'--hf-checkpoint "{inputs}/model" --num-rollout 3 --n-samples-per-prompt 8 --lr 1e-6\n'
    )
    same = (
        "import sys; from safetensors.numpy import load_file; "
        "a, b = (load_file(f'{d}/model.safetensors') for d in sys.argv[1:]); "
        "print(a.keys() == b.keys() and all((a[k] == b[k]).all() for k in a))"
    )
    for directory in (back, tmp_path / "by_two_back"):
        assert installed.run(same, str(inputs / "model"), str(directory)).strip() == "True"


def bash(script: str) -> None:
    run("bash", "-euo", "pipefail", "-c", script, env=clean_environment(), timeout=500)


# SlimeRunner


def test_the_runner_checks_its_fields_before_it_starts_anything(installed: CleanEnvironment, inputs: Path) -> None:
    code = f"""
from slime.launcher import SlimeRunner
runner = SlimeRunner(exp_id="gsm8k-3b-smoke", agent_runtime_arn="arn:aws:bedrock-agentcore:eu-west-1:1:runtime/a",
    s3_bucket="b",
    model_dir={str(inputs / "model")!r}, data_path={str(inputs / "train.jsonl")!r}, model_type="qwen2.5-3B")
print(runner.exp_id, runner.extra_flags)
try:
    SlimeRunner(exp_id="smoke", model_dir="m", data_path="d", model_type="qwen2.5-3B", lr=-1.0)
except ValueError as error:
    print("refused", error)
"""
    assert re.fullmatch(r"gsm8k-3b-smoke \[\]\nrefused .*lr.*-1.*\n", installed.run(code))


def test_an_unknown_flag_names_the_nearest_one(installed: CleanEnvironment) -> None:
    done = subprocess.run(
        [installed.bin / "slime", "train", "--rolout-batch-size", "4"],
        env=clean_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "--rollout-batch-size" in done.stderr
