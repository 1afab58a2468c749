"""On-policy distillation against float64, with a teacher in the trainer and with its log-probs in the samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_float64 import load64, reference_log_probs
from trainer_tiny import Runner, make_samples, make_settings, train_data

from slime.trainer.batching.packing import check_teacher
from slime.trainer.step.train_data import converted
from slime.types.errors import InvalidField, InvalidSetting

BACKENDS = ("fsdp", "megatron")


def distilled(model: str, teacher: str, **values: Any) -> Any:
    return make_settings(model, use_opd=True, opd_type="trainer", opd_teacher_load=teacher, **values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("values", [{}, {"use_rollout_logprobs": True, "eps_clip": 10.0}, {"opd_kl_coef": 0.3}])
def test_loss_and_gradient_are_those_of_the_formula(
    model: str, reference_model: str, backend: str, values: dict[str, Any]
):
    """Without rewards, so that the teacher alone makes the advantages."""
    s = distilled(model, reference_model, train_backend=backend, **values)
    samples, policy, teacher = make_samples(), load64(model), load64(reference_model)
    random, loss, difference = np.random.default_rng(0), torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        sample.reward = 1.0
        log_probs = reference_log_probs(policy, sample)
        with torch.no_grad():
            of_teacher = reference_log_probs(teacher, sample)
        present = log_probs.detach().numpy()
        sample.rollout_log_probs = (present + random.normal(0, 0.1, len(present))).astype(np.float32)
        engine = torch.tensor(np.asarray(sample.rollout_log_probs)).double()
        old = engine if s.use_rollout_logprobs else log_probs.detach()
        mask = torch.tensor(np.asarray(sample.loss_mask)).double()
        advantage = -s.opd_kl_coef * (old - of_teacher)
        loss = loss - (advantage * (log_probs - old).exp() * mask).sum() / mask.sum() / len(samples)
        difference += float(((old - of_teacher) * mask).sum() / mask.sum()) / len(samples)
    loss.backward()
    norm = sum(float((p.grad**2).sum()) for p in policy.parameters() if p.grad is not None) ** 0.5
    metrics = Runner(s).run(0, samples)
    assert metrics["train/loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm, rel=2e-5)
    assert metrics["train/opd_reverse_kl"] == pytest.approx(difference, rel=1e-5)
    assert metrics["train/skipped_samples"] == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_teacher_in_the_trainer_and_one_behind_an_engine_are_one(model: str, reference_model: str, backend: str):
    values: dict[str, Any] = {"train_backend": backend, "num_steps_per_rollout": 2, "normalize_advantages": True}
    inside = Runner(distilled(model, reference_model, **values))
    samples, teacher = make_samples(), load64(reference_model)
    with torch.no_grad():
        for sample in samples:
            sample.teacher_log_probs = reference_log_probs(teacher, sample).float().numpy()
    outside = Runner(make_settings(model, use_opd=True, opd_type="sglang", **values))
    mine, theirs = inside.run(0, make_samples()), outside.run(0, samples)
    for name in ("train/loss", "train/grad_norm", "train/opd_reverse_kl"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-6), name


def test_a_teacher_that_is_the_policy_changes_nothing(model: str):
    plain, distilling = Runner(make_settings(model)).run(), Runner(distilled(model, model)).run()
    assert distilling["train/opd_reverse_kl"] == pytest.approx(0, abs=1e-6)
    assert distilling["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-4)


def test_the_policy_moves_towards_the_teacher(model: str, reference_model: str):
    runner, samples = Runner(distilled(model, reference_model, lr=1e-2, weight_decay=0.0)), make_samples()
    for sample in samples:
        sample.reward = 0.0
    seen = [runner.run(step, samples)["train/opd_reverse_kl"] for step in range(6)]
    assert abs(seen[-1]) < abs(seen[0]) / 2


def test_a_sample_without_log_probs_of_the_teacher_is_named(model: str):
    runner, samples = Runner(make_settings(model, use_opd=True, opd_type="sglang")), make_samples()
    with pytest.raises(InvalidField, match="teacher_log_probs.*reward_func sets them .sample 0."):
        runner.run(0, samples)


def test_a_removed_sample_needs_no_log_probs_of_the_teacher(model: str):
    """Also where every sample is fed: it may have failed before the teacher saw it."""
    runner = Runner(make_settings(model, use_opd=True, opd_type="sglang", use_rollout_entropy=True))
    samples = make_samples()
    for sample in samples[1:]:
        sample.teacher_log_probs = np.zeros(sample.response_length, np.float32)
    samples[0].remove_sample, samples[0].reward = True, None
    assert runner.run(0, samples)["train/grad_norm"] > 0


def test_converted_samples_bring_the_log_probs_of_their_teacher():
    samples = make_samples()
    made = [np.arange(sample.response_length) - 9.0 for sample in samples]
    data = converted(train_data(samples) | {"teacher_log_probs": made}, samples)
    for sample, log_probs in zip(data.samples, made, strict=True):
        check_teacher(sample)
        assert sample.array("teacher_log_probs").tolist() == log_probs.tolist()
    with pytest.raises(InvalidField, match="teacher_log_probs.*0.*response_lengths.0."):
        converted(train_data(samples) | {"teacher_log_probs": [part[1:] for part in made]}, samples)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"use_opd": True}, "--use-opd requires --opd-type sglang or --opd-type trainer"),
        ({"use_opd": True, "opd_type": "megatron"}, "--opd-type megatron requires --opd-teacher-load DIR"),
        (
            {"use_opd": True, "opd_type": "sglang", "loss_type": "sft_loss"},
            "--use-opd and --loss-type sft_loss",
        ),
        ({"opd_type": "sglang"}, "--opd-type sglang requires --use-opd"),
        ({"opd_kl_coef": 0.5}, "--opd-kl-coef 0.5 requires --use-opd"),
        (
            {"use_opd": True, "opd_type": "sglang", "opd_teacher_load": "a"},
            "--opd-teacher-load a requires --opd-type trainer",
        ),
    ],
)
def test_settings_that_do_not_fit(model: str, values: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        make_settings(model, **values)


def test_a_teacher_of_another_vocabulary_is_refused(model: str, tmp_path: Path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    config.vocab_size -= 1
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(InvalidSetting, match="--opd-teacher-load must be a model that knows the policy's 32 tokens"):
        Runner(distilled(model, str(tmp_path)))


def test_one_sample_per_prompt_is_enough(model: str, reference_model: str):
    from slime.trainer.settings.checks import refuse_groups_of_one

    refuse_groups_of_one(distilled(model, reference_model, n_samples_per_prompt=1))
    with pytest.raises(InvalidSetting, match="every advantage would be 0"):
        refuse_groups_of_one(make_settings(model, n_samples_per_prompt=1))
