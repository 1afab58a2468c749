"""Memory that goes off the device between steps: what is released, that it comes back, and when the trainer does it."""

from typing import Any

import pytest
import torch
from trainer_stack import Stack
from trainer_tiny import Runner, make_settings

from slime.trainer.backends.base import TRAINING, WEIGHTS
from slime.trainer.step.device_memory import PARTS, DeviceMemory

BACKENDS: dict[str, dict[str, Any]] = {
    "fsdp": {"train_backend": "fsdp", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "fsdp-bf16": {"train_backend": "fsdp", "use_kl_loss": True, "kl_loss_coef": 0.1, "bf16": True},
    "fsdp-lora": {"train_backend": "fsdp", "use_kl_loss": True, "kl_loss_coef": 0.1, "bf16": True, "lora_rank": 4},
    "megatron": {"train_backend": "megatron", "use_kl_loss": True, "kl_loss_coef": 0.1},
    "megatron-bf16": {"train_backend": "megatron", "bf16": True},
}
MEGATRON = {"megatron": {}, "megatron-bf16": {"use_distributed_optimizer": True}}


def runner_of(model: str, name: str, **values: Any) -> Runner:
    runner = Runner(make_settings(model, **(values or BACKENDS[name])), megatron=MEGATRON.get(name))
    backend: Any = runner.backend
    models = backend.models if name.startswith("megatron") else [backend.policy, backend.reference]
    for parameter in (parameter for model in models if model is not None for parameter in model.parameters()):
        # On the CPU weights may be in the memory of the file that they come from, which cannot be released.
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()
    return runner


def held_bytes(runner: Runner, part: str) -> int:
    storages = [tensor.untyped_storage() for tensor, _ in runner.backend.device_tensors(part)]
    # On a GPU the counts of AdamW's steps stay in host memory.
    here = [storage for storage in storages if storage.device.type == runner.backend.device.type]
    sizes = {storage._cdata: storage.nbytes() for storage in here}
    return sum(sizes.values())


@pytest.mark.parametrize("name", BACKENDS)
def test_steps_with_memory_away_in_between_are_the_same_steps(model: str, name: str):
    def run(away: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        runner = runner_of(model, name)
        memory = DeviceMemory(runner.backend, enabled=away, device_types=(runner.backend.device.type,))
        norms = []
        for step in range(3):
            memory.release(*PARTS)
            memory.need(*PARTS)
            norms.append(runner.run(step)["train/grad_norm"])
            memory.release(TRAINING)
            with memory.held(*runner.backend.parts_of_weights()):
                weights = runner.weights()
        return norms, weights

    (norms, weights), (expected, expected_weights) = run(True), run(False)
    assert norms == expected
    assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_released_holds_no_memory(model: str, name: str):
    runner = runner_of(model, name)
    runner.run(0)
    memory = DeviceMemory(runner.backend, enabled=True, device_types=(runner.backend.device.type,))
    weights, training = held_bytes(runner, WEIGHTS), held_bytes(runner, TRAINING)
    assert weights > 0 and training > 0
    memory.release(TRAINING)
    assert held_bytes(runner, WEIGHTS) == weights
    shared = held_bytes(runner, TRAINING)
    assert shared <= weights  # an optimizer of float32 weights updates the model's own
    memory.release(WEIGHTS)
    assert held_bytes(runner, WEIGHTS) == held_bytes(runner, TRAINING) == 0
    with memory.held(WEIGHTS):
        assert held_bytes(runner, WEIGHTS) == weights
    assert held_bytes(runner, WEIGHTS) == 0
    memory.need(*PARTS)
    assert (held_bytes(runner, WEIGHTS), held_bytes(runner, TRAINING)) == (weights, training)


@pytest.mark.parametrize("bf16", [False, True])
def test_what_only_updates_read_comes_and_leaves_while_other_work_goes_on(model: str, bf16: bool):
    def run(late: bool) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
        runner = runner_of(model, "fsdp", bf16=bf16)
        memory = DeviceMemory(
            runner.backend, enabled=True, device_types=(runner.backend.device.type,), memory=lambda: (10**12, 10**12, 0)
        )
        coming: list[bool] = []
        runner.before_passes = lambda: (coming.append(bool(memory._coming)), memory.fetch())[0]
        runner.before_update = memory.arrive
        norms, sent = [], []
        for step in range(3):
            memory.release(*PARTS)
            memory.need(*PARTS, late=late)
            norms.append(runner.run(step)["train/grad_norm"])
            held = held_bytes(runner, TRAINING)
            memory.release(TRAINING, late=late)
            # It is away once the weights are sent, and they can be read before.
            assert (held_bytes(runner, TRAINING) == held) == late
            memory.need(*runner.backend.parts_of_weights(torch.bfloat16))
            sent.append({name: weight.clone() for name, weight in runner.backend.named_weights(dtype=torch.bfloat16)})
            memory.release(WEIGHTS)
            assert held_bytes(runner, TRAINING) == held_bytes(runner, WEIGHTS) == 0
        # Its copy begins when the samples are there, which do not wait behind it. The first step may have none.
        assert coming[1:] == [late] * 2
        return norms, sent

    (norms, sent), (expected, expected_sent) = run(True), run(False)
    assert norms == expected
    for weights, others in zip(sent, expected_sent, strict=True):
        assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_memory_leaves_at_once_where_engines_have_no_room_beside_it(model: str):
    runner = runner_of(model, "fsdp", bf16=True)
    runner.run(0)
    device, parameters = runner.backend.device.type, runner.backend.num_parameters
    for free, left in ((4 * parameters + 100, True), (4 * parameters + 101, False)):
        memory = DeviceMemory(
            runner.backend, enabled=True, device_types=(device,), memory=lambda free=free: (free, 1000, 0)
        )
        memory.release(TRAINING, late=True)
        assert (not memory._leaving) == left
        memory.need(*PARTS)


def test_memory_that_is_leaving_can_be_needed_again(model: str):
    runner = runner_of(model, "fsdp", bf16=True)
    memory = DeviceMemory(
        runner.backend, enabled=True, device_types=(runner.backend.device.type,), memory=lambda: (10**12, 10**12, 0)
    )
    norms = []
    for step in range(3):
        norms.append(runner.run(step)["train/grad_norm"])
        memory.release(TRAINING, late=True)
        memory.release(TRAINING, late=True)
        memory.need(TRAINING, late=True)
        memory.arrive()
    plain = Runner(make_settings(model, bf16=True))
    assert norms == [plain.run(step)["train/grad_norm"] for step in range(3)]


def test_memory_that_is_not_to_move_stays(model: str):
    runner = Runner(make_settings(model))
    for memory in (DeviceMemory(runner.backend, enabled=False), DeviceMemory(runner.backend, enabled=True)):
        before = held_bytes(runner, WEIGHTS)
        memory.release(*PARTS)
        if runner.backend.device.type == "cpu":
            assert held_bytes(runner, WEIGHTS) == before
        memory.need(*PARTS)


def test_memory_stays_where_it_has_room_beside_the_engines(model: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    runner = runner_of(model, "fsdp")
    free, held = 100, 500
    memory = DeviceMemory(
        runner.backend, enabled=True, may_stay=True, device_types=("cpu",), memory=lambda: (free, 1000, held)
    )

    def after_a_step() -> set[str]:
        memory.need(*PARTS)
        memory.release(TRAINING)
        memory.release(WEIGHTS)
        return set(memory._away)

    # Nothing is known before the engines have once had their memory beside it.
    assert after_a_step() == set(PARTS) and not memory.stays
    held, free = 0, 600
    memory.measure()
    held = 500
    assert after_a_step() == set() and memory.stays
    free = 100
    memory.measure()
    assert after_a_step() == set()
    # 600 are there, a tenth of the GPU stays free.
    held = 501
    assert after_a_step() == set(PARTS) and not memory.stays
    told = [record.getMessage() for record in caplog.records if "--offload-train" in record.getMessage()]
    assert [text.split(" the GPU")[0] for text in told] == [
        "the trainer's memory stays on",
        "the trainer's memory leaves",
    ]


def test_memory_that_stays_tells_if_the_work_has_room_too(model: str, monkeypatch: pytest.MonkeyPatch):
    runner = runner_of(model, "fsdp")
    reserved = 0
    memory = DeviceMemory(
        runner.backend, enabled=True, may_stay=True, device_types=("cpu",), memory=lambda: (700, 1000, reserved)
    )

    def trim() -> None:
        nonlocal reserved
        reserved = min(reserved, 400)

    monkeypatch.setattr(memory, "_trim", trim)
    memory.measure()
    told = []
    for at_work in (500, 601, 500):
        reserved = at_work
        memory.release(TRAINING)
        memory.release(WEIGHTS)
        told.append((memory.stays, memory.work_has_room))
    # 600 is the room. What was needed once is needed again.
    assert told == [(True, True), (True, False), (True, False)]


def test_what_is_needed_last_leaves_with_all_the_rest(model: str):
    runner = runner_of(model, "fsdp")
    held = 500
    memory = DeviceMemory(
        runner.backend, enabled=True, may_stay=True, device_types=("cpu",), memory=lambda: (100, 1000, held)
    )
    memory.measure()
    memory.release(TRAINING)
    assert not memory._away
    held = 700
    memory.release(WEIGHTS)
    assert set(memory._away) == set(PARTS)


def test_memory_leaves_in_any_case_where_it_may_not_stay(model: str):
    runner = runner_of(model, "fsdp")
    memory = DeviceMemory(runner.backend, enabled=True, device_types=("cpu",), memory=lambda: (900, 1000, 0))
    memory.measure()
    memory.release(*PARTS)
    assert set(memory._away) == set(PARTS)


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bf16"])
def test_the_trainer_holds_what_each_call_needs(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any, bf16: bool):
    stack = Stack(model, offload_train=True, bf16=bf16)
    seen: list[tuple[str, ...]] = []
    try:
        memory = stack.trainer._memory
        if stack.trainer.backend.device.type == "cpu":
            memory = stack.trainer._memory = DeviceMemory(
                stack.trainer.backend, enabled=True, device_types=("cpu",), memory=lambda: (10**9, 10**9, 0)
            )
            memory.release(*PARTS)

        def away() -> tuple[str, ...]:
            return tuple(sorted(memory._away))

        def note(*_: Any, **__: Any) -> None:
            seen.append(away())

        monkeypatch.setattr(stack.rollout, "onload", note)
        stack.client.update_weights(0, timeout=60)
        assert (seen, away()) == ([(TRAINING, WEIGHTS)], (TRAINING, WEIGHTS))
        stack.client.train_step(0, 3, timeout=60)
        assert away() == (TRAINING,)
        stack.client.save_checkpoint(0, str(tmp_path / "step"), timeout=60)
        assert away() == (TRAINING,)
        stack.client.update_weights(1, timeout=60)
        assert away() == (TRAINING, WEIGHTS)
        stack.client.export_model(str(tmp_path / "model"), timeout=60)
        assert away() == (TRAINING, WEIGHTS)
        assert stack.client.train_step(1, 3, timeout=60)["train/step"] == 2
    finally:
        stack.close()


def test_memory_is_released_for_engines_on_the_same_gpus_unless_a_flag_says_otherwise():
    assert [make_settings("m", colocate=c, offload_train=o).offloads_train for c in (False, True)
            for o in (None, True, False)] == [False, True, False, True, True, False]  # fmt: skip
