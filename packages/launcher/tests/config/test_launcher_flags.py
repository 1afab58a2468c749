"""One command line for all packages: what it takes, what it refuses, and the page that lists it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.launcher.config import known_flags, run_config
from slime.launcher.config.catalogue import SETTINGS, Flag, build_parser, declared, declared_by, type_name
from slime.launcher.config.known_flags import ELSEWHERE
from slime.launcher.runner.runner import SlimeRunner
from slime.types.errors import (
    ConfigError,
    InvalidFile,
    InvalidSetting,
    MissingFile,
    NotAvailable,
    UnknownFlag,
)
from slime.types.settings import flag_help, flag_names

DOCS = Path(__file__).parents[4] / "docs" / "flags.md"


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1"}\n')
    return {"model": model, "prompts": prompts}


@pytest.fixture
def base(files: dict[str, Path]) -> list[str]:
    return ["--hf-checkpoint", str(files["model"]), "--prompt-data", str(files["prompts"]), "--num-rollout", "4",
            "--n-samples-per-prompt", "2"]  # fmt: skip


def test_one_flag_reaches_every_package_that_has_the_setting(base: list[str]) -> None:
    config = run_config.parse(
        [*base, "--n-samples-per-prompt=8", "--lr", "1e-3", "--rollout-stop", "a", "b", "--deterministic"]
    )
    assert (config.buffer.n_samples_per_prompt, config.rollout.n_samples_per_prompt) == (8, 8)
    assert (config.trainer.n_samples_per_prompt, config.trainer.lr) == (8, 1e-3)
    assert config.rollout.rollout_stop == ["a", "b"]
    assert config.launcher.deterministic and config.rollout.deterministic and config.trainer.deterministic
    assert config.rollout.rollout_batch_size == config.trainer.rollout_batch_size == 32
    assert config.flat["n_samples_per_prompt"] == 8 and config.flat["num_rollout"] == 4


def test_the_buffer_refuses_rewards_that_the_trainer_could_not_train_on(base: list[str]) -> None:
    plain = run_config.parse([*base, "--reward-key", "score"]).buffer
    assert (plain.scalar_rewards, plain.reward_key, plain.allow_missing_rewards) == (True, "score", False)
    own = run_config.parse([*base, "--allow-missing-rewards"]).buffer
    assert (own.scalar_rewards, own.allow_missing_rewards) == (False, True)


def test_the_buffer_refuses_samples_that_the_model_could_not_read(base: list[str], files: dict[str, Path]) -> None:
    assert run_config.parse(base).buffer.max_token_id is None
    (files["model"] / "config.json").write_text('{"vocab_size": 13}')
    buffer = run_config.parse(base).buffer
    assert (buffer.max_token_id, buffer.text_only, buffer.nuclei) == (12, True, "refused")
    assert not buffer.log_probs_required
    assert run_config.parse([*base, "--rollout-top-p", "0.9"]).buffer.nuclei == "required"
    assert run_config.parse([*base, "--rollout-top-p", "0.9", "--debug-rollout-only"]).buffer.nuclei == "any"
    assert run_config.parse([*base, "--use-tis"]).buffer.log_probs_required


def test_a_setting_of_several_packages_is_declared_once() -> None:
    by_name: dict[str, list[Flag]] = {}
    for package, cls in SETTINGS.items():
        for flag in declared_by(package, cls):
            by_name.setdefault(flag.name, []).append(flag)
    shared = {name: group for name, group in by_name.items() if len(group) > 1}
    assert len(shared) >= 15
    for name, (first, *others) in shared.items():
        for other in others:
            assert other.field.metadata == first.field.metadata, (name, first.packages, other.packages)
            assert type_name(other.hint) == type_name(first.hint), name
            # A trainer by itself may do without it.
            assert other.default == first.default or (name, other.packages) == ("rollout_batch_size", ("trainer",))


def test_fields_of_the_runner_are_those_of_the_flags() -> None:
    """Help and range; some defaults are the runner's own."""
    flags = declared()
    own = {"model_type"}  # the runner may run a script of that name
    same = [field for field in dataclasses.fields(SlimeRunner) if field.name in flags and field.name not in own]
    assert len(same) >= 12
    for field in same:
        assert field.metadata == flags[field.name].field.metadata, field.name


def test_file_then_flag_then_custom_file(base: list[str], tmp_path: Path) -> None:
    config_file, custom = tmp_path / "config.yaml", tmp_path / "custom.yaml"
    config_file.write_text("lr: 1e-5\nrollout-batch-size: 16\neps_clip: 0.3\ndisable_grpo_std_normalization: true\n")
    custom.write_text("eps_clip: 0.4\nmy_depth: 3\n")
    config = run_config.parse(
        [*base, "--config", str(config_file), "--lr", "2e-5", "--custom-config-path", str(custom)]
    )
    assert (config.trainer.lr, config.trainer.rollout_batch_size, config.trainer.eps_clip) == (2e-5, 16, 0.4)
    assert config.trainer.grpo_std_normalization is False
    assert config.flat["my_depth"] == 3 and config.flat["eps_clip"] == 0.4


@pytest.mark.parametrize(
    "text, error, words",
    [
        ("rolout_seed: 1", UnknownFlag, "config.yaml: unknown key 'rolout_seed'; did you mean rollout_seed"),
        ("reward: 1", UnknownFlag, "config.yaml: unknown key 'reward'; use rm_type or custom_rm_path$"),
        ("qqqqq: 1", UnknownFlag, "unknown key 'qqqqq'; use one of the settings that `slime train --help-all` lists"),
        ("rollout: {seed: 1}", UnknownFlag, "unknown key 'rollout'; use its keys without this section"),
        ("release_train: true", NotAvailable, "--config .*config.yaml: release_train: --release-train"),
        ("[1, 2]", InvalidFile, "mapping"),
        ("lr: fast", InvalidSetting, "--lr"),
        ("disable_grpo_std_normalization: 3", InvalidSetting, "true or false"),
    ],
)
def test_bad_config_file(base: list[str], tmp_path: Path, text: str, error: type[ConfigError], words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(error, match=words):
        run_config.parse([*base, "--config", str(path)])


def test_unknown_flag_names_the_nearest(base: list[str]) -> None:
    with pytest.raises(UnknownFlag, match="--rollout-bach-size; did you mean --rollout-batch-size"):
        run_config.parse([*base, "--rollout-bach-size", "4"])
    with pytest.raises(InvalidSetting, match="stray"):
        run_config.parse(["stray", *base])


@pytest.mark.parametrize(
    "flag",
    [
        "--release-train",
        "--router-policy",
        "--fp4-format",
        "--tokenizer-model=x",
    ],
)
def test_known_and_not_available(base: list[str], flag: str) -> None:
    with pytest.raises(NotAvailable, match=flag.split("=")[0] + " is not supported yet: "):
        run_config.parse([*base, flag])


def test_what_is_not_there_is_refused_by_name() -> None:
    available = set(build_parser(declared()).flag_names())
    refused = [name for name in known_flags.KNOWN if f"--{name}" not in available]
    assert refused
    for name in refused:
        with pytest.raises(NotAvailable, match=f"--{name} "):
            run_config.parse([f"--{name}"])


def test_available_names_are_the_parsers() -> None:
    parser = build_parser(declared())
    names = {name[2:] for name in parser.flag_names()} - {"help", "help-all", "help-megatron", "config"}
    assert known_flags.available_names(declared()) == names


def test_page_is_up_to_date() -> None:
    assert DOCS.read_text() == known_flags.page(), "run: python -m slime.launcher.config.known_flags > docs/flags.md"


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--global-batch-size", "5"], ["--global-batch-size must be a divisor of", "32", "got 5"]),
        (["--num-steps-per-rollout", "3"], ["--num-steps-per-rollout must be a divisor of", "32", "got 3"]),
        (["--eval-interval", "2"], ["--eval-interval 2", "--eval-prompt-data"]),
        (["--save", "here"], ["--save here", "--save-interval"]),
        (["--save-hf", "x/{step}", "--save-interval", "1"], ["--save-hf", "step", "{rollout_id}"]),
        (["--train-env-vars", '{"A": 1}'], ["--train-env-vars", "A"]),
        (["--train-env-vars", "A=1"], ["--train-env-vars", "A=1"]),
        (["--kl-loss-coef", "0.1"], ["--kl-loss-coef", "--use-kl-loss"]),
        (["--num-rollout", "-1"], ["--num-rollout", "-1"]),
        (["--num-rollout", "0"], ["--num-rollout 0", "--eval-prompt-data"]),
        (["--rollout-temperature", "0"], ["--rollout-temperature", "0"]),
        (["--rollout-temperature", "9e-7"], ["--rollout-temperature", "at least 1e-06", "9e-07"]),
        (["--lr", "fast"], ["fast", "a number"]),
        (["--train-backend", "fdsp"], ["fdsp", "did you mean fsdp"]),
        (["--eval-prompt-data", "a", "b", "c"], ["--eval-prompt-data", "pairs"]),
        (
            ["--reward-key", "score", "--rm-type", "math"],
            ["--reward-key score and --rm-type math cannot be used together: this reward is one number"],
        ),
        (["--eval-prompt-data", "a", "p.jsonl@[0:x]"], ["--eval-prompt-data a must be PATH@[a:b] with integers"]),
        (["--max-tokens-per-gpu", "9"], ["--max-tokens-per-gpu 9 requires --use-dynamic-batch-size"]),
        (
            ["--colocate", "--rollout-external-engine-addrs", "h:1"],
            ["--colocate and --rollout-external-engine-addrs cannot be used together"],
        ),
    ],
)
def test_contradictions_name_both_values(base: list[str], extra: list[str], words: list[str]) -> None:
    with pytest.raises(InvalidSetting) as caught:
        run_config.parse([*base, *extra])
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("rm_type", ["dapo", "boxed_dapo", "remote_rm"])
def test_a_reward_that_may_be_a_dict_takes_a_key(base: list[str], rm_type: str) -> None:
    run_config.parse([*base, "--reward-key", "score", "--rm-type", rm_type, "--rm-url", "http://h/score"])


def test_required(files: dict[str, Path], base: list[str]) -> None:
    with pytest.raises(InvalidSetting, match="--hf-checkpoint is required"):
        run_config.parse(base[2:])
    with pytest.raises(InvalidSetting, match="--prompt-data is required"):
        run_config.parse([*base[:2], *base[4:]])
    with pytest.raises(InvalidSetting, match="--num-rollout is required"):
        run_config.parse(base[:4])
    config = run_config.parse([*base[:2], *base[4:], "--disable-rollout-global-dataset"])
    assert config.buffer.rollout_global_dataset is False


def test_files_are_looked_for_first(base: list[str], files: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="--hf-checkpoint: no such directory"):
        run_config.parse([*base, "--hf-checkpoint", str(tmp_path / "none")])
    with pytest.raises(MissingFile, match="--prompt-data: no such file"):
        run_config.parse([*base, "--prompt-data", str(tmp_path / "none.jsonl") + "@[0:5]"])
    with pytest.raises(MissingFile, match="--eval-prompt-data sums: no such file"):
        run_config.parse([*base, "--eval-prompt-data", "sums", str(tmp_path / "none.jsonl")])
    with pytest.raises(MissingFile, match="--config"):
        run_config.parse([*base, "--config", str(tmp_path / "none.yaml")])
    assert run_config.parse([*base, "--prompt-data", f"{files['prompts']}@[0:1]"]).buffer.prompt_data
    (files["model"] / "tokenizer.json").unlink()
    with pytest.raises(InvalidFile, match="has no tokenizer"):
        run_config.parse(base)


def test_what_is_no_name_on_the_hub_is_not_looked_for_there(base: list[str]) -> None:
    for path in ("/nowhere/model", "model", "a/b/c"):
        with pytest.raises(MissingFile) as caught:
            run_config.parse([*base, "--hf-checkpoint", path])
        assert "Hub" not in str(caught.value)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_words_of_other_tools_name_the_flag_that_says_the_same_here(base: list[str], name: str) -> None:
    with pytest.raises(UnknownFlag, match=f"unknown option --{name}; use --") as caught:
        run_config.parse([*base, f"--{name}", "1"])
    named = {word.strip(",") for word in caught.value.expected.split() if word.startswith("--")}
    assert named and named <= {spelling for flag in declared().values() for spelling in flag_names(flag.field)}


def test_lora_is_turned_on_by_its_rank_and_has_no_dropout(base: list[str]) -> None:
    config = run_config.parse([*base, "--lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj"])
    assert (config.trainer.lora_rank, config.trainer.lora_target_modules) == (8, ["q_proj", "v_proj"])
    with pytest.raises(UnknownFlag, match="use --lora-rank R"):
        run_config.parse([*base, "--use-lora"])
    with pytest.raises(NotAvailable, match="--lora-dropout .*: log-probs are computed in two passes"):
        run_config.parse([*base, "--lora-rank", "8", "--lora-dropout", "0.1"])
    with pytest.raises(InvalidSetting, match="--lora-rank 8 requires --train-backend fsdp"):
        run_config.parse([*base, "--lora-rank", "8", "--train-backend", "megatron"])
    config_file = Path(config.trainer.hf_checkpoint) / "config.json"
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"quantization_config": quantized}))
    with pytest.raises(NotAvailable, match="--lora-rank 8 for this model is not supported yet: .* quantized weights"):
        run_config.parse([*base, "--lora-rank", "8"])
    run_config.parse([*base, "--lora-rank", "8", "--debug-rollout-only"])


def test_a_number_of_gpus_that_nobody_has_is_refused(base: list[str]) -> None:
    for words in (["--actor-num-nodes", "2000000"], ["--num-gpus-per-node", "1000001"], ["--dry-run-gpus", "1000001"]):
        with pytest.raises(InvalidSetting, match=f"{words[0]} must be .* at most 1,000,000 GPUs .* got {words[1]}"):
            run_config.parse([*base, *words, *(["--dry-run"] if "dry" in words[0] else [])])


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("--rollout-batch-size 1000000000000", "100,000,000 samples per iteration"),
        ("--n-samples-per-prompt 100000000", "100,000,000 samples per iteration"),
        ("--over-sampling-batch-size 1000000000", "100,000,000 samples per iteration"),
        ("--async-buffer-size 1000000000", "1,000,000,000 samples generated ahead"),
        ("--rollout-max-response-len 1000000000000", "1,000,000,000 tokens"),
        ("--eval-max-context-len 1000000000000", "1,000,000,000 tokens"),
        ("--n-samples-per-eval-prompt 1000000000000", "1,000,000 samples per prompt of an evaluation"),
        ("--num-rollout 1000000000000000", "1,000,000,000,000 iterations"),
    ],
)
def test_numbers_that_no_run_reaches_are_refused(base: list[str], words: str, limit: str) -> None:
    flag, value = words.split()
    with pytest.raises(InvalidSetting, match=f"{flag} must be small enough for at most {limit}, got {value}"):
        run_config.parse([*base, flag, value])


def test_when_the_loop_saves_and_evaluates(base: list[str], files: dict[str, Path], tmp_path: Path) -> None:
    evaluation = ["--eval-prompt-data", "sums", str(files["prompts"])]
    config = run_config.parse(
        [*base, *evaluation, "--eval-interval", "3", "--save-interval", "2", "--output-dir", str(tmp_path / "one")]
    )
    assert [config.evaluates_after(i) for i in range(4)] == [False, False, True, True]
    assert [config.saves_after(i) for i in range(4)] == [False, True, False, True]
    assert config.tensorboard_dir == tmp_path / "one" / "tensorboard"
    assert config.checkpoint_dir == tmp_path / "one" / "checkpoints" and config.launcher.run_name == "one"
    plain = run_config.parse(base)
    assert not plain.evaluates and not plain.evaluates_after(3) and not plain.saves_after(3)
    assert plain.output_dir == Path("runs") / str(plain.launcher.run_name) and plain.launcher.use_tensorboard


def test_a_run_is_named_by_no_path(base: list[str], tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="--run-name must be a name without slashes, got 'a/../../b'"):
        run_config.parse([*base, "--run-name", "a/../../b"])
    assert (
        run_config.parse([*base, "--run-name", "a/b", "--output-dir", str(tmp_path / "o")]).output_dir == tmp_path / "o"
    )


def test_help_is_light() -> None:
    code = (
        "import json, sys\nfrom slime.launcher.config import run_config\n"
        "try:\n    run_config.parse(['--help-all'])\nexcept SystemExit:\n"
        "    heavy = [m for m in ('torch', 'ray', 'transformers', 'grpc') if m in sys.modules]\n"
        "    print(json.dumps(heavy))\n"
    )
    done: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "--rollout-batch-size" in done.stdout and "Data buffer" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == []


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"])
def test_groups_of_one_sample_are_refused_where_nothing_would_be_learned(
    base: list[str], files: dict[str, Path], estimator: str
) -> None:
    line = [*base[:-1], "1", "--advantage-estimator", estimator]
    line += ["--normalize-advantages"] if estimator == "reinforce_plus_plus_baseline" else []
    with pytest.raises(
        InvalidSetting, match=f"--n-samples-per-prompt 1 and .*{estimator} .*: every advantage would be 0"
    ):
        run_config.parse(line)
    plugin = files["prompts"].with_name("rewards.py")
    plugin.write_text("def normalize(args, samples):\n    return [1.0], [1.0]\n")
    for more in (
        ["--disable-rewards-normalization"],
        ["--custom-reward-post-process-path", f"{plugin}:normalize"],
        ["--loss-type", "sft_loss"],
        ["--debug-rollout-only"],
        ["--num-rollout", "0", "--eval-prompt-data", "sums", str(files["prompts"])],
    ):
        run_config.parse([*line, *more])


def test_a_flag_that_turns_something_off_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    # Megatron's own have their words from there: "without ...", "no ...".
    off = [flag for flag in declared().values() if flag.turns_off and flag.packages != ("megatron",)]
    assert len(off) >= 5
    for flag in off:
        assert flag_help(flag.field) != flag.field.metadata["help"], flag.spelling
    build_parser(declared()).print_help()
    told = " ".join(capsys.readouterr().out.split())
    assert "--disable-rewards-normalization Keep rewards as they are" in told


EXTERNAL, SGLANG = ["--rollout-external-engine-addrs", "a:1"], ["--rollout-engine", "sglang"]


@pytest.mark.parametrize(
    "engine, name, value, refusal",
    [
        (EXTERNAL, "top-p", 0.8, "--rollout-top-p 0.8 is not supported yet: .*cannot tell.*--rollout-top-p 1 "),
        (EXTERNAL, "top-k", 20, "--rollout-top-k 20 is not supported yet: .*cannot tell.*--rollout-top-k -1 "),
        (SGLANG, "top-p", 0.8, "--rollout-top-p 0.8 requires --rollout-top-k N: SGLang tells"),
    ],
)
def test_training_on_a_nucleus_that_the_engine_does_not_tell_is_refused_and_evaluating_on_one_is_not(
    base: list[str], engine: list[str], name: str, value: float, refusal: str
) -> None:
    partial = [*base, f"--rollout-{name}", str(value)]
    for check in (True, False):
        with pytest.raises(ConfigError, match=refusal):
            run_config.parse([*partial, *engine], check=check)
    run_config.parse([*partial, *engine, "--debug-rollout-only"])
    assert run_config.parse(partial).trainer.samples_from_nuclei
    rollout = run_config.parse([*base, *engine, f"--eval-{name}", str(value)]).rollout
    assert getattr(rollout, f"eval_{name.replace('-', '_')}") == value


@pytest.mark.parametrize("target", ["link", "nothing"])
def test_an_output_directory_that_is_a_link_to_nowhere_is_refused_by_name(
    base: list[str], tmp_path: Path, target: str
) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(InvalidSetting, match=f"--output-dir {link}: .* is a link that leads nowhere"):
        run_config.parse([*base, "--output-dir", str(link)])
