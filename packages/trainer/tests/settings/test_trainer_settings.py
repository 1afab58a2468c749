"""Settings that are refused; reading settings loads nothing heavy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slime.trainer.backends.learning_rate import learning_rate
from slime.trainer.checkpoints.adapter import AdapterConfig
from slime.trainer.cli import PlaceSettings, main
from slime.trainer.settings.checks import advice, require_schedule
from slime.trainer.settings.trainer import TrainerSettings
from slime.types.errors import InvalidSetting
from slime.types.settings import parse


def settings(**values: Any) -> TrainerSettings:
    return TrainerSettings(hf_checkpoint="model", **values)


@pytest.mark.parametrize(
    ("values", "both"),
    [
        ({"kl_coef": 0.1, "kl_loss_coef": 0.2, "use_kl_loss": True}, ("--kl-coef 0.1", "--kl-loss-coef 0.2")),
        ({"kl_loss_coef": 0.2}, ("--kl-loss-coef 0.2", "--use-kl-loss")),
        ({"kl_coef": 0.1}, ("--kl-coef 0.1", "--advantage-estimator grpo")),
        ({"use_tis": True, "use_rollout_logprobs": True}, ("--use-tis", "--use-rollout-logprobs")),
        ({"advantage_estimator": "reinforce_plus_plus"}, ("reinforce_plus_plus", "--normalize-advantages")),
        ({"use_dynamic_batch_size": True}, ("--use-dynamic-batch-size", "--max-tokens-per-gpu")),
        ({"lr_warmup_fraction": 0.1, "lr_warmup_iters": 3}, ("--lr-warmup-fraction 0.1", "--lr-warmup-iters 3")),
        ({"lr_warmup_fraction": 1.0, "lr_decay_style": "linear"}, ("--lr-warmup-fraction 1.0", "linear")),
        ({"max_tokens_per_gpu": 9}, ("--max-tokens-per-gpu 9 requires --use-dynamic-batch-size",) * 2),
        ({"update_weight_transport": "disk"}, ("--update-weight-transport disk", "--update-weight-disk-dir")),
        ({"update_weight_transport": "ipc"}, ("--update-weight-transport ipc", "--colocate")),
        (
            {"update_weight_mode": "delta", "update_weight_transport": "ipc", "colocate": True},
            ("--update-weight-mode delta", "--update-weight-transport ipc"),
        ),
        (
            {"update_weight_local_checkpoint_dir": "/x"},
            ("--update-weight-local-checkpoint-dir", "--update-weight-mode"),
        ),
        (
            {"update_weight_mode": "delta", "update_weight_local_checkpoint_dir": "/x"},
            ("--update-weight-local-checkpoint-dir", "--update-weight-transport disk"),
        ),
        (
            {
                "update_weight_mode": "delta",
                "update_weight_transport": "disk",
                "update_weight_disk_dir": "/x",
                "update_weight_local_checkpoint_dir": "/x/",
            },
            ("--update-weight-local-checkpoint-dir", "--update-weight-disk-dir"),
        ),
        ({"update_weight_transport": "nccl", "colocate": True}, ("--update-weight-transport nccl", "--colocate")),
        (
            {"update_weight_transport": "ipc", "colocate": True, "rollout_external_engine_addrs": ["h:1"]},
            ("--update-weight-transport ipc", "--rollout-external-engine-addrs"),
        ),
        (
            {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "global_batch_size": 8, "num_steps_per_rollout": 2},
            ("--global-batch-size 8", "--num-steps-per-rollout 2"),
        ),
        ({"gamma": 0.9, "advantage_estimator": "grpo"}, ("--gamma 0.9", "--advantage-estimator grpo")),
        ({"loss_divisor": 9.0, "calculate_per_token_loss": True}, ("--loss-divisor 9.0", "--calculate-per-token-loss")),
    ],
)
def test_a_contradiction_names_both_values(values: dict[str, Any], both: tuple[str, str]):
    with pytest.raises(InvalidSetting) as caught:
        settings(**values)
    for part in both:
        assert part in str(caught.value)


def test_a_critic_has_learning_rates_of_its_own_and_trains_whole():
    values = {"critic_lr": 3e-5, "critic_lr_warmup_iters": 2, "num_critic_only_steps": 4, "num_steps_per_rollout": 3}
    policy = settings(
        train_backend="megatron", advantage_estimator="ppo", lr_decay_style="linear", lr_decay_iters=10,
        lr_warmup_fraction=0.5, freeze_params_name_list=["embedding"], **values,
    )  # fmt: skip
    critic = policy.of_critic()
    assert (critic.lr, critic.warmup_updates, critic.lr_decay_iters) == (3e-5, 2, 22)
    assert critic.freeze_params_name_list is None
    assert settings(advantage_estimator="ppo", lr=2e-5).of_critic().lr == 2e-5


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_name": "qwen3"}, "--model-name qwen3 requires --train-backend megatron"),
        ({"enable_mtp_training": True}, "--enable-mtp-training requires --train-backend megatron"),
        ({"only_train_params_name_list": ["a"]}, "--only-train-params-name-list .* requires --train-backend megatron"),
        ({"custom_megatron_init_path": "a.b"}, "--custom-megatron-init-path a.b requires --train-backend megatron"),
        (
            {"train_backend": "megatron", "only_train_params_name_list": ["a"], "freeze_params_name_list": ["b"]},
            "--only-train-params-name-list a and --freeze-params-name-list b cannot be used together",
        ),
        (
            {"train_backend": "megatron", "freeze_params_name_list": ["a", "["]},
            r"params-name-list must be a regular expression, got '\['",
        ),
    ],
)
def test_settings_of_the_megatron_backend(values: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        settings(**values)
    assert settings(train_backend="megatron", freeze_params_name_list=["embedding"], async_save=True)


def test_learning_rates():
    s = settings(lr=1.0, lr_warmup_iters=2, lr_decay_style="linear", lr_decay_iters=6, min_lr=0.2)
    assert [learning_rate(s, i) for i in range(8)] == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    s = settings(lr=1.0, lr_decay_style="cosine", lr_decay_iters=4)
    assert [learning_rate(s, i) for i in range(5)] == pytest.approx([1.0, 0.853553, 0.5, 0.146447, 0.0], abs=1e-6)
    assert learning_rate(settings(lr=3.0), 10**6) == 3.0
    s = settings(lr=1.0, lr_warmup_fraction=0.25, lr_decay_style="linear", lr_decay_iters=8)
    assert [learning_rate(s, i) for i in (0, 1, 2, 5, 8)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0])
    s = settings(lr=1.0, lr_warmup_fraction=0.25, lr_decay_iters=8)
    assert [learning_rate(s, i) for i in (0, 1, 9)] == pytest.approx([0.5, 1.0, 1.0])


@pytest.mark.parametrize("values", [{"lr_decay_style": "cosine"}, {"lr_warmup_fraction": 0.1}])
def test_a_trainer_alone_is_told_how_long_the_learning_rate_falls(values: dict[str, Any]):
    with pytest.raises(InvalidSetting, match="requires --lr-decay-iters N: a trainer alone does not know"):
        require_schedule(settings(**values))
    require_schedule(settings(**values, lr_decay_iters=4))
    require_schedule(settings())


@pytest.mark.parametrize(
    ("values", "updates"),
    [
        ({}, 1),
        ({"num_steps_per_rollout": 3}, 3),
        ({"rollout_batch_size": 8, "n_samples_per_prompt": 2, "global_batch_size": 4}, 4),
        ({"rollout_batch_size": 8, "use_dynamic_global_batch_size": True}, 1),
    ],
)
def test_updates_of_an_iteration(values: dict[str, Any], updates: int):
    assert settings(**values).updates_per_iteration == updates


def test_flags_and_the_environment_of_torchrun(monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    argv = [
        "--hf-checkpoint",
        "m",
        "--disable-rewards-normalization",
        "--buffer-address",
        "a:1",
        "--rollout-address",
        "b:2",
    ]
    trainer, place = parse(argv, TrainerSettings, PlaceSettings, prog="t", description="")
    assert trainer.rewards_normalization is False
    assert (place.rank, place.world_size, place.master_address) == (1, 2, "127.0.0.1:29500")
    monkeypatch.setenv("MASTER_PORT", "99999")
    with pytest.raises(InvalidSetting, match="MASTER_ADDR:MASTER_PORT must be HOST:PORT"):
        parse(argv, TrainerSettings, PlaceSettings, prog="t", description="")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(InvalidSetting, match="RANK"):
        parse(argv, TrainerSettings, PlaceSettings, prog="t", description="")


SERVE = "serve --hf-checkpoint m --buffer-address a:1 --rollout-address b:2".split()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--hf-checkpoint", "m", "--lrr", "1"], "did you mean --lr"),
        (["serve", "--hf-checkpoint", "m"], "--buffer-address is required"),
        (
            [*SERVE, "--tensor-model-parallel-size", "2"],
            "--tensor-model-parallel-size 2 requires --train-backend megatron",
        ),
        ([*SERVE, "--train-backend", "megatron", "--fp4-format", "e2m1"], "--fp4-format is not supported yet"),
        ([*SERVE, "--rollout-address", "b:99999"], "--rollout-address must be HOST:PORT with a port"),
        ([*SERVE, "--master-address", "c"], "--master-address must be HOST:PORT"),
        ([*SERVE, "--train-backend", "megatron", "--num-layers", "0"], "--num-layers must be at least 1, got 0"),
        ([*SERVE, "--async-save"], "--async-save requires --train-backend megatron"),
        (["sevre"], "error: unknown command 'sevre'; did you mean serve?"),
        ([], "error: a command is required: one of serve; see --help"),
    ],
)
def test_wrong_command_lines_exit_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


def test_importing_is_light():
    code = (
        "import sys, slime.trainer, slime.trainer.settings.trainer, slime.trainer.cli\n"
        "print([m for m in ('torch', 'transformers', 'ray') if m in sys.modules])"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    assert done.stdout.strip() == "[]"


def test_bfloat16_is_what_gpus_compute_in_unless_a_flag_says_otherwise():
    given = {None: (True, False), True: (True, True), False: (False, False)}
    for bf16, expected in given.items():
        settings = TrainerSettings(hf_checkpoint="m", bf16=bf16)
        assert (settings.on("cuda").bf16, settings.on("cpu").bf16) == expected
    assert TrainerSettings(hf_checkpoint="m").on("cuda").wire_dtype == "bfloat16"


CORRECTED = {"use_tis": True}


@pytest.mark.parametrize(
    "values, asynchronous, named",
    [
        ({"use_kl_loss": True, "kl_loss_coef": 0.1}, False, ["--kl-loss-type k1", "--kl-loss-type k2"]),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True}, False, []),
        ({"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k2"}, False, []),
        ({"use_kl_loss": True}, False, []),
        ({"advantage_estimator": "cispo"}, False, ["cispo with --eps-clip 0.2", "below 0.8", "--eps-clip 1"]),
        ({"advantage_estimator": "cispo", "eps_clip": 1.0}, False, []),
        ({}, True, ["train-async", "--use-tis", "--keep-old-actor"]),
        (CORRECTED, True, []),
        ({"use_opsm": True}, False, ["--use-opsm drops nothing"]),
        ({"use_opsm": True, "rollout_batch_size": 4, "global_batch_size": 4}, False, ["--use-opsm drops nothing"]),
        ({"use_opsm": True, "rollout_batch_size": 4, "global_batch_size": 2}, False, []),
        ({"use_opsm": True, "num_steps_per_rollout": 2}, False, []),
        ({"use_opsm": True, "use_rollout_logprobs": True}, False, []),
    ],
)
def test_settings_that_are_probably_not_meant_are_warned_about(
    values: dict[str, Any], asynchronous: bool, named: list[str]
):
    warnings = list(advice(TrainerSettings(hf_checkpoint="unused", **values), asynchronous=asynchronous))
    assert len(warnings) == bool(named)
    assert all(name in warnings[0] for name in named)


CACHED = "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/" + 40 * "a"


@pytest.mark.parametrize(
    "saved, base, warned",
    [
        ("/models/tiny", "/models/tiny", False),
        ("/models/tiny", "/models/other", True),
        ("/models/tiny", "/moved/Tiny/", False),
        ("Qwen/Qwen3-0.6B", CACHED, False),
        (CACHED, CACHED.replace("a" * 40, "b" * 40), False),
        ("Qwen/Qwen3-0.6B", CACHED.replace("0.6B", "0.6B-Base"), True),
        ("Qwen/Qwen3-0.6B", "/models/Qwen3-0.6B", False),
        (None, "/models/tiny", False),
    ],
)
def test_an_adapter_of_another_model_is_warned_about(saved: str | None, base: str, warned: bool, tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": saved}))
    sentences = list(advice(TrainerSettings(hf_checkpoint=base, load=str(tmp_path), lora_rank=4)))
    assert len(sentences) == warned
    expected = f"--load {tmp_path} has a LoRA adapter of {saved}, and --hf-checkpoint is {base}"
    assert all(sentence.startswith(expected) for sentence in sentences)


def test_an_adapter_names_its_model_as_the_hub_does():
    about = json.loads(AdapterConfig(CACHED, 4, 8.0, ("q_proj",)).as_json())
    assert (about["base_model_name_or_path"], about["revision"]) == ("Qwen/Qwen3-0.6B", 40 * "a")
    about = json.loads(AdapterConfig("/models/tiny", 4, 8.0, ("q_proj",)).as_json())
    assert (about["base_model_name_or_path"], about["revision"]) == ("/models/tiny", None)


@pytest.mark.parametrize(
    "values, first, second",
    [
        ({"advantage_estimator": "cispo", "eps_clip_c": 3.0}, "--eps-clip-c 3.0", "--advantage-estimator cispo"),
        ({"tis_mode": "token_mask"}, "--tis-mode token_mask", "--use-tis"),
        (
            {"tis_mode": "token_mask", "use_tis": True, "custom_tis_function_path": "a.b"},
            "--tis-mode token_mask", "--custom-tis-function-path",
        ),
        ({"tis_mode": "truncate", "use_tis": True}, "--tis-mode truncate", "--custom-tis-function-path"),
    ],
)  # fmt: skip
def test_corrections_that_would_be_ignored_are_refused(values: dict[str, Any], first: str, second: str):
    with pytest.raises(InvalidSetting, match=f"{first} (requires|and) {second}"):
        TrainerSettings(hf_checkpoint="unused", **values)
