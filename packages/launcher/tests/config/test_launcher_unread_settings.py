"""A setting that nothing reads is refused or named: by the table of conditions, and by the kind of engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from slime.launcher.config import run_config
from slime.launcher.config.advice import EFFECTS, FAKE_INT4, advice
from slime.launcher.config.catalogue import Flag, declared
from slime.launcher.platform import probes
from slime.rollout.engines.registry import KINDS, choose_engine
from slime.rollout.settings.rollout import RolloutSettings
from slime.trainer.settings.checks import EMULATED_BFLOAT16
from slime.types.errors import ConfigError, InvalidSetting
from slime.types.setting_values import value_type

# For each setting: the flag with a value, and flags with which it is read (none: by itself); then flags without which
# it is not.
CASES: dict[str, tuple[str, str, str]] = {
    "update_weight_delta_encoding": ("--update-weight-delta-encoding xor", "--update-weight-mode delta", ""),
    "update_weight_delta_checksum": ("--update-weight-delta-checksum blake3", "--update-weight-mode delta", ""),
    "update_weight_disk_dir": ("--update-weight-disk-dir d", "--update-weight-transport disk", ""),
    "update_weight_disk_keep_files": (
        "--update-weight-disk-keep-files --update-weight-disk-dir d", "--update-weight-transport disk",
        "--check-weight-update-equal",
    ),
    "custom_update_weight_post_write_path": (
        "--custom-update-weight-post-write-path a.b --update-weight-disk-dir d", "--update-weight-transport disk",
        "--check-weight-update-equal",
    ),
    "rollout_num_engines": ("--rollout-num-engines 2", "", "--rollout-external-engine-addrs h:1"),
    "rollout_engine": ("--rollout-engine sglang", "", "--rollout-external-engine-addrs h:1"),
    "rollout_num_gpus": ("--rollout-num-gpus 2", "", "--rollout-external-engine-addrs h:1"),
    "rollout_engine_dtype": ("--rollout-engine-dtype float16", "", "--rollout-external-engine-addrs h:1"),
    "rollout_engine_device": ("--rollout-engine-device cpu", "", "--rollout-external-engine-addrs h:1"),
    "rollout_engine_threads": ("--rollout-engine-threads 1", "", "--rollout-external-engine-addrs h:1"),
    "rollout_engine_max_running_requests": (
        "--rollout-engine-max-running-requests 256", "", "--rollout-external-engine-addrs h:1",
    ),
    "rollout_engine_max_total_tokens": (
        "--rollout-engine-max-total-tokens 9", "", "--rollout-external-engine-addrs h:1",
    ),
    "rollout_engine_host": ("--rollout-engine-host h", "", "--rollout-external-engine-addrs h:1"),
    "rollout_engine_max_restarts": ("--rollout-engine-max-restarts 1", "", "--no-use-fault-tolerance"),
    "rollout_engine_restart_window": ("--rollout-engine-restart-window 1.5", "", "--no-use-fault-tolerance"),
    "service_max_restarts": ("--service-max-restarts 1", "", "--no-use-fault-tolerance"),
    "service_restart_window": ("--service-restart-window 1.5", "", "--no-use-fault-tolerance"),
    "restart_point_interval": ("--restart-point-interval 1.5", "", "--no-use-fault-tolerance"),
    "memory_recorder": ("--memory-recorder memray", "--record-memory-history", ""),
    "profile_step_start": ("--profile-step-start 1", "--profile", ""),
    "profile_target": ("--profile-target train_actor", "--profile", ""),
    "fsdp_sharding": ("--fsdp-sharding optimizer", "", "--train-backend megatron"),
    "activation_memory_budget": ("--activation-memory-budget 0.5", "--compile", "--no-compile"),
    "compile": ("--compile --train-backend megatron", "", "--custom-model-provider-path f"),
    "ray_num_cpus": ("--ray-num-cpus 1", "", "--ray-address auto"),
    "tb_project_name": ("--tb-project-name n", "", "--no-use-tensorboard"),
    "tb_experiment_name": ("--tb-experiment-name n", "", "--no-use-tensorboard"),
    "rollout_shuffle": ("--rollout-shuffle", "--prompt-data p", "--disable-rollout-global-dataset"),
    "eval_input_key": ("--eval-input-key k", "--eval-prompt-data n f", ""),
    "eval_label_key": ("--eval-label-key k", "--eval-prompt-data n f", ""),
    "eval_tool_key": ("--eval-tool-key k", "--eval-prompt-data n f", ""),
    "eval_reward_key": ("--eval-reward-key k", "--eval-prompt-data n f", ""),
    "eval_temperature": ("--eval-temperature 0.5", "--eval-prompt-data n f", ""),
    "eval_top_p": ("--eval-top-p 0.5", "--eval-prompt-data n f", ""),
    "eval_top_k": ("--eval-top-k 5", "--eval-prompt-data n f", ""),
    "eval_max_response_len": ("--eval-max-response-len 5", "--eval-prompt-data n f", ""),
    "eval_max_prompt_len": ("--eval-max-prompt-len 5", "--eval-prompt-data n f", ""),
    "eval_max_context_len": ("--eval-max-context-len 5", "--eval-prompt-data n f", ""),
    "eval_min_new_tokens": ("--eval-min-new-tokens 5", "--eval-prompt-data n f", ""),
    "eval_function_path": ("--eval-function-path f", "--eval-prompt-data n f", ""),
    "n_samples_per_eval_prompt": ("--n-samples-per-eval-prompt 5", "--eval-prompt-data n f", ""),
    "custom_eval_rollout_log_function_path": (
        "--custom-eval-rollout-log-function-path f", "--eval-prompt-data n f", "",
    ),
    "loss_mask_type": (
        "--loss-mask-type qwen3", "--rollout-function-path slime.rollout.sft_rollout.generate_rollout", "",
    ),
    "tis_clip": ("--tis-clip 3.5", "--use-tis", ""),
    "tis_clip_low": ("--tis-clip-low 0.5", "--get-mismatch-metrics", ""),
    "custom_tis_function_path": ("--custom-tis-function-path f", "--use-tis", ""),
    "opsm_delta": ("--opsm-delta 0.5", "--use-opsm", ""),
    "eps_clip": ("--eps-clip 0.1", "", "--loss-type sft_loss"),
    "eps_clip_high": ("--eps-clip-high 0.3", "", "--loss-type sft_loss"),
    "eps_clip_c": ("--eps-clip-c 3.5", "", "--loss-type sft_loss"),
    "entropy_coef": ("--entropy-coef 0.5", "", "--loss-type sft_loss"),
    "normalize_advantages": ("--normalize-advantages", "", "--loss-type sft_loss"),
    "use_tis": ("--use-tis", "", "--loss-type sft_loss"),
    "use_opsm": ("--use-opsm", "", "--loss-type sft_loss"),
    "use_kl_loss": ("--use-kl-loss", "", "--loss-type sft_loss"),
    "kl_loss_coef": ("--use-kl-loss --kl-loss-coef 1", "", "--loss-type sft_loss"),
    "use_rollout_logprobs": ("--use-rollout-logprobs", "", "--loss-type sft_loss"),
    "custom_pg_loss_reducer_function_path": (
        "--custom-pg-loss-reducer-function-path f", "", "--loss-type sft_loss",
    ),
    "grpo_std_normalization": ("--disable-grpo-std-normalization", "", "--advantage-estimator rloo"),
    "grpo_std_scope": ("--grpo-std-scope batch", "", "--disable-grpo-std-normalization"),
    "rewards_normalization": ("--disable-rewards-normalization", "", "--advantage-estimator ppo"),
    "kl_loss_type": ("--kl-loss-type k2", "--use-kl-loss", ""),
    "use_unbiased_kl": ("--use-unbiased-kl", "--use-kl-loss", ""),
    "ref_load": ("--ref-load d", "--use-kl-loss", ""),
    "lr_decay_iters": ("--lr-decay-iters 9", "--lr-decay-style cosine", ""),
    "min_lr": ("--min-lr 1e-09", "--lr-decay-style cosine", ""),
    "micro_batch_size": ("--micro-batch-size 2", "", "--use-dynamic-batch-size --max-tokens-per-gpu 99"),
    "no_save_optim": ("--no-save-optim", "--save-interval 1", ""),
}  # fmt: skip


def parse(*flags: str, environment: Mapping[str, str] | None = None, **options: Any) -> run_config.RunConfig:
    source = () if "--disable-rollout-global-dataset" in " ".join(flags) else ("--prompt-data", "p")
    words = ["--hf-checkpoint", "m", *source, "--num-rollout", "1"]
    typed = [*words, *" ".join(flags).split()]
    return run_config.parse(typed, check=False, environment=environment or {}, **options)


def said(name: str, config: run_config.RunConfig) -> list[str]:
    spelling = CASES[name][0].split(" --")[0]
    return [text for text in advice(config) if text.startswith(f"{spelling} has no effect: it requires ")]


def test_every_setting_of_the_table_has_a_case() -> None:
    assert sorted({name for effect in EFFECTS for name in effect.names}) == sorted(CASES)
    assert CASES.keys() <= declared().keys()


@pytest.mark.parametrize("name", CASES)
def test_a_setting_that_nothing_reads_is_refused_or_named(name: str) -> None:
    flag, with_effect, without = CASES[name]
    assert said(name, parse(flag, with_effect)) == []
    if any(name in effect.names and effect.refused for effect in EFFECTS):
        spelling = flag.split(" --")[0]
        with pytest.raises(InvalidSetting, match=f"{spelling} requires .*nothing reads this setting"):
            parse(flag, without)
    else:
        assert len(said(name, parse(flag, without))) == 1


def test_defaults_that_were_typed_are_not_named() -> None:
    assert list(advice(parse("--entropy-coef 0.0 --eps-clip 0.2 --loss-type sft_loss --micro-batch-size 1"))) == []


@pytest.mark.parametrize(
    ("mode", "flags", "sentence"),
    [
        (
            "--debug-rollout-only", "--lr 0.5 --train-backend megatron --num-layers 2 --seed 7",
            "--lr 0.5, --train-backend megatron, --num-layers 2, --seed 7 have no effect: --debug-rollout-only "
            "starts no trainer",
        ),
        (
            "--debug-rollout-only", "--actor-num-gpus-per-node 4",
            "--actor-num-gpus-per-node 4 has no effect: --debug-rollout-only starts no trainer",
        ),
        (
            "--debug-train-only --rollout-function-path f", "--rollout-engine-dtype float16 --sglang-tp-size 2",
            "--rollout-engine-dtype float16, --rollout-num-gpus-per-engine 2 have no effect: --debug-train-only "
            "starts no engine and evaluates nothing",
        ),
        (
            "--load-debug-rollout-data r{rollout_id}",
            "--rm-type math --eval-prompt-data n f --sglang-context-length 9",
            "--rm-type math, --eval-prompt-data n f, --sglang-context-length 9 have no effect: "
            "--load-debug-rollout-data generates nothing",
        ),
        (
            "--num-rollout 0 --eval-prompt-data n f", "--eps-clip 0.1 --partial-rollout",
            "--eps-clip 0.1, --partial-rollout have no effect: --num-rollout 0 trains nothing",
        ),
    ],
)  # fmt: skip
def test_settings_of_a_part_that_the_mode_leaves_out_are_named_in_one_sentence(
    mode: str, flags: str, sentence: str
) -> None:
    assert sentence in list(advice(parse(mode, flags)))


def test_rounding_in_training_is_named_as_what_it_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAKE_INT4, "0")
    assert not [text for text in advice(parse()) if FAKE_INT4 in text]
    monkeypatch.setenv(FAKE_INT4, "1")
    (named,) = [text for text in advice(parse()) if FAKE_INT4 in text]
    assert named.startswith(f"{FAKE_INT4}=1 has no effect: training does not round weights to INT4")


def test_the_router_that_every_run_has_can_be_asked_for_as_in_the_original() -> None:
    config = parse("--use-slime-router")
    assert config.flat["use_slime_router"] is True and parse().flat["use_slime_router"] is False
    assert list(advice(config)) == [
        "--use-slime-router has no effect: every run sends requests through the rollout service's own router"
    ]


def value_of(flag: Flag) -> list[str]:
    kind, default, choices = value_type(flag.hint)[0], flag.default, flag.field.metadata.get("choices")
    if kind is bool:
        return []
    if choices:
        return [next(str(choice) for choice in choices if choice != default)]
    if kind is float:
        return [str(default / 2 if default else 0.5)]
    return [str((default or 0) + 2) if kind is int else "word"]


@pytest.mark.parametrize(
    ("mode", "package", "read_all_the_same"),
    [
        ("--debug-rollout-only", "trainer", {"load", "use_opd", "profile_target"}),
        (
            "--load-debug-rollout-data r{rollout_id}", "rollout",
            {"rollout_max_response_len", "rollout_max_prompt_len", "rollout_max_context_len", "use_fault_tolerance"},
        ),
    ],
)  # fmt: skip
def test_no_setting_of_a_package_that_does_not_run_is_passed_over_in_silence(
    mode: str, package: str, read_all_the_same: set[str]
) -> None:
    silent, tried = set(), 0
    for name, flag in declared().items():
        if flag.packages != (package,):
            continue
        try:
            config = parse(mode, flag.spelling, *value_of(flag))
        except ConfigError:
            continue  # it says itself what it needs
        tried += 1
        if not any(flag.spelling in sentence for sentence in advice(config)):
            silent.add(name)
    assert tried > 30 and silent <= read_all_the_same, silent


def test_a_number_of_cores_in_a_job_of_a_cluster_is_named_and_refuses_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray sets it for each job.
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert [text for text in advice(parse("--ray-num-cpus 2")) if "ray-num-cpus" in text] == [
        "--ray-num-cpus 2 has no effect: it requires a Ray that the run starts, without RAY_ADDRESS"
    ]


def test_engines_that_others_started_are_not_started_again() -> None:
    flags = "--rollout-engine-max-restarts 2 --rollout-engine-restart-window 9"
    assert not list(advice(parse(flags)))
    found = [text for text in advice(parse(flags, "--rollout-external-engine-addrs h:1")) if "no effect" in text]
    assert [text.split(" has ")[0] for text in found] == [
        "--rollout-engine-max-restarts 2", "--rollout-engine-restart-window 9.0",
    ]  # fmt: skip


def test_a_variable_that_nothing_reads_is_named_and_refuses_no_run() -> None:
    config = parse("--ray-address auto", environment={"SLIME_RAY_NUM_CPUS": "2"})
    assert [text for text in advice(config) if "ray-num-cpus" in text] == [
        "--ray-num-cpus 2 (from SLIME_RAY_NUM_CPUS) has no effect: it requires a Ray that the run starts, without "
        "--ray-address"
    ]
    with pytest.raises(InvalidSetting, match="--ray-num-cpus 3 requires"):
        parse("--ray-address auto --ray-num-cpus 3", environment={"SLIME_RAY_NUM_CPUS": "2"})


def test_a_value_of_a_preset_that_nothing_reads_names_the_preset() -> None:
    (said,) = [text for text in advice(parse("--preset grpo-math --loss-type sft_loss")) if "--use-kl-loss" in text]
    assert said == "--use-kl-loss (from --preset grpo-math) has no effect: it requires --loss-type policy_loss"


def test_nothing_is_said_of_settings_of_another_run_that_an_evaluation_keeps() -> None:
    mode = "--num-rollout 0 --debug-rollout-only --eval-prompt-data n f"
    environment = {"SLIME_ROLLOUT_SHUFFLE": "true"}
    kept = {"rollout_shuffle", "rollout_engine_dtype"}
    assert any("--rollout-shuffle" in text for text in advice(parse(mode, environment=environment)))
    assert not list(advice(parse(mode, environment=environment, inherited=kept)))
    own = advice(parse(mode, "--rollout-shuffle", inherited=kept))
    assert any("--rollout-shuffle" in text for text in own)


@pytest.mark.parametrize(
    ("engine", "flag", "instead"),
    [
        ("sglang", "--rollout-engine-dtype bfloat16", "only the embedded engine reads it; use --sglang-dtype"),
        ("sglang", "--rollout-engine-max-running-requests 256", "use --sglang-max-running-requests"),
        ("sglang", "--rollout-num-engines 2", "use --rollout-num-gpus"),
        ("sglang", "--rollout-engine-threads 2", "only the embedded engine reads it"),
        ("sglang", "--rollout-engine-device cpu", "only the embedded engine reads it"),
        ("embedded", "--rollout-num-gpus-per-engine 2", "only SGLang reads it"),
    ],
)
def test_a_setting_of_another_kind_of_engine_is_refused(engine: str, flag: str, instead: str) -> None:
    with pytest.raises(
        InvalidSetting, match=f"--rollout-engine {engine} and {flag} cannot be used together: .*{instead}"
    ):
        parse(flag, f"--rollout-engine {engine}")
    assert all(hasattr(RolloutSettings, name) for kind in KINDS.values() for name in kind.own_settings)


def test_an_engine_that_was_chosen_by_itself_names_the_settings_that_it_does_not_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        settings = RolloutSettings(hf_checkpoint="m", rollout_num_gpus_per_engine=2)
        assert choose_engine(settings, [], assume_installed=True).name == "embedded"
        settings = RolloutSettings(hf_checkpoint="m", rollout_engine_threads=2)
        assert choose_engine(settings, ["0"], assume_installed=True).name == "sglang"
    assert caplog.messages == [
        "--rollout-num-gpus-per-engine 2 has no effect: only SGLang reads it",
        "--rollout-engine-threads 2 has no effect: only the embedded engine reads it",
    ]


@pytest.mark.parametrize("multiplies", [True, False])
def test_bfloat16_on_a_processor_that_emulates_it_is_named(monkeypatch: pytest.MonkeyPatch, multiplies: bool) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(probes, "gpus", lambda: [])
    monkeypatch.setattr(probes, "multiplies_bfloat16", lambda: multiplies)
    assert (EMULATED_BFLOAT16 in list(advice(parse("--bf16")))) == (not multiplies)
    for flags in ("", "--no-bf16", "--bf16 --ray-address auto", "--bf16 --dry-run --dry-run-gpus 1"):
        assert EMULATED_BFLOAT16 not in list(advice(parse(flags))), flags
    monkeypatch.setattr(probes, "gpus", lambda: [probes.Gpu("0", "H100", 80 << 30, 79 << 30)])
    assert EMULATED_BFLOAT16 not in list(advice(parse("--bf16")))
