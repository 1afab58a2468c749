"""PPO's critic: generalized advantages, the value loss, its updates and its checkpoints, against float64 references."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_float64 import load64, reference_log_probs
from trainer_stack import Stack
from trainer_tiny import VOCAB, Runner, alone, make_samples, make_settings, write_model

from slime.trainer.algorithms.advantages import generalized_advantages
from slime.trainer.backends.base import REFERENCE, TRAINING
from slime.trainer.backends.build import open_checkpoints
from slime.trainer.checkpoints.checkpoint import CRITIC_DIR, HuggingFaceCheckpoints, TrainerState, read_state
from slime.trainer.step.critic import clipped_value_loss
from slime.trainer.step.device_memory import DeviceMemory
from slime.types.errors import InvalidSetting

PPO: dict[str, Any] = {"advantage_estimator": "ppo", "gamma": 0.95, "lambd": 0.9}


def serial(reward: float, values: list[float], kl: list[float], mask: list[int], **c: float) -> list[float]:
    """GAE as its recursion is written, from the last action to the first."""
    found, ahead, advantage, bonus = [0.0] * len(values), 0.0, 0.0, reward
    for t in reversed(range(len(values))):
        if mask[t]:
            delta = bonus - c["kl_coef"] * kl[t] + c["gamma"] * ahead - values[t]
            advantage = delta + c["gamma"] * c["lambd"] * advantage
            ahead, bonus, found[t] = values[t], 0.0, advantage
    return found


numbers = st.floats(-3, 3, allow_nan=False)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_advantages_are_those_of_the_recursion(data: Any, gamma: float, lambd: float, kl_coef: float):
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))
    random = np.random.default_rng(data.draw(st.integers(0, 9)))
    rewards, total = random.normal(size=len(lengths)), sum(lengths)
    values, kl, mask = random.normal(size=total), random.normal(size=total), random.integers(0, 2, total)
    coefficients = {"gamma": gamma, "lambd": lambd, "kl_coef": kl_coef}
    found = generalized_advantages(
        torch.tensor(rewards), torch.tensor(values), torch.tensor(kl), torch.tensor(mask).double(), lengths,
        **coefficients,
    )  # fmt: skip
    expected, start = [], 0
    for reward, length in zip(rewards, lengths, strict=True):
        part = slice(start, start + length)
        start += length
        expected += serial(float(reward), *(x[part].tolist() for x in (values, kl, mask)), **coefficients)
    assert found.tolist() == pytest.approx(expected, rel=1e-11, abs=1e-12)


def test_without_discount_and_lambda_advantages_are_reward_minus_value():
    values = torch.tensor([0.3, -0.2, 0.5, 0.1], dtype=torch.float64)
    ones = torch.ones(4, dtype=torch.float64)
    found = generalized_advantages(
        torch.tensor([2.0, -1.0]).double(), values, 0 * ones, ones, [3, 1], kl_coef=0.0, gamma=1.0, lambd=1.0
    )
    assert found.tolist() == pytest.approx([1.7, 2.2, 1.5, -1.1])


@given(numbers, numbers, numbers, st.floats(0, 1))
def test_the_value_loss_is_the_larger_of_two_squares(value: float, old: float, target: float, clip: float):
    tensors = [torch.tensor([x], dtype=torch.float64) for x in (value, old, target)]
    loss, clipped = clipped_value_loss(*tensors, clip)
    near = min(max(value, old - clip), old + clip)
    assert float(loss) == pytest.approx(max((value - target) ** 2, (near - target) ** 2), abs=1e-12)
    assert bool(clipped) == ((near - target) ** 2 > (value - target) ** 2) or abs(near - value) < 1e-9


def write_model_of(path: Path, **values: Any) -> str:
    """A Mistral, whose layers have a window if `values` say so."""
    from transformers import AutoModelForCausalLM, MistralConfig

    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    for name, value in ({"sliding_window": None} | values).items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def head_of(runner: Runner) -> Any:
    if runner.settings.train_backend == "megatron":
        return runner.critic.models[-1].output_layer.weight
    return runner.critic.policy.get_output_embeddings().weight


def with_head(runner: Runner, seed: int = 5) -> Tensor:
    """Gives the critic's head numbers; returns them in float64."""
    head = head_of(runner)
    drawn = 0.3 * torch.randn(head.shape, generator=torch.Generator().manual_seed(seed))
    head.data.copy_(drawn)
    return drawn.double()


def reference_values(model: Any, head: Tensor, sample: Any) -> Tensor:
    """[R] float64: the value of a token is that of the state before it."""
    tokens = torch.tensor(np.asarray(sample.tokens), dtype=torch.int64)
    hidden = model.model(input_ids=tokens[None]).last_hidden_state[0]
    return (hidden @ head[0])[len(tokens) - 1 - sample.response_length : -1]


MEGATRON: dict[str, Any] = {"train_backend": "megatron"}
BOTH = pytest.mark.parametrize("backend", ["fsdp", "megatron"])


@pytest.mark.parametrize("cut", [{}, {"use_dynamic_batch_size": False, "micro_batch_size": 1}, MEGATRON])
@pytest.mark.parametrize("values", [{}, {"kl_coef": 0.1, "kl_loss_type": "k3"}, {"normalize_advantages": True}])
def test_a_step_is_that_of_the_formulas(model: str, reference_model: str, cut: dict[str, Any], values: dict[str, Any]):
    s = make_settings(model, ref_load=reference_model, value_clip=10.0, **PPO, **values, **cut)
    runner, samples = Runner(s), make_samples()
    head = with_head(runner)
    policy, critic, reference = load64(model), load64(model), load64(reference_model)
    weight = torch.nn.Parameter(head)
    advantages, returns, predicted, masks = [], [], [], []
    for sample in samples:
        value = reference_values(critic, weight, sample)
        with torch.no_grad():
            delta = reference_log_probs(policy, sample) - reference_log_probs(reference, sample)
        kl = ((-delta).exp() - 1 + delta).tolist()
        mask = [int(m) for m in sample.loss_mask]
        found = serial(
            float(sample.reward), value.tolist(), kl, mask, gamma=s.gamma, lambd=s.lambd, kl_coef=s.kl_coef
        )  # fmt: skip
        advantages.append(torch.tensor(found, dtype=torch.float64))
        predicted.append(value)
        returns.append(advantages[-1] + value.detach())
        masks.append(torch.tensor(mask, dtype=torch.float64))
    trained = torch.cat(masks) > 0
    all_returns, errors = torch.cat(returns)[trained], (torch.cat(returns) - torch.cat(predicted).detach())[trained]
    if s.normalize_advantages:
        flat = torch.cat(advantages)[trained]
        advantages = [(a - flat.mean()) / (flat.var() + 1e-8).sqrt() for a in advantages]

    def mean(of_samples: list[Tensor]) -> Tensor:
        return torch.stack([(x * m).sum() / m.sum() for x, m in zip(of_samples, masks, strict=True)]).mean()

    loss = mean([-a * reference_log_probs(policy, x) for a, x in zip(advantages, samples, strict=True)])
    loss.backward()
    value_loss = mean([(v - r) ** 2 for v, r in zip(predicted, returns, strict=True)])
    value_loss.backward()
    metrics = runner.run(0, samples)

    def norm(*parameters: Any) -> float:
        return sum(float((p.grad**2).sum()) for p in parameters if p.grad is not None) ** 0.5

    assert metrics["train/grad_norm"] == pytest.approx(norm(*policy.parameters()), rel=2e-5)
    assert metrics["train/loss"] == pytest.approx(-float(mean(advantages)), rel=1e-5, abs=2e-6)
    assert metrics["train/critic-value_loss"] == pytest.approx(float(value_loss), rel=1e-5)
    assert metrics["train/critic-grad_norm"] == pytest.approx(norm(weight, *critic.model.parameters()), rel=2e-5)
    explained = 1 - float(errors.var(unbiased=False) / all_returns.var(unbiased=False))
    assert metrics["train/critic-explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert metrics["train/skipped_samples"] == 0 and metrics["train/critic-value_clipfrac"] == 0


@BOTH
def test_values_are_learned_and_later_updates_are_clipped(model: str, backend: str):
    runner = Runner(make_settings(model, train_backend=backend, critic_lr=3e-2, num_steps_per_rollout=3, **PPO))
    seen = [runner.run(step, make_samples(0)) for step in range(8)]
    assert seen[0]["train/critic-explained_variance"] == 0, "the values are 0 before the first update"
    assert seen[-1]["train/critic-explained_variance"] > 0.3
    assert seen[-1]["train/critic-value_loss"] < seen[0]["train/critic-value_loss"] / 2
    assert 0 < seen[0]["train/critic-value_clipfrac"] < 1
    assert seen[0]["train/critic-lr-pg_0"] == 3e-2 and seen[0]["train/lr-pg_0"] == 1e-2


@BOTH
def test_the_policy_waits_for_the_critic(model: str, backend: str):
    runner = Runner(
        make_settings(model, train_backend=backend, num_critic_only_steps=2, critic_lr_warmup_iters=4, **PPO)
    )
    before = runner.weights()
    rates = [runner.run(step)["train/critic-lr-pg_0"] for step in range(2)]
    assert rates == pytest.approx([2.5e-3, 5e-3])
    assert all(torch.equal(before[name], weight) for name, weight in runner.weights().items())
    assert (runner.backend.updates, runner.critic.updates) == (0, 2)
    assert runner.run(2)["train/grad_norm"] > 0
    assert (runner.backend.updates, runner.critic.updates) == (1, 3)


def test_a_critic_sees_samples_whose_reward_is_zero(model: str):
    samples = make_samples()
    for sample in samples:
        sample.reward = 0.0
    runner = Runner(make_settings(model, **PPO))
    with_head(runner)
    assert runner.run(0, samples)["train/critic-grad_norm"] > 0


@BOTH
@pytest.mark.parametrize("tied", [False, True])
def test_a_resumed_run_is_the_same_run(model: str, tied_model: str, tmp_path: Path, tied: bool, backend: str):
    values = PPO | {
        "train_backend": backend,
        "lr_warmup_iters": 3,
        "critic_lr_warmup_iters": 2,
        "num_steps_per_rollout": 2,
    }
    start, path = tied_model if tied else model, tmp_path / "step_1"
    s = make_settings(start, num_critic_only_steps=1, **values)
    straight = Runner(s)

    def checkpoints_of(runner: Runner) -> Any:
        return found.setdefault(id(runner), open_checkpoints(s, runner.backend, alone(), Path(start), runner.critic))

    found: dict[int, Any] = {}
    for step in range(2):
        straight.run(step)
    state = TrainerState(step=1, updates=straight.backend.updates, weight_version=2)
    checkpoints_of(straight).save(path, state)
    checkpoints_of(straight).finish(wait=True)
    assert read_state(str(path)).updates == 2 and read_state(str(path / CRITIC_DIR)).updates == 4
    resumed = Runner(make_settings(start, num_critic_only_steps=1, load=str(path), **values), weights=str(path))
    checkpoints_of(resumed).load(str(path), state)
    assert (resumed.backend.updates, resumed.critic.updates) == (2, 4)
    for step in range(2, 4):
        a, b = straight.run(step), resumed.run(step)
        assert {k: v for k, v in a.items() if k.startswith("train/")} == {
            k: v for k, v in b.items() if k.startswith("train/")
        }
    for mine, theirs in ((straight.backend, resumed.backend), (straight.critic, resumed.critic)):
        weights = dict(theirs.named_weights())
        assert all(torch.equal(weights[name], weight) for name, weight in mine.named_weights())


@BOTH
def test_a_trainer_saves_and_resumes_its_critic(model: str, tmp_path: Path, backend: str):
    """By the calls of a run; the two trainers have nothing but the checkpoint in common."""
    values = PPO | {"train_backend": backend, "num_critic_only_steps": 1, "critic_lr": 2e-2}
    straight, path = Stack(model, **values), str(tmp_path / "step_0")
    try:
        assert straight.client.train_step(0, 3, timeout=60)["train/step"] == 0
        straight.client.save_checkpoint(0, path, timeout=60)
        expected = straight.client.train_step(1, 3, timeout=60)
        resumed = Stack(model, load=path, **values)
        try:
            found = resumed.client.train_step(1, 3, timeout=60)
        finally:
            resumed.close()
    finally:
        straight.close()
    assert expected["train/step"] == 1 and expected["train/critic-grad_norm"] > 0
    assert {k: v for k, v in found.items() if k[0] == "t"} == {k: v for k, v in expected.items() if k[0] == "t"}


def test_a_critic_begins_with_another_model_or_an_earlier_critic(model: str, tmp_path: Path):
    large = write_model(tmp_path / "large", seed=3, layers=3)
    runner = Runner(make_settings(model, critic_load=large, **PPO))
    assert runner.critic.num_parameters > runner.backend.num_parameters
    assert runner.run()["train/critic-grad_norm"] > 0
    path = tmp_path / "saved"
    HuggingFaceCheckpoints(runner.backend, alone(), Path(model), runner.critic).save(path, TrainerState(0, 1))
    again = Runner(make_settings(model, critic_load=str(path / CRITIC_DIR), **PPO))
    weights = dict(runner.critic.named_weights())
    assert all(torch.equal(weights[name], weight) for name, weight in again.critic.named_weights())
    # A checkpoint without a critic leaves it to --critic-load.
    fresh = Runner(make_settings(model, load=model, critic_load=large, **PPO))
    assert not dict(fresh.critic.named_weights())["lm_head.weight"].any()


def set_advantages(args: Any, rollout_data: dict[str, Any]) -> None:
    rollout_data["advantages"] = [torch.zeros(length) for length in rollout_data["response_lengths"]]


def set_returns_too(args: Any, rollout_data: dict[str, Any]) -> None:
    set_advantages(args, rollout_data)
    rollout_data["returns"] = [2 + value for value in rollout_data["values"]]


@pytest.mark.parametrize(("function", "loss"), [(set_advantages, 0.0), (set_returns_too, 4.0)])
def test_a_critic_learns_the_returns_of_a_plug_in_or_its_advantages_plus_values(
    model: str, monkeypatch: pytest.MonkeyPatch, function: Any, loss: float
):
    monkeypatch.setitem(sys.modules, "advantages_of_a_test", SimpleNamespace(function=function))
    runner = Runner(make_settings(model, custom_advantage_function_path="advantages_of_a_test.function", **PPO))
    with_head(runner)
    assert runner.run()["train/critic-value_loss"] == pytest.approx(loss, rel=1e-5, abs=1e-9)


def test_a_critic_of_another_vocabulary_is_refused(model: str, tmp_path: Path):
    small = write_model_of(tmp_path, vocab_size=VOCAB - 1)
    with pytest.raises(InvalidSetting, match="--critic-load must be a model that knows the policy's 32 tokens"):
        Runner(make_settings(model, critic_load=small, **PPO))
    with pytest.raises(InvalidSetting, match="--ref-load must be a model that knows the policy's 32 tokens"):
        Runner(make_settings(model, ref_load=small, use_kl_loss=True))


def test_a_reference_that_the_policy_will_become_has_its_shapes(model: str, reference_model: str, tmp_path: Path):
    values: dict[str, Any] = {"use_kl_loss": True, "ref_update_interval": 2, "bf16": True}
    with pytest.raises(InvalidSetting, match="--ref-update-interval 2 and --ref-load .* cannot be used together"):
        Runner(make_settings(model, ref_load=write_model(tmp_path, layers=3), **values))
    Runner(make_settings(model, ref_load=reference_model, **values)).backend.keep(REFERENCE)


@pytest.mark.parametrize("flag", ["critic_load", "ref_load", "opd_teacher_load"])
def test_rows_have_the_keys_that_any_model_with_a_window_needs(model: str, tmp_path: Path, flag: str):
    values: dict[str, Any] = {
        "critic_load": PPO, "ref_load": {"use_kl_loss": True},
        "opd_teacher_load": {"use_opd": True, "opd_type": "trainer"},
    }[flag]  # fmt: skip
    runner = Runner(make_settings(model, **values, **{flag: write_model_of(tmp_path, sliding_window=3)}))
    samples = make_samples()
    (work,) = runner._step._read(runner.plan(0, samples), lambda positions: (samples[p] for p in positions))
    assert work.batches and all(batch is not None and batch.runs.shared is None for batch in work.batches)


def test_weights_stay_whole_only_where_policy_and_critic_both_fit(model: str, monkeypatch: pytest.MonkeyPatch):
    plain, critic = Runner(make_settings(model)).backend, Runner(make_settings(model, **PPO)).critic
    for backend in (plain, critic):
        # As on two GPUs, of which a third would be taken.
        room = 3 * backend.num_parameters * 12
        backend.settings = dataclasses.replace(backend.settings, bf16=True)
        backend.device = torch.device("cuda")
        backend.ranks = SimpleNamespace(world_size=2, gather=lambda _, room=room: [room, room])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=0))
    assert plain._keeps_weights_whole() and not critic._keeps_weights_whole()
    # A reference and a teacher are whole on each rank too: 4 more bytes a parameter than the 12 of the policy.
    plain.settings = dataclasses.replace(
        plain.settings, use_kl_loss=True, use_opd=True, opd_type="trainer", opd_teacher_load="t"
    )
    assert plain._keeps_weights_whole()
    room = 2 * plain.num_parameters * 15
    plain.ranks = SimpleNamespace(world_size=2, gather=lambda _: [room, room])
    assert not plain._keeps_weights_whole()


@BOTH
def test_the_critics_memory_is_given_back_with_the_optimizers(model: str, backend: str):
    runner = Runner(make_settings(model, train_backend=backend, **PPO))
    runner.run()
    memory = DeviceMemory(runner.backend, runner.critic, enabled=True, device_types=("cpu",))
    before = {name: weight.clone() for name, weight in runner.critic.named_weights()}
    memory.release(TRAINING)
    # Tensors read from a file stay mapped to it on a CPU.
    assert head_of(runner).untyped_storage().nbytes() == 0
    (policy,) = runner.backend.models if backend == "megatron" else (runner.backend.policy,)
    assert all(p.untyped_storage().nbytes() > 0 for p in policy.parameters())
    memory.need(TRAINING)
    assert all(torch.equal(before[name], weight) for name, weight in runner.critic.named_weights())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"critic_lr": 0.1}, "--critic-lr 0.1 requires --advantage-estimator ppo"),
        ({"lambd": 0.9}, "--lambd 0.9 requires --advantage-estimator ppo"),
        ({"num_critic_only_steps": 1}, "--num-critic-only-steps 1 requires --advantage-estimator ppo"),
        (PPO | {"kl_coef": 0.1, "loss_type": "sft_loss"}, "--kl-coef 0.1 and --loss-type sft_loss"),
        (PPO | {"critic_lr": 1e-3, "min_lr": 5e-3}, "--min-lr 0.005 and --critic-lr 0.001"),
        (PPO | {"lr_decay_iters": 3, "critic_lr_warmup_iters": 4}, "--lr-decay-iters 3 and --critic-lr-warmup-iters 4"),
    ],
)
def test_settings_that_do_not_fit(model: str, values: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        make_settings(model, **values)
