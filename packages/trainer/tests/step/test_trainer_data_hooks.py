"""Plug-ins that see and change what is trained on: before its log-probs are known, and after."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainer_stack import Stack
from trainer_tiny import Runner, make_samples, make_settings, train_data

from slime.trainer.batching.packing import PackedBatch, pack
from slime.trainer.batching.plan import unpacked
from slime.trainer.step import rollout_data
from slime.trainer.step.loss import Targets
from slime.trainer.step.targets import Work
from slime.trainer.step.train_data import converted
from slime.types.errors import InvalidField, InvalidSetting

BACKENDS = ("fsdp", "megatron")

POSTPROCESS = """
def double(args, rollout_id, rollout_data):
    assert rollout_id == 3 and args.lr == 0.01
    n = len(rollout_data["tokens"])
    assert all(len(rollout_data[k]) == n for k in ("advantages", "returns", "log_probs", "loss_masks", "rewards",
                                                   "response_lengths", "total_lengths", "sample_indices", "tokens"))
    assert all(len(a) == r for a, r in zip(rollout_data["advantages"], rollout_data["response_lengths"]))
    rollout_data["advantages"] = [2 * a for a in rollout_data["advantages"]]

def mask(args, rollout_id, rollout_data):
    for index, m in zip(rollout_data["sample_indices"], rollout_data["loss_masks"]):
        if index % 2:
            m.zero_()

def unmask(args, rollout_id, rollout_data):
    for m in rollout_data["loss_masks"]:
        m.fill_(1)

def drop(args, rollout_id, rollout_data, number=0.0):
    for i, m in enumerate(rollout_data["loss_masks"]):
        m[0] = 0
        for name in ("advantages", "returns", "log_probs"):
            rollout_data[name][i][0] = number

def drop_broken(args, rollout_id, rollout_data):
    drop(args, rollout_id, rollout_data, float("nan"))

def cut(args, rollout_id, rollout_data):
    rollout_data["advantages"] = [a[:-1] for a in rollout_data["advantages"]]
"""


@pytest.fixture
def plugins(tmp_path: Path) -> str:
    (tmp_path / "plugins.py").write_text(POSTPROCESS)
    return str(tmp_path / "plugins.py")


@pytest.mark.parametrize("backend", BACKENDS)
def test_changed_advantages_are_trained_on(model: str, plugins: str, backend: str):
    common: dict[str, Any] = {"train_backend": backend, "clip_grad": 0.0}
    plain = Runner(make_settings(model, **common)).run(3)
    doubled = Runner(make_settings(model, rollout_data_postprocess_path=f"{plugins}:double", **common)).run(3)
    assert doubled["train/grad_norm"] == pytest.approx(2 * plain["train/grad_norm"], rel=1e-5)
    # Nobody knows beforehand what it would make of samples without an advantage.
    assert (plain["train/skipped_samples"], doubled["train/skipped_samples"]) == (4, 0)


def test_tokens_that_are_masked_add_nothing_and_leave_the_denominators(model: str, plugins: str):
    masked = Runner(make_settings(model, rollout_data_postprocess_path=f"{plugins}:mask")).run(3)
    samples = make_samples(3)
    for sample in samples:
        if sample.index is not None and sample.index % 2:
            sample.remove_sample = True
    removed = Runner(make_settings(model)).run(3, samples)
    assert masked["train/grad_norm"] == pytest.approx(removed["train/grad_norm"], rel=1e-5)
    assert masked["train/pg_loss"] == pytest.approx(removed["train/pg_loss"], rel=1e-5)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_tokens_that_are_masked_may_have_numbers_that_are_not_finite(model: str, plugins: str, estimator: str):
    found = []
    for name in ("drop", "drop_broken"):
        path = f"{plugins}:{name}"
        settings = make_settings(model, rollout_data_postprocess_path=path, advantage_estimator=estimator)
        metrics = Runner(settings).run(3)
        found.append((metrics["train/grad_norm"], metrics["train/pg_loss"]))
    assert found[0] == found[1]


@pytest.mark.parametrize(("name", "field"), [("unmask", "loss_masks"), ("cut", "advantages")])
def test_what_cannot_be_trained_on_is_refused(model: str, plugins: str, name: str, field: str):
    with pytest.raises(InvalidField, match=field):
        Runner(make_settings(model, rollout_data_postprocess_path=f"{plugins}:{name}")).run(3)


CONVERT = """
from trainer_tiny import train_data

def convert(args, samples):
    # Backwards, and without the first of them.
    return train_data(list(samples)[:0:-1])

def wrong(args, samples):
    return {**train_data(samples), "loss_masks": [[1]] * len(samples)}
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_converted_samples_are_planned_and_trained_on(model: str, tmp_path: Path, backend: str):
    (tmp_path / "converting.py").write_text(CONVERT)
    path = f"{tmp_path / 'converting.py'}:convert"
    common: dict[str, Any] = {"train_backend": backend, "rewards_normalization": False}
    stack = Stack(model, custom_convert_samples_to_train_data_path=path, **common)
    try:
        metrics = stack.client.train_step(0, 3, timeout=60)
        plan = unpacked(stack.buffer.plans[0])
    finally:
        stack.close()
    samples = make_samples(0)[:0:-1]
    assert plan["num_samples"] == 11 and plan["lengths"] == [len(s.tokens) for s in samples]
    assert plan["rewards"][:3] == [-1.0, 0.0, 1.0] and plan["raw_rewards"] == [s.reward for s in samples]
    for i, sample in enumerate(samples):
        sample.reward = float(i % 3) - 1.0
    expected = Runner(make_settings(model, grpo_std_normalization=False, **common)).run(0, samples)
    assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-5)


def test_masks_that_are_not_0_or_1_are_refused():
    data = train_data(make_samples())
    mask = [float(value) for value in data["loss_masks"][1]]
    assert converted({**data, "loss_masks": [*data["loss_masks"][:1], mask, *data["loss_masks"][2:]]}, []).samples
    for wrong in (0.5, -1.0, 256.0, float("nan")):
        masks = [*data["loss_masks"][:1], [wrong, *mask[1:]], *data["loss_masks"][2:]]
        with pytest.raises(InvalidField, match=rf"loss_masks.*\[1\]: got {wrong}, expected 0 or 1"):
            converted({**data, "loss_masks": masks}, [])


def test_converted_samples_of_another_form_are_refused(model: str, tmp_path: Path):
    (tmp_path / "converting.py").write_text(CONVERT)
    stack = Stack(model, custom_convert_samples_to_train_data_path=f"{tmp_path / 'converting.py'}:wrong")
    try:
        with pytest.raises(InvalidField, match="loss_masks"):
            stack.client.train_step(0, 3, timeout=60)
    finally:
        stack.close()
    samples = make_samples(0)
    for name in ("tokens", "rewards", "loss_masks"):
        with pytest.raises(InvalidField, match=name):
            converted({k: v for k, v in train_data(samples).items() if k != name}, samples)
    with pytest.raises(InvalidField, match="rollout_ids"):
        converted(train_data(samples) | {"rollout_ids": [1]}, samples)
    with pytest.raises(InvalidField, match="a dictionary"):
        converted([], samples)


def test_a_rollout_of_several_samples_divides_by_what_the_function_says(model: str):
    from slime.trainer.batching.plan import Planner

    samples = make_samples(0)[:4]
    data = converted(train_data(samples) | {"rollout_ids": [0, 0, 1, 1], "rollout_mask_sums": [8, 8, 16, 16]}, samples)
    rewards = (data.raw_rewards, data.rewards)
    plan = Planner(make_settings(model)).plan(0, data.summaries(), rewards, data.rollout_mask_sums)
    assert plan["weights"] == [1 / 16, 1 / 16, 1 / 32, 1 / 32] and plan["num_rollouts"] == 2


def test_what_made_the_tokens_stays_known(model: str):
    samples = make_samples(0)[:2]
    samples[0].weight_versions = ["4"]
    data = converted(train_data(samples), samples)
    assert data.samples[0].weight_versions == ["4"]
    assert np.array_equal(data.samples[1].tokens, samples[1].tokens)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"keep_old_actor": True, "use_rollout_logprobs": True}, "both define the old policy"),
        ({"keep_old_actor": True, "loss_type": "sft_loss"}, "--keep-old-actor"),
        ({"ref_update_interval": 2}, "a reference model"),
        ({"balance_by_flops": True, "use_dynamic_batch_size": False}, "--balance-by-flops"),
        ({"log_probs_max_tokens_per_gpu": 9, "use_dynamic_batch_size": False}, "--log-probs-max-tokens-per-gpu 9"),
        (
            {"use_dynamic_global_batch_size": True, "global_batch_size": 4, "rollout_batch_size": 4},
            "--use-dynamic-global-batch-size and --global-batch-size 4",
        ),
        (
            {"use_dynamic_global_batch_size": True, "num_steps_per_rollout": 2, "rollout_batch_size": 4},
            "--num-steps-per-rollout 2",
        ),
        (
            {"custom_convert_samples_to_train_data_path": "a.b", "custom_reward_post_process_path": "a.c"},
            "converted data already has its training rewards",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], words: str):
    with pytest.raises(InvalidSetting, match=words):
        make_settings("m", **values)
    assert make_settings("m", balance_by_flops=True).balance_data


def test_the_moving_reference_resumes_from_its_own_checkpoints(model: str, tmp_path: Path):
    common: dict[str, Any] = {"use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 2}
    straight = Stack(model, **common)
    paths = [str(tmp_path / f"step_{step}") for step in range(2)]
    try:
        first = straight.client.train_step(0, 3, timeout=60)
        straight.client.save_checkpoint(0, paths[0], timeout=60)
        second = straight.client.train_step(1, 3, timeout=60)
        straight.client.save_checkpoint(1, paths[1], timeout=60)
        third = straight.client.train_step(2, 3, timeout=60)
    finally:
        straight.close()
    assert first["train/kl_loss"] == pytest.approx(0.0, abs=1e-6) != second["train/kl_loss"]
    assert third["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    for path, step, expected in ((paths[0], 1, second), (paths[1], 2, third)):
        resumed = Stack(model, load=path, **common)
        try:
            again = resumed.client.train_step(step, 3, timeout=60)
            assert again["train/kl_loss"] == expected["train/kl_loss"]
        finally:
            resumed.close()
    third_checkpoint = str(tmp_path / "step_2")
    going_on = Stack(model, load=paths[1], **common)
    try:
        going_on.client.train_step(2, 3, timeout=60)
        going_on.client.save_checkpoint(2, third_checkpoint, timeout=60)
    finally:
        going_on.close()
    with pytest.raises(InvalidSetting, match="--ref-update-interval 2 .*without the reference model of iteration 2"):
        Stack(model, load=third_checkpoint, **common)


def test_every_list_that_a_plug_in_may_change_is_read_back(monkeypatch: pytest.MonkeyPatch):
    """A list that is added to OF_BATCH or OF_TARGETS is read back, too, without another line."""

    @dataclasses.dataclass(frozen=True)
    class Batch(PackedBatch):
        sampled_entropies: torch.Tensor | None = None

    monkeypatch.setitem(rollout_data.OF_BATCH, "sampled_entropies", "sampled_entropies")
    samples = make_samples(groups=1, size=2)
    tokens = sum(sample.response_length for sample in samples)
    packed = pack(samples, [0, 1], [1.0, 0.0], [1.0, 1.0])
    batch = Batch(**vars(packed), sampled_entropies=torch.zeros(tokens))
    targets = Targets(**{field: torch.zeros(tokens) for field in rollout_data.OF_TARGETS.values()})
    work = Work([batch], [targets], [batch], dict(enumerate(samples)))
    names = [*rollout_data.OF_TARGETS, *rollout_data.OF_BATCH]

    def plug_in(args: Any, rollout_id: int, data: dict[str, Any]) -> None:
        for number, name in enumerate(names):
            data[name] = [torch.full_like(values, 0.0 if name == "loss_masks" else number) for values in data[name]]

    rollout_data.postprocess(plug_in, None, 0, [work])
    (changed,) = work.batches
    read = [getattr(targets, field) for field in rollout_data.OF_TARGETS.values()]
    read += [getattr(changed, field) for field in rollout_data.OF_BATCH.values()]
    for number, (name, values) in enumerate(zip(names, read, strict=True)):
        assert values.tolist() == [0.0 if name == "loss_masks" else number] * tokens, name


def test_a_replica_without_samples_has_the_same_lists():
    """With more replicas than samples, what works on one of them must not fail on another."""
    found: list[dict[str, Any]] = []
    samples = make_samples(groups=1, size=2)
    tokens = sum(sample.response_length for sample in samples)
    batch = pack(samples, [0, 1], [1.0, 0.0], [1.0, 1.0])
    targets = Targets(**{field: torch.zeros(tokens) for field in rollout_data.OF_TARGETS.values()})
    for work in (Work([batch], [targets], [batch], dict(enumerate(samples))), Work([None], [None], [None], {})):
        rollout_data.postprocess(lambda args, rollout_id, data: found.append(dict(data)), None, 0, [work])
    some, none = found
    assert none.keys() == some.keys()
    assert {name: len(values) for name, values in none.items()} == dict.fromkeys(some, 0)
