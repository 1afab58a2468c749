"""Which GPUs go to whom, without any: a plan is made from numbers."""

from __future__ import annotations

from typing import Any

import pytest

from slime.launcher.placement import Placement, plan_placement, shared_devices, trainer_environment
from slime.launcher.settings import LauncherSettings
from slime.rollout.settings import RolloutSettings
from slime.types.errors import InvalidSetting


def plan(gpus: int, *, ranks: int = 1, backend: str = "fsdp", colocate: bool = False, **rollout: Any) -> Placement:
    launcher = LauncherSettings(
        num_rollout=1, actor_num_gpus_per_node=ranks, train_backend=backend, colocate=colocate,
        rollout_num_gpus=rollout.get("rollout_num_gpus"),
    )  # fmt: skip
    return plan_placement(launcher, RolloutSettings(hf_checkpoint="m", colocate=colocate, **rollout), gpus)


@pytest.mark.parametrize("colocate", [False, True])
def test_without_gpus_everything_is_a_process_on_the_cpu(colocate: bool) -> None:
    placement = plan(0, ranks=2, colocate=colocate)
    assert placement == Placement(2) and not placement.has_gpus
    with pytest.raises(InvalidSetting, match="--rollout-num-gpus 4: no GPU here"):
        plan(0, colocate=colocate, rollout_num_gpus=4)


@pytest.mark.parametrize("gpus, ranks, per_engine", [(1, 1, 1), (2, 2, 1), (2, 2, 2), (4, 4, 2), (4, 2, 1)])
def test_colocated_services_share_the_trainers_gpus(gpus: int, ranks: int, per_engine: int) -> None:
    placement = plan(gpus, ranks=ranks, colocate=True, rollout_num_gpus_per_engine=per_engine)
    assert (placement.trainer["num_gpus"], placement.rollout["num_gpus"]) == (1, 0)
    assert placement.shares_gpus and placement.offloads
    options = shared_devices(placement.rollout, ["2", "5"])
    assert options["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"] == "2,5" and options["num_gpus"] == 0
    assert not plan(gpus, ranks=ranks, colocate=True, offload_rollout=False).offloads


@pytest.mark.parametrize(
    "gpus, ranks, rollout, wanted",
    [
        (2, 1, {}, 1),
        (4, 2, {"rollout_num_gpus": 2}, 2),
        (4, 1, {"rollout_num_gpus_per_engine": 2}, 2),
        (4, 2, {"rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}, 2),
        (1, 1, {"rollout_external_engine_addrs": ["there:1"]}, 0),
        (1, 1, {"rollout_engine": "embedded", "rollout_engine_device": "cpu"}, 0),
    ],
)
def test_engines_of_their_own_take_other_gpus(gpus: int, ranks: int, rollout: dict[str, Any], wanted: int) -> None:
    placement = plan(gpus, ranks=ranks, **rollout)
    assert (placement.trainer_ranks, placement.trainer["num_gpus"], placement.rollout["num_gpus"]) == (ranks, 1, wanted)
    assert not placement.shares_gpus and not placement.offloads


@pytest.mark.parametrize(
    "gpus, ranks, rollout, words",
    [
        (1, 1, {}, ["1 + --rollout-num-gpus 1 = 2 GPUs", "there are 1", "--colocate"]),
        (2, 1, {"rollout_num_gpus": 2}, ["1 + --rollout-num-gpus 2 = 3 GPUs", "there are 2"]),
        (4, 3, {"rollout_num_gpus_per_engine": 2}, ["3 + --rollout-num-gpus 2 = 5 GPUs", "there are 4"]),
        (1, 2, {"colocate": True}, ["2 + --rollout-num-gpus 0 = 2 GPUs", "there are 1"]),
        (4, 2, {"colocate": True, "rollout_num_gpus": 1}, ["--rollout-num-gpus 1", "--colocate", "2"]),
        (4, 2, {"colocate": True, "rollout_num_gpus_per_engine": 4}, ["--rollout-num-gpus-per-engine 4", "2"]),
    ],
)
def test_too_few_gpus_are_an_error_with_the_sum(gpus: int, ranks: int, rollout: dict[str, Any], words: list) -> None:
    with pytest.raises(InvalidSetting) as caught:
        plan(gpus, ranks=ranks, **rollout)
    for word in words:
        assert word in str(caught.value)


def test_megatron_gets_the_one_queue_that_it_needs_unless_the_user_says(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.delenv(name, raising=False)
    megatron = LauncherSettings(num_rollout=1, train_backend="megatron", colocate=True)
    assert trainer_environment(megatron, gpus=True) == {name: "1"}
    own = LauncherSettings(num_rollout=1, train_backend="megatron", colocate=True, train_env_vars={name: "8"})
    assert trainer_environment(own, gpus=True) == {name: "8"}
    assert name not in trainer_environment(LauncherSettings(num_rollout=1), gpus=True)
    monkeypatch.setenv(name, "32")
    assert name not in trainer_environment(megatron, gpus=True)


def test_both_sides_of_a_broadcast_allocate_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NCCL_CUMEM_ENABLE"
    monkeypatch.delenv(name, raising=False)
    apart, together = LauncherSettings(num_rollout=1), LauncherSettings(num_rollout=1, colocate=True)
    assert trainer_environment(apart, gpus=True)[name] == "0"
    assert name not in trainer_environment(together, gpus=True)
    assert name not in trainer_environment(apart, gpus=False)
    monkeypatch.setenv(name, "1")
    assert name not in trainer_environment(apart, gpus=True)
