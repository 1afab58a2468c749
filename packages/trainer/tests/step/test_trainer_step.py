"""Training steps on one rank, against float64 references with one forward pass per sample."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_float64 import load64, reference_log_probs
from trainer_tiny import VOCAB, Runner, make_samples, make_settings
from transformers import GPT2Config, GPT2LMHeadModel

from slime.trainer.backends.base import NonFiniteGradient
from slime.trainer.batching.packing import pack
from slime.types.errors import InvalidField, InvalidFile, MissingFile


def grpo_rewards(samples: list[Any]) -> list[float]:
    out = []
    for s in samples:
        group = [x.reward for x in samples if x.group_index == s.group_index]
        out.append((s.reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6))
    return out


@pytest.mark.parametrize("share", [True, False])
def test_packed_equals_separate(model: str, share: bool):
    runner, reference, samples = Runner(make_settings(model, rollout_temperature=0.8)), load64(model), make_samples()
    n = len(samples)
    batch = pack(samples, range(n), [0.0] * n, [1.0] * n, share_prompts=share, device=runner.backend.device)
    (got,) = runner.backend.log_probs([batch])
    expected = torch.cat([reference_log_probs(reference, s, 0.8) for s in samples])
    torch.testing.assert_close(got.double().cpu(), expected * batch.mask.cpu(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_tokens_per_gpu": 10},
        {"use_dynamic_batch_size": False, "micro_batch_size": 2},
        {"calculate_per_token_loss": True},
        {"use_rollout_logprobs": True, "eps_clip": 0.2, "eps_clip_high": 0.3},
        {"entropy_coef": 0.01},
        {"log_probs_chunk_size": 3, "gradient_checkpointing": True},
    ],
)
def test_a_grpo_step_equals_its_float64_reference(model: str, settings: dict[str, Any]):
    s = make_settings(model, **settings)
    runner, samples, reference = Runner(s), make_samples(), load64(model)
    metrics = runner.run(0, samples)

    rewards, loss, num_tokens = grpo_rewards(samples), 0.0, sum(sum(x.loss_mask) for x in samples)
    for sample, reward in zip(samples, rewards, strict=True):
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        tokens = torch.tensor(sample.tokens, dtype=torch.int64)
        log_probs = reference_log_probs(reference, sample)
        old = torch.tensor(sample.rollout_log_probs).double() if s.use_rollout_logprobs else log_probs.detach()
        ratio = (log_probs - old).exp()
        high = 1 + (s.eps_clip if s.eps_clip_high is None else s.eps_clip_high)
        token_loss = torch.maximum(-ratio * reward, -ratio.clamp(1 - s.eps_clip, high) * reward)
        if s.entropy_coef:
            all_log_probs = reference(input_ids=tokens[None]).logits[0].log_softmax(-1)
            entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)[:-1][len(tokens) - 1 - sample.response_length :]
            token_loss = token_loss - s.entropy_coef * entropy
        weight = 1 / num_tokens if s.calculate_per_token_loss else 1 / (len(samples) * mask.sum())
        loss = loss + weight * (mask * token_loss).sum()
    loss.backward()
    decay = [p for p in reference.parameters() if p.ndim >= 2], [p for p in reference.parameters() if p.ndim < 2]
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    torch.optim.AdamW(
        [{"params": decay[0], "weight_decay": 0.1}, {"params": decay[1], "weight_decay": 0.0}], lr=1e-2
    ).step()

    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=2e-6)
    assert metrics["train/grad_norm"] == pytest.approx(float(norm), rel=1e-4)
    assert metrics["train/skipped_samples"] == (0 if s.entropy_coef else 4)
    expected = dict(reference.named_parameters())
    for name, weight in runner.weights().items():
        # One Adam step moves a weight by lr * sign(g): where g is about 0, float32 may not know its sign.
        off = (weight.double() - expected[name]).abs() > 1e-4
        assert off.float().mean() < 0.005, name


@pytest.mark.parametrize(
    "settings",
    [
        {"advantage_estimator": "gspo", "num_steps_per_rollout": 2},
        {"advantage_estimator": "cispo", "eps_clip": 1.0, "num_steps_per_rollout": 3},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "kl_coef": 0.1, "gamma": 0.9},
        {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True, "kl_coef": 0.1},
        {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "use_unbiased_kl": True},
        {"use_tis": True, "tis_clip": 1.5, "use_opsm": True, "eps_clip_c": 3.0, "num_steps_per_rollout": 2},
        {"loss_type": "sft_loss", "compute_advantages_and_returns": False},
    ],
)
def test_how_the_work_is_cut_changes_nothing(model: str, reference_model: str, settings: dict[str, Any]):
    runs = []
    for cut in ({}, {"use_dynamic_batch_size": False, "micro_batch_size": 1}, {"max_tokens_per_gpu": 13}):
        runner = Runner(make_settings(model, ref_load=reference_model, **settings, **cut))
        runs.append(({k: v for k, v in runner.run().items() if k.startswith("train/")}, runner.weights()))
    (metrics, weights), others = runs[0], runs[1:]
    for other, other_weights in others:
        for name, value in metrics.items():
            if name != "train/micro_batches":
                assert other[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name
        for name, weight in weights.items():
            assert ((weight - other_weights[name]).abs() > 1e-3).float().mean() < 0.01, name


def test_a_run_is_told_once_that_it_computes_prompts_again_for_each_sample(
    model: str, caplog: pytest.LogCaptureFixture
):
    samples = make_samples()
    for sample in samples:
        prompt = sample.tokens[: len(sample.tokens) - sample.response_length]
        sample.tokens = [*(prompt * 4), *sample.tokens[len(prompt) :]]
    fixed = {"use_dynamic_batch_size": False, "micro_batch_size": 1}
    for cut, told in ({}, 0), ({"use_dynamic_batch_size": False, "micro_batch_size": 12}, 0), (fixed, 1):
        runner = Runner(make_settings(model, **cut))
        # Samples of equal rewards are skipped: the first step computes nothing.
        runner.run(0, [replace(sample, reward=1.0) for sample in samples])
        for step in (1, 2):
            runner.run(step, samples)
        assert caplog.text.count("times the tokens that are needed") == told, cut


def test_a_reference_equal_to_the_policy_has_no_divergence(model: str):
    metrics = Runner(make_settings(model, use_kl_loss=True, kl_loss_coef=0.1)).run()
    assert metrics["train/kl_loss"] == pytest.approx(0, abs=1e-7)


def test_the_second_update_of_a_rollout_is_off_policy(model: str):
    metrics = Runner(make_settings(model, num_steps_per_rollout=3, lr=3e-2)).run()
    assert metrics["train/ppo_kl"] != 0.0
    assert metrics["train/step"] == 3


def test_a_step_without_any_gradient(model: str):
    samples = make_samples()
    for sample in samples:
        sample.reward = 1.0
    runner = Runner(make_settings(model, weight_decay=0.0))
    before = runner.weights()
    metrics = runner.run(0, samples)
    assert (metrics["train/loss"], metrics["train/grad_norm"], metrics["train/skipped_samples"]) == (0.0, 0.0, 12)
    assert all(torch.equal(before[name], weight) for name, weight in runner.weights().items())


def test_training_raises_the_likelihood_of_what_was_rewarded(model: str):
    runner, samples = Runner(make_settings(model, weight_decay=0.0)), make_samples()
    good = [s for s in samples if s.reward == 2.0]
    ones = [1.0] * len(good)
    batch = pack(good, range(len(good)), ones, ones, device=runner.backend.device)
    before = runner.backend.log_probs([batch])[0].sum()
    for _ in range(5):
        runner.run(0, samples)
    assert runner.backend.log_probs([batch])[0].sum() > before + 1


def test_bf16_computes_about_the_same(model: str):
    exact, rough = Runner(make_settings(model)).run(), Runner(make_settings(model, bf16=True)).run()
    assert rough["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.05)


def test_plugins_take_part(model: str, tmp_path: Any):
    file = tmp_path / "plugins.py"
    file.write_text(
        "import torch\n"
        "def advantages(args, rollout_data):\n"
        "    rollout_data['advantages'] = [torch.full_like(m, args.lr) for m in rollout_data['loss_masks']]\n"
        "def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):\n"
        "    return pg_loss * 0.5, loss_masks, {'mine': torch.cat(rollout_log_probs)}\n"
        "def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    return lambda x: x.sum() * 0.0 + 3.0\n"
    )
    metrics = Runner(make_settings(model, custom_advantage_function_path=f"{file}:advantages")).run()
    assert metrics["train/pg_loss"] == pytest.approx(-1e-2)
    metrics = Runner(make_settings(model, use_tis=True, custom_tis_function_path=f"{file}:tis")).run()
    assert metrics["train/mine"] < -1
    one_row = make_settings(model, custom_pg_loss_reducer_function_path=f"{file}:reducer", max_tokens_per_gpu=10**6)
    assert Runner(one_row).run()["train/pg_loss"] == pytest.approx(3.0 / 12)


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
@pytest.mark.parametrize("reduced", [False, True])
def test_masks_that_a_correction_returns_reach_the_reducer(model: str, tmp_path: Path, backend: str, reduced: bool):
    file = tmp_path / "plugins.py"
    file.write_text(
        "import torch\n"
        "def nothing(args, *, pg_loss, loss_masks, **kwargs):\n"
        "    return pg_loss, [mask * 0 for mask in loss_masks], {}\n"
        "def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    mask = torch.cat(list(loss_masks))\n"
        "    return lambda x: (x * mask).sum() / 12\n"
    )
    values: dict[str, Any] = {"train_backend": backend}
    if reduced:
        values["custom_pg_loss_reducer_function_path"] = f"{file}:reducer"
    assert Runner(make_settings(model, **values)).run()["train/grad_norm"] > 0.1
    rejecting = make_settings(model, use_tis=True, custom_tis_function_path=f"{file}:nothing", **values)
    assert Runner(rejecting).run()["train/grad_norm"] == 0.0


def test_errors_name_what_was_wrong(model: str, tmp_path: Any):
    with pytest.raises(MissingFile, match="--hf-checkpoint"):
        Runner(make_settings(str(tmp_path / "none")))
    with pytest.raises(InvalidFile, match="config.json"):
        Runner(make_settings(str(tmp_path)))
    samples = make_samples()
    samples[3].rollout_log_probs = None
    with pytest.raises(InvalidField, match="sample 3"):
        Runner(make_settings(model, use_tis=True)).run(0, samples)


BACKENDS = ("fsdp", "megatron")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_log_prob_that_is_far_off_leaves_the_update_finite(model: str, backend: str):
    samples = make_samples()
    samples[0].rollout_log_probs[0] = -120.0
    samples[1].rollout_log_probs[0] = float("-inf")
    for values in ({"use_rollout_logprobs": True}, {"use_tis": True}, {"use_tis": True, "tis_mode": "sequence_mask"}):
        metrics = Runner(make_settings(model, train_backend=backend, **values)).run(0, samples)
        assert 0 < metrics["train/grad_norm"] < math.inf


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_is_not_finite_leaves_the_weights_and_is_named(model: str, backend: str):
    settings = make_settings(model, use_rollout_logprobs=True, train_backend=backend)
    runner, samples = Runner(settings), make_samples()
    before = runner.weights()
    samples[1].rollout_log_probs[0] = math.nan
    with pytest.raises(NonFiniteGradient) as raised:
        runner.run(0, samples)
    assert "sample 1 (micro-batch 0) has old log-probs that are not finite" in str(raised.value)
    assert "gradient of " in str(raised.value) and ".weight" in str(raised.value)
    assert all(torch.equal(before[name], weight) for name, weight in runner.weights().items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_updates_that_are_not_finite_can_be_skipped(model: str, backend: str, caplog: pytest.LogCaptureFixture):
    values = {"use_rollout_logprobs": True, "train_backend": backend, "num_steps_per_rollout": 3}
    skipping, samples = Runner(make_settings(model, skip_nonfinite_updates=True, **values)), make_samples()
    metrics = skipping.run(0, samples)
    assert metrics["train/nonfinite_updates"] == 0
    after = skipping.weights()
    for sample in samples:
        sample.rollout_log_probs[0] = math.nan
    updates = skipping.backend.updates
    metrics = skipping.run(1, samples)
    # The third update's group has equal rewards and no sample with a gradient.
    assert (metrics["train/nonfinite_updates"], skipping.backend.updates) == (2, updates + 1)
    assert all(math.isfinite(value) for value in metrics.values())
    assert "sample 1 (micro-batch 0) has old log-probs" in caplog.text
    whole = make_settings(model, skip_nonfinite_updates=True, **values | {"num_steps_per_rollout": 1})
    skipping = Runner(whole)
    before = skipping.weights()
    assert skipping.run(0, samples)["train/nonfinite_updates"] == 1
    assert all(torch.equal(before[name], weight) for name, weight in skipping.weights().items())
    assert any(not torch.equal(before[name], weight) for name, weight in after.items())


HEALTH = [
    {},
    {"use_rollout_logprobs": True, "num_steps_per_rollout": 4, "use_opsm": True},
    {"use_tis": True, "num_steps_per_rollout": 2, "tis_clip": 1.1},
    {"advantage_estimator": "cispo", "num_steps_per_rollout": 2, "calculate_per_token_loss": True},
    {"advantage_estimator": "gspo", "num_steps_per_rollout": 2, "eps_clip": 1e-3},
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("values", HEALTH)
def test_metrics_do_not_depend_on_which_samples_are_skipped(
    model: str, tmp_path: Path, backend: str, values: dict[str, Any]
):
    (tmp_path / "hook.py").write_text("def keep(args, rollout_id, rollout_data):\n    pass\n")
    samples = make_samples(groups=4)
    for sample in samples[4:8]:
        sample.reward = 0.0
    samples[1].remove_sample = True
    found = []
    # A function that may change advantages forces every sample to be fed, and old log-probs to be computed.
    for hook in (None, f"{tmp_path}/hook.py:keep"):
        settings = make_settings(model, train_backend=backend, rollout_data_postprocess_path=hook, lr=1e-3, **values)
        found.append(Runner(settings).run(0, samples))
    skipping, feeding = found
    assert (skipping["train/skipped_samples"], feeding["train/skipped_samples"]) == (9, 0)
    names = {name for name in feeding if name.startswith("train/")}
    assert names == {name for name in skipping if name.startswith("train/")}
    for name in names - {"train/skipped_samples", "train/micro_batches"}:
        assert skipping[name] == pytest.approx(feeding[name], rel=1e-4, abs=1e-6), name
    assert skipping["train/entropy_loss"] > 0


def test_the_clip_fraction_is_of_all_samples(model: str):
    """4 of 12 samples have no advantage and are not clipped; computed by hand from the engine's log-probs."""
    samples, reference, clipped = make_samples(), load64(model), 0.0
    for sample, reward in zip(samples, grpo_rewards(samples), strict=True):
        with torch.no_grad():
            ratio = (reference_log_probs(reference, sample) - torch.tensor(sample.rollout_log_probs).double()).exp()
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        outside = ((ratio > 1.2) if reward > 0 else (ratio < 0.8)) & (reward != 0)
        clipped += float((outside * mask).sum() / mask.sum())
    metrics = Runner(make_settings(model, use_rollout_logprobs=True)).run(0, samples)
    assert metrics["train/pg_clipfrac"] == pytest.approx(clipped / len(samples), rel=1e-6)


@pytest.mark.parametrize("values", [{}, {"use_rollout_logprobs": True}, {"entropy_coef": 1e-9}])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_mismatch_is_that_of_the_policy_before_the_first_update(model: str, values: dict[str, Any], steps: int):
    """Over the tokens whose log-probs the engine told, however the samples are cut."""
    samples, reference = make_samples(), load64(model)
    total, tokens = [0.0] * steps, [0.0] * steps
    if not values:
        for sample in samples[::2]:
            sample.rollout_log_probs = None
    for i, (sample, reward) in enumerate(zip(samples, grpo_rewards(samples), strict=True)):
        if sample.rollout_log_probs is None or (reward == 0 and not values.get("entropy_coef")):
            continue
        with torch.no_grad():
            engine = torch.tensor(sample.rollout_log_probs).double()
            difference = (reference_log_probs(reference, sample) - engine).abs()
        mask = torch.tensor(sample.loss_mask, dtype=torch.float64)
        update = i * steps // len(samples)
        total[update] += float((difference * mask).sum() / mask.sum())
        tokens[update] += 1.0
    expected = [t / w for t, w in zip(total, tokens, strict=True) if w]
    if "use_rollout_logprobs" in values:
        # Nothing else needs the policy's log-probs before the first update, and in that they are the policy's.
        expected = expected[:1]
    for cut in ({}, {"max_tokens_per_gpu": 8}):
        metrics = Runner(make_settings(model, num_steps_per_rollout=steps, **values, **cut)).run(0, samples)
        found = metrics["train/train_rollout_logprob_abs_diff"]
        assert found == pytest.approx(statistics.fmean(expected), rel=1e-5)


DROPOUT = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}


def write_gpt2(path: Path, **values: Any) -> str:
    """A GPT-2 with dropout wherever it can have it."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.3, bos_token_id=0,
        eos_token_id=1, **values,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(path)
    return str(path)


def test_recomputation_changes_no_number_of_a_model_with_dropout(tmp_path: Path):
    directory = write_gpt2(tmp_path, **DROPOUT)
    values = {"num_steps_per_rollout": 2, "lr": 1e-30, "weight_decay": 0.0}
    plain, again = (Runner(make_settings(directory, gradient_checkpointing=on, **values)) for on in (False, True))
    expected, got = plain.run(), again.run()
    assert any(getattr(module, "gradient_checkpointing", False) for module in again.backend.policy.modules())
    assert got["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    for name in ("train/loss", "train/grad_norm", "train/entropy_loss"):
        assert got[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-7), name


def test_recomputation_recomputes(tmp_path: Path):
    runner = Runner(make_settings(write_gpt2(tmp_path), gradient_checkpointing=True))
    calls = []
    runner.backend.policy.transformer.h[0].attn.register_forward_pre_hook(lambda *_: calls.append(1))
    metrics = runner.run()
    assert len(calls) == 2 * metrics["train/micro_batches"]
